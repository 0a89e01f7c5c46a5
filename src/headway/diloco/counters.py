"""What a worker counts and measures, for checkpoints and for records.

Owns: the names of `../../docs/diloco.md`, the speed of steps. Does not own: when anything is
counted (worker.py). The same on all ranks of a group: the leader tells the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SAVED = (
    "sync_count",
    "total_sync_time",
    "sync_retries",
    "reconnections",
    "dylu_adjustments",
    "fragment_syncs",
    "refused_syncs",
    "sent_bytes",
    "received_bytes",
)


@dataclass
class Counters:
    """Counts over the whole run, also over resumes, and figures of the last sync."""

    sync_count: int = 0
    """Exchanges of the whole model."""
    total_sync_time: float = 0.0
    """Seconds in which training stood still for exchanges."""
    sync_retries: int = 0
    reconnections: int = 0
    dylu_adjustments: int = 0
    fragment_syncs: int = 0
    refused_syncs: int = 0
    """Updates of this worker that the server did not take."""
    sent_bytes: int = 0
    received_bytes: int = 0
    last_sync_time: float = 0.0
    last_sent_bytes: int = 0
    last_received_bytes: int = 0
    drift: float = 0.0
    """The length of the last pseudo-gradient, as a part of that of the parameters."""

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in SAVED:
            value = state.get(name, 0)
            setattr(self, name, float(value) if name == "total_sync_time" else int(value))

    def metrics(self, *, dylu: bool, num_fragments: int) -> dict[str, float]:
        """As records have them."""
        found: dict[str, float] = {
            "sync_count": self.sync_count,
            "last_sync_time": self.last_sync_time,
            "total_sync_time": self.total_sync_time,
            "last_send_mb": self.last_sent_bytes / 1e6,
            "last_recv_mb": self.last_received_bytes / 1e6,
            "total_send_mb": self.sent_bytes / 1e6,
            "total_recv_mb": self.received_bytes / 1e6,
            "drift": self.drift,
        }
        if dylu:
            found["dylu_adjustments"] = self.dylu_adjustments
        if num_fragments > 1:
            found |= {"num_fragments": num_fragments, "fragment_syncs": self.fragment_syncs}
        for name in ("sync_retries", "reconnections", "refused_syncs"):
            if getattr(self, name):
                found[name] = getattr(self, name)
        return found


@dataclass
class Speed:
    """Steps a second since the last sync, without the sync itself."""

    clock: Callable[[], float] = time.monotonic
    _num: int = 0
    _first_s: float = 0.0
    _last_s: float = field(default=0.0)

    def step(self) -> None:
        """A step has ended."""
        self._last_s = self.clock()
        if not self._num:
            self._first_s = self._last_s
        self._num += 1

    def restart(self) -> None:
        """What follows is measured anew; the last figure stays until there is one."""
        self._per_second, self._num = self.per_second, 0
        self._restarted_s = self.clock()

    _per_second: float = 0.0
    _restarted_s: float | None = None

    @property
    def per_second(self) -> float:
        num, span_s = self._num - 1, self._last_s - self._first_s
        if self._num == 1 and self._restarted_s is not None:
            # A worker that exchanges after every step would else keep its first figure for ever.
            num, span_s = 1, self._last_s - self._restarted_s
        return num / span_s if num > 0 and span_s > 0 else self._per_second
