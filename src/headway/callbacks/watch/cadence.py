"""At which steps a norm logger writes a record.

Owns: the choice between evaluations, log records and a period of its own, and whether the step
under way may be such a step. Does not own: when a trainer evaluates and logs (engine/triggers.py).
"""

from __future__ import annotations

from typing import Any

from headway.engine.state import TrainerState
from headway.engine.triggers import NEVER_BY_STEPS
from headway.errors import ConfigError


class Cadence:
    """Every `log_steps` steps. None: at evaluations, in a run without them at log records."""

    def __init__(self, owner: str, log_steps: int | None) -> None:
        if log_steps is not None and (
            not isinstance(log_steps, int) or isinstance(log_steps, bool) or log_steps < 1
        ):
            raise ConfigError(
                f"{owner}.log_steps: {log_steps!r} given; allowed: a whole number from 1 up, or "
                "None to follow evaluations"
            )
        self.log_steps = log_steps
        self.event = "on_step_end"
        """The event at which a record is written."""

    def start(self, args: Any) -> None:
        """Choose the event for a run."""
        if self.log_steps is not None:
            self.event = "on_step_end"
        else:
            self.event = "on_evaluate" if args.do_eval else "on_log_step"

    def may_come(self, args: Any, state: TrainerState) -> bool:
        """Whether a record may be written for the step under way; asked before it is done.

        A cadence in tokens, epochs or time is not known so early: then every step may be one.
        """
        step = state.global_step + 1
        if self.log_steps is not None:
            return step % self.log_steps == 0
        if step == state.max_steps:
            return True
        if self.event == "on_log_step":
            first = args.logging_first_step and step == 1
            return first or _divides(args.logging_strategy, state.logging_steps, step)
        if _divides(args.eval_strategy, state.eval_steps, step, args.eval_delay):
            return True
        return bool(args.eval_on_save) and _divides(args.save_strategy, state.save_steps, step)

    def is_due(self, event: str, state: TrainerState) -> bool:
        """Whether an event, at which things of the finished step are written, is the one."""
        if event != self.event:
            return False
        return self.log_steps is None or state.global_step % self.log_steps == 0


def _divides(strategy: str, period_steps: int, step: int, delay: int = 0) -> bool:
    if strategy == "no":
        return False
    if strategy == "epoch" or period_steps >= NEVER_BY_STEPS:
        return True
    return step % period_steps == 0 and step >= delay
