"""What part of a run's time was training.

Owns: telling the time between steps in which something else went on (evaluating, saving,
generating, writing logs and traces) from the time of training itself.
Does not own: the measures of the loop (engine/timing.py), what the seconds are divided by
(default_metrics.py, speed_monitor.py).
"""

from __future__ import annotations

from headway.engine import timing
from headway.engine.timing import LoopTiming


def clock() -> float:
    """The time of the loop's own measures."""
    return timing.clock()


class TrainingTime:
    """Follows the steps of a run and adds up the time between them that was not training.

    Between two steps the loop may bring the metrics of the last one to the host, as it does before
    it logs, evaluates or saves: from there on the device has no more than the update to do, so what
    comes then, until the next step begins, is something else, save for update and fetch. Otherwise
    all of the time between steps counts as training, but for what a callback itself set aside.
    """

    def __init__(self) -> None:
        self.was_interrupted = False
        """Whether something else came between the step that is running and the one before."""
        self.begin(LoopTiming())

    def begin(self, loop: LoopTiming) -> None:
        """A run begins, or goes on from another state."""
        self.was_interrupted = False
        self._loop = loop
        self._elsewhere_s = 0.0
        self._ended_s: float | None = None
        self._interrupted_s: float | None = None
        self._was_updating = False
        # What was set aside: at the end of the step, when something else began; and what of it
        # lies within that and must not count twice.
        self._aside_at_end_s = self._aside_at_interruption_s = loop.aside_s
        self._aside_not_counted_s = loop.aside_s

    @property
    def excluded_s(self) -> float:
        """All that was not training so far."""
        return self.elsewhere_s + self.aside_s

    @property
    def elsewhere_s(self) -> float:
        """What all ranks did together that was not training."""
        return self._elsewhere_s

    @property
    def aside_s(self) -> float:
        """What callbacks of this rank set aside besides; the others may have waited for it."""
        aside_s = self._loop.aside_s
        if self._interrupted_s is not None:
            aside_s = self._aside_at_interruption_s
        return max(0.0, aside_s - self._aside_not_counted_s)

    @property
    def fetch_s(self) -> float:
        """How long the fetch of the running step's window took."""
        return self._loop.fetch_s

    def moment_s(self) -> float:
        """The clock; while something else goes on, when that began."""
        return clock() if self._interrupted_s is None else self._interrupted_s

    def begin_step(self) -> None:
        """Call first in `on_step_begin`."""
        aside_s = self._loop.aside_s
        set_aside = self._ended_s is not None and aside_s > self._aside_at_end_s
        self.was_interrupted = self._interrupted_s is not None or set_aside
        if self._interrupted_s is not None:
            elsewhere_s = clock() - self._interrupted_s - self.fetch_s
            if self._was_updating:
                elsewhere_s -= self._loop.update_s
            self._elsewhere_s += max(0.0, elsewhere_s)
            self._aside_not_counted_s += aside_s - self._aside_at_interruption_s
        self._ended_s = self._interrupted_s = None

    def end_step(self) -> None:
        """Call in `on_step_end`."""
        self._ended_s, self._aside_at_end_s = clock(), self._loop.aside_s

    def deliver(self, step: int, global_step: int) -> None:
        """Call in `on_metrics`: metrics of a step have come, maybe of an earlier one."""
        if step == global_step:
            self.drain()

    def drain(self) -> None:
        """Call when values of the step that has ended are here: the device has caught up with it,
        but for the update at most."""
        if self._ended_s is not None and self._interrupted_s is None:
            self._interrupted_s = clock()
            self._was_updating = self._loop.is_updating
            self._aside_at_interruption_s = self._loop.aside_s

    def interrupt(self) -> None:
        """Call when something else than training is seen to have happened."""
        if self._interrupted_s is None and self._ended_s is not None:
            self._interrupted_s, self._was_updating = self._ended_s, False
            self._aside_at_interruption_s = self._aside_at_end_s
