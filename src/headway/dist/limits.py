"""How long ranks wait for each other in one collective.

Owns: the limit of this process, and giving it to groups. Does not own: the groups (group.py,
strategies/), what comes of a rank that is gone (watch.py), which is noticed at once.
"""

from __future__ import annotations

import datetime
import math
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TIMEOUT_S = 1800.0
"""Unless something else is asked for."""

_LONGEST_S = 1e9
"""Thirty years. gloo adds nanoseconds to the time of day: ten times as much is in the past."""

_limit_s = _given_s = TIMEOUT_S


def collective_limit_s() -> float:
    """How long to wait for a rank that is alive."""
    return _limit_s


def collective_limit() -> datetime.timedelta:
    """The same as torch takes it, for a group that is about to be made."""
    return datetime.timedelta(seconds=_limit_s)


def set_collective_limit(seconds: float) -> None:
    """Wait so long in the groups that are made from now on."""
    global _limit_s, _given_s
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"timeout_s={seconds!r}: a number of seconds above 0 is needed")
    _limit_s = _given_s = min(float(seconds), _LONGEST_S)


def limit_group(group: ProcessGroup | Any) -> None:
    """Give the limit to a group that is there already; torch makes some with one of its own."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(collective_limit(), group)


def limit_collectives(seconds: float | None) -> None:
    """Wait so long in the default group, that of the host, and all that are made from now on.

    None: as long as `set_collective_limit` said, also after a run with a limit of its own.
    Collective where the host's group is not there yet.
    """
    global _limit_s
    if seconds is None and _limit_s == _given_s:
        return
    from torch import distributed

    from headway.dist.group import host_group

    _limit_s = _given_s if seconds is None else min(float(seconds), _LONGEST_S)
    limit_group(distributed.group.WORLD)
    limit_group(host_group())
