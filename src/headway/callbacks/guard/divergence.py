"""Ends a run that has diverged, or takes it back to where it had not.

Owns: which metric is watched, where it is found, and which of its values was the last good one.
Does not own: when a curve has diverged (divergence_rule.py), what follows (recovery.py).

The watched numbers are the same on all ranks: records, evaluations and metrics are joined before
they are delivered. So are the decisions, which the loop agrees on anyway.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from headway.callbacks.guard.divergence_rule import DivergenceRule
from headway.callbacks.guard.recovery import Recovery
from headway.callbacks.watch.ranges import (
    require_count,
    require_flag,
    require_name,
    require_positive,
)
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError, unknown

logger = logging.getLogger(__name__)

ACTIONS = ("stop", "abort", "rollback")
_EVALUATION = "eval_"
_OF_EACH_STEP = ("loss", "train/CE loss", "grad_norm", "optim/total grad norm")


class DivergenceDetector(TrainerCallback):
    """Watches `loss` (or `eval_loss`, or `metric_key`) and acts when it has diverged.

    That is: its average, exponential with weight `smoothing`, lies `threshold` or more above the
    best average so far, or at `relative_threshold` times the best or more, at `patience`
    observations in a row; or it is not finite, then at once. With `greater_is_better` above and
    below are exchanged. The first `warmup` observations are not judged, nor are `cooldown` of them
    after a divergence that was acted on. An observation is a log record or an evaluation; with
    `every_step`, each step.

    `action`: `stop` ends the run with its last save and evaluation, `abort` ends it at once and
    writes nothing, `rollback` returns to the last checkpoint that is known to be good, up to
    `max_rollbacks` times. What is then left out (`skip_batches`): the `offending` steps since the
    last good state, if that did not help or with `all` the data of all steps since the checkpoint,
    or `none`. Base learning rates are multiplied by `learning_rate_factor`.

    A good state is one on which a good value was measured. A loss is measured before the update of
    its step, so the loss of a step speaks for the state after the step before it.
    """

    def __init__(
        self,
        smoothing: float = 0.3,
        threshold: float | None = 1.0,
        relative_threshold: float | None = None,
        patience: int = 3,
        warmup: int = 10,
        action: str = "stop",
        use_eval_loss: bool = False,
        metric_key: str | None = None,
        *,
        greater_is_better: bool = False,
        cooldown: int = 10,
        every_step: bool = False,
        max_rollbacks: int = 3,
        skip_batches: str = "offending",
        learning_rate_factor: float | None = None,
    ) -> None:
        kind = type(self).__name__
        _check_thresholds(kind, smoothing, threshold, relative_threshold)
        require_count(f"{kind}: patience", patience, least=1)
        require_count(f"{kind}: warmup", warmup)
        require_count(f"{kind}: cooldown", cooldown)
        for name, flag in (
            ("use_eval_loss", use_eval_loss),
            ("greater_is_better", greater_is_better),
            ("every_step", every_step),
        ):
            require_flag(f"{kind}: {name}", flag)
        if metric_key is not None:
            require_name(f"{kind}: metric_key", metric_key)
        self.metric_key = metric_key or ("eval_loss" if use_eval_loss else "loss")
        self.every_step = every_step
        if every_step and self.metric_key.startswith(_EVALUATION):
            raise ConfigError(
                f"{kind}: every_step: True given, but {self.metric_key!r} is of evaluations; "
                f"allowed: false"
            )
        self.rule = DivergenceRule(
            smoothing=smoothing,
            threshold=threshold,
            relative_threshold=relative_threshold,
            patience=patience,
            warmup=warmup,
            cooldown=cooldown,
            greater_is_better=greater_is_better,
        )
        self.recovery = Recovery(
            kind,
            action,
            ACTIONS,
            max_rollbacks=max_rollbacks,
            skip_batches=skip_batches,
            learning_rate_factor=learning_rate_factor,
        )
        # Whoever watches something else would not see it.
        self.decides_nonfinite = action == "rollback" and self.metric_key in _OF_EACH_STEP
        self._source: str | None = None
        """The event that brings the metric: one that two events bring is observed once."""
        self._lacking: dict[str, Mapping[str, Any]] = {}
        """What came without the metric, by where it came."""
        self._good_step = self._last_step = 0
        self._told_nonfinite = False

    # Around the steps

    def _forget_run(self) -> None:
        self.rule.load_state_dict({})
        self._good_step = self._last_step = 0
        self.recovery.forget()

    def on_train_begin(self, args: Any, state: TrainerState, trainer: Any) -> None:
        self._source = None
        self._lacking = {}
        self._told_nonfinite = False
        if self.rule.observation_count == 0:
            self._good_step = self._last_step = state.global_step
        if self.metric_key.startswith(_EVALUATION) and trainer.eval_dataset is None:
            raise ConfigError(
                f"{self.name}: metric_key={self.metric_key!r} needs evaluations, and there is no "
                f"eval_dataset"
            )
        no_records = args.logging_strategy == "no" and args.log_every is None
        if no_records and not self._by_step and self.metric_key in _OF_EACH_STEP:
            raise ConfigError(
                f"{self.name}: metric_key={self.metric_key!r} is taken from log records, and "
                f"logging_strategy='no' makes none; set every_step=True, or another "
                f"logging_strategy"
            )
        self.recovery.begin(args, state, trainer)

    def on_step_begin(self, state: TrainerState, control: TrainerControl) -> None:
        self.recovery.begin_step(state, control)

    def on_save(self, step: int, checkpoint_path: str, trainer: Any) -> None:
        self.recovery.note_save(step, checkpoint_path, trainer)
        self.recovery.note_good(self._good_step, trainer)

    def on_load(self, state: TrainerState, path: str, trainer: Any) -> None:
        self.recovery.note_load(state, trainer, path)

    # Observations

    def sees_nonfinite(self, metrics: Mapping[str, float]) -> bool:
        from headway.engine.metrics import ALIASES

        value = metrics.get(ALIASES.get(self.metric_key, self.metric_key))
        return value is not None and not math.isfinite(value)

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any],
        trainer: Any,
    ) -> None:
        if self._by_step or self.metric_key.startswith(_EVALUATION):
            return
        if self.metric_key in logs:
            self._observe(
                "on_log", state.global_step, logs[self.metric_key], state, control, trainer
            )
        elif "grad_norm" in logs:
            self._miss("on_log", logs, args)

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any],
        trainer: Any,
    ) -> None:
        if self._by_step:
            return
        if self.metric_key in metrics:
            self._observe(
                "on_evaluate", state.global_step, metrics[self.metric_key], state, control, trainer
            )
        elif "eval_runtime" in metrics:  # not one of other data, under another prefix
            self._miss("on_evaluate", metrics, args)

    def on_metrics(
        self,
        state: TrainerState,
        control: TrainerControl,
        step: int,
        metrics: Mapping[str, float],
        trainer: Any,
    ) -> None:
        from headway.engine.metrics import ALIASES, is_overflow

        value = metrics.get(ALIASES.get(self.metric_key, self.metric_key))
        if value is None:
            return
        if self._by_step:
            self._observe("on_metrics", step, value, state, control, trainer)
        elif self.decides_nonfinite and not math.isfinite(value):
            # Whoever decides about it need not wait for the record.
            settled = self.recovery.pending or control.should_abort_without_save
            if not is_overflow(metrics) and not settled:
                self._act(f"{self.metric_key} is {value} at step {step}", step, control, state)
        elif self.rule.is_calm and self.rule.is_near_best(value):
            # A record covers many steps; this tells where among them it went wrong.
            self._note_good(step - 1, trainer)

    def on_train_end(self, state: TrainerState) -> None:
        if self._source is None and state.global_step and state.is_world_process_zero:
            logger.warning("%s watched nothing: %r never came", self.name, self.metric_key)

    @property
    def _by_step(self) -> bool:
        # A name with a slash is that of a metric, which records do not have.
        return self.every_step or "/" in self.metric_key

    def _observe(
        self,
        source: str,
        step: int,
        given: Any,
        state: TrainerState,
        control: TrainerControl,
        trainer: Any,
    ) -> None:
        self._source = self._source or source
        if source != self._source or self.recovery.pending:
            return
        value = float(given)
        if not math.isfinite(value):
            # Neither good nor counted; the rule's best and average are kept clear of it.
            if not self._told_nonfinite:
                self._told_nonfinite = self.recovery.action != "rollback"
                self._act(f"{self.metric_key} is {value} at step {step}", step, control, state)
            return
        diverged = self.rule.observe(value)
        logger.debug("%s: %s %g at step %d", self.name, self.metric_key, value, step)
        if diverged:
            why = f"{self.metric_key} has diverged: {value:.6g} at step {step}, "
            why += self.rule.describe()
            self.rule.settle()
            self._act(why, step, control, state)
        elif self.rule.is_calm and source == "on_evaluate":
            self._note_good(step, trainer)
        elif self.rule.is_calm:
            self._note_good(step - 1 if source == "on_metrics" else self._last_step, trainer)
        self._last_step = step

    def _note_good(self, step: int, trainer: Any) -> None:
        if step > self._good_step:
            self._good_step = step
            self.recovery.note_good(step, trainer)

    def _act(self, why: str, step: int, control: TrainerControl, state: TrainerState) -> None:
        self.recovery.act(why, control, state, good_step=self._good_step, bad_step=step)

    def _miss(self, source: str, found: Mapping[str, Any], args: Any) -> None:
        """Refuse a name that nothing has which could have it: records of steps, evaluations."""
        self._lacking |= {source: found}
        of_evaluations = self.metric_key.startswith(_EVALUATION)
        could = [] if of_evaluations else ["on_log"]
        could += ["on_evaluate"] if of_evaluations or args.do_eval else []
        if self._source is None and all(place in self._lacking for place in could):
            names = [name for each in self._lacking.values() for name in each]
            problem = unknown("metric", self.metric_key, dict.fromkeys(names))
            raise ConfigError(f"{self.name}: metric_key: {problem}")

    # State

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": 1,
            **self.rule.state_dict(),
            "good_step": self._good_step,
            "last_step": self._last_step,
            **self.recovery.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rule.load_state_dict(state)
        self._good_step = int(state.get("good_step") or 0)
        self._last_step = int(state.get("last_step") or 0)
        self.recovery.load_state_dict(state)


def _check_thresholds(kind: str, smoothing: Any, threshold: Any, relative_threshold: Any) -> None:
    require_positive(f"{kind}: smoothing", smoothing)
    if smoothing > 1:
        raise ConfigError(f"{kind}: smoothing: {smoothing!r} given; allowed: above 0 and at most 1")
    require_positive(f"{kind}: threshold", threshold, optional=True)
    require_positive(f"{kind}: relative_threshold", relative_threshold, optional=True)
    if relative_threshold is not None and relative_threshold <= 1:
        raise ConfigError(
            f"{kind}: relative_threshold: {relative_threshold!r} given; allowed: a factor above 1, "
            f"or none"
        )
    if threshold is None and relative_threshold is None:
        raise ConfigError(
            f"{kind}: threshold and relative_threshold: None given for both; set one of them"
        )
