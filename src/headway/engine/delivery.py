"""Metrics on their way to those who read them: every step, in order, on the main thread.

Owns: at which steps metrics are flushed, `on_metrics`, the sums behind log records, and what a
step that was not finite leads to. Does not own: how a flush is done (flushing), when a log record
is due (loop).

A flush for a log record, a save or an evaluation is done at once: the record needs its numbers,
and a save must not come before a bad loss is known. In between, a flush begins at the end of one
step and is delivered at the end of the next, so that neither the device nor another rank is
waited for. Both are decided by the step alone, hence alike on all ranks.
"""

from __future__ import annotations

import logging

from headway.args import TrainingArguments
from headway.engine.events import EventBus
from headway.engine.flushing import Flusher
from headway.engine.interval import Interval
from headway.engine.metrics import GRAD_NORM, STEP_SKIPPED, TRAIN_LOSS, Steps, is_overflow
from headway.engine.state import TrainerState

logger = logging.getLogger(__name__)

_NUM_RECENT = 20


class NonFiniteError(RuntimeError):
    """A loss or gradient was not finite and the arguments ask to raise."""


class MetricDelivery:
    """Takes metrics from the flusher to the callbacks and into log records."""

    def __init__(
        self, args: TrainingArguments, state: TrainerState, bus: EventBus, flusher: Flusher
    ) -> None:
        self._args, self._state, self._bus, self._flusher = args, state, bus, flusher
        self.interval = Interval(state)
        """What happened since the last log record."""
        self.recent: dict[int, dict[str, float]] = {}
        """The newest steps that were handed out, for whoever asks after a failure."""
        self._losses_sum, self._num_steps = 0.0, 0
        self._marks: dict[int, tuple[float, int]] = {}
        """These two by the steps to which the run may go back."""
        self._flushed_step: int | None = None

    @property
    def mean_loss(self) -> float:
        """Over the steps of this process that were taken, without those that were given up."""
        return self._losses_sum / self._num_steps if self._num_steps else 0.0

    def collect(self) -> None:
        """At the end of a step: begin a flush where one is due."""
        step, every = self._state.global_step, self._args.metrics_collect_interval
        if self._flushed_step is None or (step % every == 0 and step != self._flushed_step):
            self._flushed_step = step
            self._flusher.start()

    def deliver(self) -> None:
        """Hand out the flush that the step before began, if it did."""
        if self._flusher.busy:
            self._hand_out(self._flusher.finish())

    def flush(self) -> None:
        """Hand out everything that was recorded up to here."""
        self.deliver()
        self._flushed_step = self._state.global_step
        self._hand_out(self._flusher.flush())

    def start_interval(self) -> None:
        """Count anew: a log record was made."""
        self.interval = Interval(self._state)

    def mark(self) -> None:
        """Hand out everything; the run may go back to here."""
        self.flush()
        self._marks[self._state.global_step] = self._losses_sum, self._num_steps

    def go_back(self) -> None:
        """The run has gone back: what came after the step where it stands did not happen."""
        step = self._state.global_step
        self._marks = {marked: sums for marked, sums in self._marks.items() if marked <= step}
        self._losses_sum, self._num_steps = next(reversed(self._marks.values()), (0.0, 0))
        for given_up in [kept for kept in self.recent if kept > step]:
            del self.recent[given_up]
        self.start_interval()

    def pending(self) -> Steps:
        """What was recorded and not handed out."""
        return self._flusher.pending()

    def close(self, *, wait: bool = True) -> None:
        """The run is over: nothing is handed out any more."""
        self._flusher.close(wait=wait)

    def _hand_out(self, steps: list[tuple[int, dict[str, float]]]) -> None:
        skipped = []
        self._remember(steps)
        for step, metrics in steps:
            if GRAD_NORM in metrics:  # a step of the loop, not only records of callbacks
                if self.interval.add(metrics):
                    if not is_overflow(metrics):
                        skipped.append((step, metrics))
                else:
                    self._losses_sum += metrics[TRAIN_LOSS]
                    self._num_steps += 1
            elif STEP_SKIPPED in metrics:
                self.interval.add_left_out()
            self._bus.fire("on_metrics", step=step, metrics=metrics)
        if skipped:
            self._on_nonfinite(skipped)

    def _remember(self, steps: list[tuple[int, dict[str, float]]]) -> None:
        for step, metrics in steps:
            known = self.recent.get(step)
            self.recent[step] = metrics if known is None else {**known, **metrics}
        for old in sorted(self.recent)[:-_NUM_RECENT]:
            del self.recent[old]

    def _on_nonfinite(self, steps: list[tuple[int, dict[str, float]]]) -> None:
        by_decider: dict[str | None, list[int]] = {}
        for step, metrics in steps:
            by_decider.setdefault(self._find_decider(metrics), []).append(step)
        left = by_decider.pop(None, None)
        for decider, those in by_decider.items():
            logger.info("%s (%s decides what follows)", self._describe(those), decider)
        if left is None:
            return
        action, message = self._args.nonfinite_action, self._describe(left)
        if action == "raise":
            raise NonFiniteError(message)
        logger.warning("%s (nonfinite_action=%s)", message, action)
        if action == "stop":
            self._bus.control.should_training_stop = True
            self._bus.stopped_by = self._bus.stopped_by or ("loop", "nonfinite", "stop")

    def _find_decider(self, metrics: dict[str, float]) -> str | None:
        """The callback that decides what follows a bad step; None: the option does."""
        for name, one in self._bus.callbacks.items():
            if getattr(one, "decides_nonfinite", False):
                sees = getattr(one, "sees_nonfinite", None)  # not everyone's base is ours
                if sees is None or sees(metrics):
                    return name
        return None

    def _describe(self, steps: list[int]) -> str:
        which = ", ".join(map(str, steps[:5])) + (" ..." if len(steps) > 5 else "")
        outcome = "the update was withheld, the weights are as before"
        if self._args.fuse_optim_with_backward:
            outcome = (
                "updates with a gradient that was not finite were withheld; "
                "fuse_optim_with_backward may have updated other weights before it came"
            )
        return f"loss or gradient was not finite at step {which}; {outcome}"
