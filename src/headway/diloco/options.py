"""The options of a worker, checked. Importing it imports no torch.

Owns: defaults and allowed values. Does not own: where they come from (the callback).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError, unknown

COMMS = ("float32", "bf16", "int8")


@dataclass(frozen=True)
class WorkerOptions:
    """How a worker exchanges; every mistake is told at once."""

    sync_every: int = 500
    """Local steps from one exchange to the next."""
    num_fragments: int = 1
    """Parts of the model that take turns; 1 exchanges all of it at once."""
    comm: str = "bf16"
    """How pseudo-gradients travel: float32, bf16 or int8 (with what it loses added to the next)."""
    bf16_fetch: bool = False
    """Whether parameters come back rounded to bfloat16; the server keeps them in float32."""
    dylu: bool = False
    """Whether the server's recommendation for `sync_every`, by the worker's speed, is followed."""
    heartbeat_interval: float = 30.0
    timeout: float = 600.0
    """Seconds to wait for the other workers of a round before training goes on alone."""
    max_sync_retries: int = 3
    overlap_steps: int | None = None
    """Steps trained while an exchange is under way. None: 0, with fragments until the next turn."""
    merge_alpha: float = 1.0
    """How much of what was learned during an overlap is kept, from 0 to 1."""

    def __post_init__(self) -> None:
        problems = _find_problems(self)
        if problems:
            raise ConfigError(problems)


def _find_problems(options: WorkerOptions) -> list[str]:
    found = []
    for name, least in (("sync_every", 1), ("num_fragments", 1), ("max_sync_retries", 0)):
        given = getattr(options, name)
        if not _is_count(given, least):
            found.append(f"{name}: {given!r} given; allowed: a whole number from {least} up")
    for name in ("heartbeat_interval", "timeout"):
        given = getattr(options, name)
        if not _is_number(given) or given <= 0:
            found.append(f"{name}: {given!r} given; allowed: a finite number of seconds above 0")
    if options.comm not in COMMS:
        found.append(unknown("comm", options.comm, COMMS))
    for name in ("dylu", "bf16_fetch"):
        given = getattr(options, name)
        if not isinstance(given, bool):
            found.append(f"{name}: {given!r} given; allowed: true or false")
    alpha = options.merge_alpha
    if not _is_number(alpha) or not 0 <= alpha <= 1:
        found.append(f"merge_alpha: {alpha!r} given; allowed: from 0 to 1")
    overlap = options.overlap_steps
    if overlap is not None and not _is_count(overlap, 0):
        found.append(
            f"overlap_steps: {overlap!r} given; allowed: a whole number from 0 up, or none"
        )
    if found:
        return found
    turns = options.sync_every // options.num_fragments
    if turns < 1:
        found.append(
            f"num_fragments: {options.num_fragments} given; allowed: at most sync_every "
            f"({options.sync_every}), as each has its turn in that many steps"
        )
    elif overlap is not None and overlap > turns:
        found.append(
            f"overlap_steps: {overlap} given; allowed: at most {turns}, the steps from one turn to "
            "the next (sync_every / num_fragments)"
        )
    return found


def _is_count(given: Any, least: int) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= least


def _is_number(given: Any) -> bool:
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    return is_number and math.isfinite(given)
