"""How long a checkpoint is to stay: the words for it, and what several requests come to.

Owns: the lifetimes, their order, and how ranks agree on one. Does not own: who asks (callbacks),
what becomes of a checkpoint (checkpoint/retention.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.errors import ConfigError, unknown

if TYPE_CHECKING:
    from headway.engine.state import TrainerControl

LIFETIMES = ("ephemeral", "regular", "permanent")
"""From the weakest to the strongest: of several requests for one step the strongest counts."""

# Above the bits of the loop's own flags, in the same set.
_BITS = {name: 1 << number for number, name in enumerate(LIFETIMES, start=40)}
REGULAR_SAVE = _BITS["regular"]
PERMANENT_SAVE = _BITS["permanent"]
LASTING_SAVE = REGULAR_SAVE | PERMANENT_SAVE
ANY_SAVE = sum(_BITS.values())


def check_lifetime(given: str) -> str:
    """Refuse a word that is none."""
    if given not in LIFETIMES:
        raise ConfigError("save_lifetime: " + unknown("lifetime", given, LIFETIMES))
    return given


def save_bits(control: TrainerControl, *, blocked: bool = False) -> int:
    """The saves that are asked for; ephemeral ones are not made while they are `blocked`."""
    bits = REGULAR_SAVE * control.should_save
    if control.save_lifetime != "regular":
        bits |= _BITS[check_lifetime(control.save_lifetime)]
    return bits & ~_BITS["ephemeral"] if blocked else bits


def strongest(bits: int) -> str:
    """The lifetime that agreed bits come to; a save without any is a regular one."""
    asked = [name for name in LIFETIMES if bits & _BITS[name]]
    return asked[-1] if asked else "regular"
