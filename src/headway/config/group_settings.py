"""What the settings in the `config` of an optimizer group may be.

Owns: the check of a value by the setting's name, and by the default that an optimizer has for it.
Needs no torch. Does not own: which settings an optimizer knows (optim/build.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from headway.errors import unknown

_NEVER_NEGATIVE = ("eps", "lr", "momentum", "weight_decay")
_SWITCHES = ("amsgrad", "centered", "decoupled_weight_decay", "maximize", "nesterov")
_MACHINE_SWITCHES = ("capturable", "differentiable", "foreach", "fused")
# Made from the entry itself.
RESERVED = ("group_name", "param_names", "params")
# As options of the arguments are called.
_SPELLINGS = {
    "adam_epsilon": "eps",
    "epsilon": "eps",
    "learning_rate": "lr",
    **dict.fromkeys(("adam_beta1", "adam_beta2", "beta1", "beta2"), "betas"),
}
_NUMBER = "a number"
_SWITCH = "true or false"


def check_setting(name: str, value: Any, default: Any = None) -> str | None:
    """What is wrong with a setting, in words that follow its name; None if it may do.

    `default` is the optimizer's own value for it, where that is known: another kind is wrong.
    """
    wanted = _wanted(name, value, default)
    return None if wanted is None else f"must be {wanted}, got {value!r}{_hint(value)}"


def _wanted(name: str, value: Any, default: Any) -> str | None:
    if name in RESERVED:
        return "left out: it follows from the group"
    if name in _MACHINE_SWITCHES:
        return None if isinstance(value, bool | None) else _SWITCH
    if name in _SWITCHES or isinstance(default, bool):
        return None if isinstance(value, bool) else _SWITCH
    if name == "betas":
        return _wanted_betas(value, default)
    if name == "eps" and (_is_row(default) or (default is None and _is_row(value))):
        return None if _is_row(value) else "a list"  # some have two
    if name in _NEVER_NEGATIVE:
        return None if _is_number(value) and float(value) >= 0 else f"{_NUMBER}, 0 or more"
    if _is_number(default):
        return None if _is_number(value) else _NUMBER
    if _is_row(default) and default and all(map(_is_number, default)):
        fits = _is_row(value) and len(value) == len(default) and all(map(_is_number, value))
        return None if fits else f"a list of {len(default)} numbers"
    return None


def _wanted_betas(value: Any, default: Any) -> str | None:
    count = len(default) if _is_row(default) else None
    fits = (
        _is_row(value)
        and (len(value) > 1 if count is None else len(value) == count)
        and all(_is_number(item) and 0 <= float(item) < 1 for item in value)
    )
    return None if fits else f"a list of {count or 2} numbers in [0, 1)"


def _is_row(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_number(value: Any) -> bool:
    """A finite number, also one in a tensor."""
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        return False
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError, RuntimeError):
        return False


def _hint(value: Any) -> str:
    try:
        number = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        return ""
    return "; write the number without quotes" if math.isfinite(number) else ""


def unknown_setting(name: Any, allowed: Sequence[str], of: str = "") -> str:
    """The words for a setting that an optimizer does not have."""
    meant = _SPELLINGS.get(name)
    if meant in allowed:
        return f"unknown setting{of} {name!r}; did you mean {meant!r}?"
    return unknown(f"setting{of}", name, allowed)
