"""What part of a run's time was training.

Owns: timing the fetch of each window, and telling the time between steps in which something else
went on (evaluating, saving, generating, writing logs) from the time of training itself.
Does not own: what the seconds are divided by (default_metrics.py, speed_monitor.py).

No event comes between the end of a step's work and the fetch of the next window, so the fetch is
timed where it happens, in the strategy's `feed`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

clock = time.monotonic


class FetchTimer:
    """Seconds that a rank waited for its training windows, the last one and all."""

    def __init__(self) -> None:
        self.last_s = 0.0
        self.total_s = 0.0

    def time(self, windows: Iterator[Any]) -> Iterator[Any]:
        """The same windows, each one's fetch timed."""
        try:
            while True:
                began_s = clock()
                try:
                    window = next(windows)
                except StopIteration:
                    return
                self.last_s = clock() - began_s
                self.total_s += self.last_s
                yield window
        finally:
            close = getattr(windows, "close", None)
            if close is not None:
                close()


_timers: WeakKeyDictionary[Any, FetchTimer] = WeakKeyDictionary()


def fetch_timer(strategy: Any) -> FetchTimer:
    """The timer of a strategy's training windows; all who ask get the same one.

    Windows that the strategy hands out from its next `feed` on are timed.
    """
    timer = _timers.get(strategy)
    if timer is None:
        timer = _timers[strategy] = FetchTimer()
        _listen(strategy, timer)
    return timer


def _listen(strategy: Any, timer: FetchTimer) -> None:
    feed = strategy.feed

    def timed_feed(loader: Any, *, training: bool = True) -> Iterator[Any]:
        windows = feed(loader, training=training)
        return timer.time(iter(windows)) if training else windows

    strategy.feed = timed_feed


class TrainingTime:
    """Follows the steps of a run and adds up the time between them that was not training.

    Between two steps the loop may bring the metrics of the last one to the host, as it does before
    it logs, evaluates or saves: from there on the device is idle, so what comes then, until the
    next step begins, is something else, save for the fetch. Otherwise all of the time between
    steps counts as training.
    """

    def __init__(self) -> None:
        self.excluded_s = 0.0
        """All that was not training so far."""
        self.was_interrupted = False
        """Whether something else came between the step that is running and the one before."""
        self._fetches = FetchTimer()
        self._ended_s: float | None = None
        self._interrupted_s: float | None = None

    def begin(self, strategy: Any) -> None:
        """A run begins, or goes on from another state."""
        self.excluded_s = 0.0
        self.was_interrupted = False
        self._ended_s = self._interrupted_s = None
        self._fetches = fetch_timer(strategy)

    @property
    def fetch_s(self) -> float:
        """How long the fetch of the running step's window took."""
        return self._fetches.last_s

    def moment_s(self) -> float:
        """The clock; while something else goes on, when that began."""
        return clock() if self._interrupted_s is None else self._interrupted_s

    def begin_step(self) -> None:
        """Call first in `on_step_begin`."""
        self.was_interrupted = self._interrupted_s is not None
        if self._interrupted_s is not None:
            elsewhere_s = clock() - self._interrupted_s - self.fetch_s
            self.excluded_s += max(0.0, elsewhere_s)
        self._ended_s = self._interrupted_s = None

    def end_step(self) -> None:
        """Call in `on_step_end`."""
        self._ended_s = clock()

    def deliver(self, step: int, global_step: int) -> None:
        """Call in `on_metrics`: metrics of a step have come, maybe of an earlier one."""
        if step == global_step:
            self.drain()

    def drain(self) -> None:
        """Call when values of the step that has ended are here: the device has caught up."""
        if self._ended_s is not None and self._interrupted_s is None:
            self._interrupted_s = clock()

    def interrupt(self) -> None:
        """Call when something else than training is seen to have happened."""
        if self._interrupted_s is None:
            self._interrupted_s = self._ended_s
