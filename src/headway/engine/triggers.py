"""When something is due: every N steps, tokens, epochs or minutes; and when a run is over.

Owns the arithmetic of cadence and length. It is counted from the start of the run, never from the
resume point, so a resumed run logs, evaluates and saves at the steps of an uninterrupted one.
Does not own what is done when a trigger fires.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from headway.config.duration import Duration
from headway.engine.state import TrainerState

NEVER_BY_STEPS = sys.maxsize


@dataclass
class Clock:
    """Seconds of training: those of earlier runs plus those since this one began.

    One that `stands` stays at the start: among several ranks the clock of one decides for all.
    """

    started_at_s: float
    earlier_s: float = 0.0
    stands: bool = False

    def of_run(self, now_s: float) -> float:
        return self.earlier_s + self.of_process(now_s)

    def of_process(self, now_s: float) -> float:
        return 0.0 if self.stands else now_s - self.started_at_s

    def leave_out(self, seconds: float) -> None:
        """Have so many seconds not count as training; those of the process go on."""
        if not self.stands:
            self.earlier_s -= seconds


def _how_far(state: TrainerState, seconds: float) -> dict[str, Any]:
    """How far a run is, in the units of a duration."""
    return {
        "step": state.global_step,
        "tokens": state.num_input_tokens_seen,
        "epoch": state.epoch,
        "seconds": seconds,
    }


class Trigger:
    """Fires at multiples of a period, measured in steps, tokens, epochs or seconds."""

    def __init__(
        self,
        strategy: str,
        steps: int,
        every: Duration | None = None,
        *,
        delay: float = 0,
        first_step: bool = False,
    ) -> None:
        if every is None and strategy == "steps":
            every = Duration.steps(steps)
        self.every = every
        self.at_epoch_end = every is None and strategy == "epoch"
        self._delay = delay
        self._first_step = first_step
        self._periods_done = 0

    @property
    def active(self) -> bool:
        return self.every is not None or self.at_epoch_end

    @property
    def period_steps(self) -> int:
        """The period as Hugging Face's state shows it; one that is not in steps never divides."""
        if self.every is not None and self.every.unit == "steps":
            return max(1, int(self.every.value))
        return NEVER_BY_STEPS

    def start(self, state: TrainerState, run_seconds: float) -> None:
        """Count from where the run stands, so that a resume does not fire what was done."""
        self._periods_done = self._periods(state, run_seconds)

    def _periods(self, state: TrainerState, run_seconds: float) -> int:
        if self.every is None:
            return 0
        progress = self.every.progress(**_how_far(state, run_seconds))
        # The small addition keeps 0.1 + 0.2 epochs from falling just short of 0.3.
        return math.floor(progress / self.every.value + 1e-9)

    def due(self, state: TrainerState, run_seconds: float) -> bool:
        """Whether the step just done crossed a multiple of the period."""
        if self.every is None:
            return self._first_step and state.global_step == 1 and self.at_epoch_end
        periods = self._periods(state, run_seconds)
        crossed = periods > self._periods_done
        self._periods_done = max(self._periods_done, periods)
        if self._first_step and state.global_step == 1:
            return True
        return crossed and state.global_step >= self._delay

    def due_at_epoch_end(self, state: TrainerState) -> bool:
        return self.at_epoch_end and state.epoch >= self._delay


class Length:
    """How long a run is: a budget over all resumes, and a limit for this process."""

    def __init__(
        self, max_steps: int | None, train_for: Duration | None, stop_at: Duration | None
    ) -> None:
        self.max_steps = max_steps
        self._train_for = train_for
        self._stop_at = stop_at
        self._stop_by_s: float | None = None

    def change(self, max_steps: int) -> None:
        """Have the budget be so many steps, and nothing else."""
        self.max_steps, self._train_for = max_steps, None

    def stop_by(self, moment_s: float | None) -> None:
        """End this process at a moment of the monotonic clock, as `stop_at` does after a time."""
        self._stop_by_s = moment_s

    def finished(self, state: TrainerState, clock: Clock, now_s: float) -> bool:
        """Whether the run's budget is used up."""
        if self.max_steps is not None and state.global_step >= self.max_steps:
            return True
        length = self._train_for
        return length is not None and length.due(**_how_far(state, clock.of_run(now_s)))

    def interrupted(self, state: TrainerState, clock: Clock, now_s: float) -> bool:
        """Whether this process must stop here although the budget is not used up."""
        stop = self._stop_at
        if stop is not None and stop.due(**_how_far(state, clock.of_process(now_s))):
            return True
        return self._is_past(clock, now_s)

    def out_of_time(self, clock: Clock, now_s: float) -> bool:
        """Whether this process has used up a limit in wall time."""
        stop = self._stop_at
        if stop is not None and stop.unit == "seconds" and clock.of_process(now_s) >= stop.value:
            return True
        return self._is_past(clock, now_s)

    def _is_past(self, clock: Clock, now_s: float) -> bool:
        return self._stop_by_s is not None and not clock.stands and now_s >= self._stop_by_s
