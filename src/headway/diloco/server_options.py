"""The options of a server, checked. Importing it imports no torch.

Owns: defaults and allowed values. Does not own: what they do (rounds.py, outer.py, server.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from headway.diloco.rounds import MODES, Rules
from headway.errors import ConfigError, unknown

if TYPE_CHECKING:
    from headway.diloco.outer import OuterOptimizer


@dataclass(frozen=True)
class ServerOptions:
    """How a server works; every mistake is told at once."""

    num_workers: int
    """How many are expected: a round is over as soon as so many have submitted."""
    min_workers: int = 1
    """How many a round needs when it does not wait for more."""
    mode: str = "sync"
    """sync: rounds of all workers; async: every submission is an outer step of its own."""
    num_fragments: int = 1
    sync_every: int | None = None
    """Local steps between submissions that workers with `dylu` are told, before their speed; the
    others keep their own, and warn where it differs. None: each worker's own."""
    dylu: bool = False
    """Recommend fewer steps to slower workers, and weigh them by the steps they made."""
    deadline_s: float = 600.0
    """From a round's first submission until it goes on with those that are there."""
    heartbeat_s: float = 30.0
    missed_heartbeats: float = 3.0
    """Heartbeats that a worker may miss before it is let go."""
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    accumulate: str = "float32"
    """What the server computes in: float32 or float64."""
    async_delay: int | None = None
    """Asynchronous mode: updates between two uses of the momentum; None: num_workers."""
    async_spread: float = 0.0
    max_staleness: int | None = None
    """Asynchronous mode: rounds that an update may be behind; None: four for each worker, and at
    least 32. Each of the others makes a round while a worker is at its steps."""
    max_update_norm: float | None = None
    max_norm_ratio: float | None = 20.0
    max_attempts: int = 16
    max_uploads: int = 8
    """Bodies that are received at one time."""
    upload_timeout_s: float = 3600.0
    keep_states: int = 2
    keep_submissions: bool = False
    """Keep every body, so that the ledger can be replayed."""

    def __post_init__(self) -> None:
        problems = self._find_problems()
        if self.mode in MODES and not problems:
            try:
                self.make_optimizer_settings()
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)

    def _find_problems(self) -> list[str]:
        problems = [
            f"{name}={value!r}: allowed is a whole number of {least} or more"
            for name, least in _WHOLE.items()
            if (value := getattr(self, name)) is not None
            and (type(value) is not int or value < least)
        ]
        problems += [
            f"{name}={value!r}: allowed is a number above 0"
            for name in _POSITIVE
            if (value := getattr(self, name)) is not None and not _is_positive(value)
        ]
        problems += [
            f"{name}={value!r}: allowed is true or false"
            for name in _FLAGS
            if not isinstance(value := getattr(self, name), bool)
        ]
        if self.mode not in MODES:
            problems.append(unknown("mode", self.mode, MODES))
        if not problems and self.min_workers > self.num_workers:
            problems.append(
                f"min_workers={self.min_workers}: allowed is 1 to num_workers={self.num_workers}"
            )
        return problems

    @property
    def rules(self) -> Rules:
        return Rules(
            expected=self.num_workers,
            minimum=self.min_workers,
            mode=self.mode,
            num_fragments=self.num_fragments,
            sync_every=self.sync_every,
            dylu=self.dylu,
            deadline_s=self.deadline_s,
            heartbeat_s=self.heartbeat_s,
            missed_heartbeats=self.missed_heartbeats,
            max_staleness=self.most_stale,
            max_update_norm=self.max_update_norm,
            max_norm_ratio=self.max_norm_ratio,
            max_attempts=self.max_attempts,
            max_workers=max(_MOST_WORKERS, self.num_workers),
        )

    @property
    def most_stale(self) -> int:
        """`max_staleness`, or what it is where none is given."""
        given = self.max_staleness
        return max(32, 4 * self.num_workers) if given is None else given

    def make_optimizer_settings(self) -> dict[str, Any]:
        """What an `OuterOptimizer` is made of; checked without torch."""
        problems: list[str] = []
        if not _is_positive(self.outer_lr):
            problems.append(f"outer_lr={self.outer_lr!r}: allowed is a number above 0")
        if not isinstance(self.outer_momentum, int | float) or not 0 <= self.outer_momentum < 1:
            problems.append(
                f"outer_momentum={self.outer_momentum!r}: allowed is a number from 0 to below 1"
            )
        if self.accumulate not in ("float32", "float64"):
            problems.append(unknown("accumulate", self.accumulate, ("float32", "float64")))
        delay = self.num_workers if self.async_delay is None else self.async_delay
        spread = self.async_spread
        is_number = isinstance(spread, int | float) and not isinstance(spread, bool)
        if not is_number or not 0 <= spread <= 1 / delay:
            problems.append(
                f"async_spread={self.async_spread!r}: allowed is a number from 0 to 1/{delay}, "
                "one part of async_delay"
            )
        if problems:
            raise ConfigError(problems)
        return {
            "lr": self.outer_lr,
            "momentum": self.outer_momentum,
            "nesterov": self.nesterov,
            "accumulate": self.accumulate,
            "delay": delay,
            "spread": self.async_spread,
        }

    def make_optimizer(self) -> OuterOptimizer:
        from headway.diloco.outer import OuterOptimizer

        return OuterOptimizer(**self.make_optimizer_settings())


# Of registrations, beside which more workers than expected may come for a time.
_MOST_WORKERS = 1024
_WHOLE = {
    "num_workers": 1,
    "min_workers": 1,
    "num_fragments": 1,
    "sync_every": 1,
    "async_delay": 1,
    "max_staleness": 0,
    "max_attempts": 1,
    "max_uploads": 1,
    "keep_states": 1,
}
_POSITIVE = (
    "deadline_s",
    "heartbeat_s",
    "missed_heartbeats",
    "max_update_norm",
    "max_norm_ratio",
    "upload_timeout_s",
)


_FLAGS = ("dylu", "nesterov", "keep_submissions")


def make_options(given: Mapping[str, Any]) -> ServerOptions:
    """From arguments by name; a name that there is not, or that is missing, is a mistake too."""
    allowed = [field.name for field in fields(ServerOptions)]
    problems = [unknown("option", name, allowed) for name in given if name not in allowed]
    if "num_workers" not in given:
        problems.append("num_workers: not given; allowed is a whole number of 1 or more")
    if problems:
        raise ConfigError(problems)
    return ServerOptions(**given)


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0
