"""When and how evaluators run: the options that the callback and its configurations share.

Owns: their checks and the arithmetic of the cadence. Does not own: what is done then
(evaluator_callback.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.callbacks.watch.ranges import require_count, require_flag, require_positive
from headway.config.duration import Duration
from headway.errors import ConfigError, unknown

ERROR_POLICIES = ("raise", "skip")


@dataclass(frozen=True)
class EvalOptions:
    """The options of `EvaluatorCallback`, checked; it says what they mean."""

    eval_interval: int | None
    fixed_steps: frozenset[int]
    eval_on_startup: bool
    eval_on_finish: bool
    cancel_after_first_eval: bool
    eval_duration: Duration
    log_interval: int
    with_evaluation: bool | None
    time_budget_s: float | None
    evaluator_errors: str

    @classmethod
    def check(cls, kind: str, *, fixed_steps: Any, eval_duration: Any, **given: Any) -> EvalOptions:
        """The options as given to a class called `kind`, or what is wrong with them."""
        require_count(f"{kind}: eval_interval", given["eval_interval"], least=1, optional=True)
        require_count(f"{kind}: log_interval", given["log_interval"], least=1)
        for option in ("eval_on_startup", "eval_on_finish", "cancel_after_first_eval"):
            require_flag(f"{kind}: {option}", given[option])
        if given["with_evaluation"] is not None:
            require_flag(f"{kind}: with_evaluation", given["with_evaluation"])
        require_positive(f"{kind}: time_budget_s", given["time_budget_s"], optional=True)
        if given["evaluator_errors"] not in ERROR_POLICIES:
            what = unknown("evaluator_errors", str(given["evaluator_errors"]), ERROR_POLICIES)
            raise ConfigError(f"{kind}: {what}")
        steps = check_steps(kind, fixed_steps)
        try:
            duration = Duration.parse(eval_duration)
        except ConfigError as error:
            raise ConfigError([f"{kind}: eval_duration: {p}" for p in error.problems]) from error
        return cls(fixed_steps=steps, eval_duration=duration, **given)

    def is_due(self, step: int) -> bool:
        """Whether the step just done is one to evaluate after."""
        by_interval = self.eval_interval is not None and step % self.eval_interval == 0
        return by_interval or step in self.fixed_steps


def check_steps(kind: str, fixed_steps: Any) -> frozenset[int]:
    """The option `fixed_steps` of a class called `kind`."""
    steps = [] if fixed_steps is None else fixed_steps
    if isinstance(steps, str) or not isinstance(steps, Sequence):
        raise ConfigError(f"{kind}: fixed_steps: {steps!r} given; allowed: a list of steps")
    for step in steps:
        require_count(f"{kind}: fixed_steps", step, least=1)
    return frozenset(steps)
