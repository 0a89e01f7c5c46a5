"""Ends a run whose evaluations no longer get better.

Owns: what an improvement is, and how many evaluations without one are too many. Does not own: when
evaluations happen, nor which checkpoint is the best.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from headway.callbacks.watch.ranges import require_count, require_flag, require_name
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError, nearest, unknown

logger = logging.getLogger(__name__)


class EarlyStoppingCallback(TrainerCallback):
    """Stops after `early_stopping_patience` evaluations in a row without an improvement.

    An improvement is a value that is better than the best so far by more than
    `early_stopping_threshold`; one that is not a number is none. Watched is `metric`, else the
    option `metric_for_best_model`. Which direction is better follows from `greater_is_better`, else
    for `metric_for_best_model` from the option of that name, else from the name: losses,
    perplexities and error rates go down.

    `patience` and `min_delta` are other names of the first two. A `metric` with a slash in its name
    is taken from the metrics of steps.
    """

    def __init__(
        self,
        early_stopping_patience: int = 1,
        early_stopping_threshold: float | None = 0.0,
        *,
        patience: int | None = None,
        metric: str | None = None,
        min_delta: float | None = None,
        greater_is_better: bool | None = None,
    ) -> None:
        kind = type(self).__name__
        one = _choose(
            kind, "early_stopping_patience", early_stopping_patience, 1, "patience", patience
        )
        require_count(f"{kind}: {one[0]}", one[1], least=1)
        two = _choose(
            kind, "early_stopping_threshold", early_stopping_threshold, 0.0, "min_delta", min_delta
        )
        _require_least(f"{kind}: {two[0]}", two[1])
        if metric is not None:
            require_name(f"{kind}: metric", metric)
        if greater_is_better is not None:
            require_flag(f"{kind}: greater_is_better", greater_is_better)
        self.early_stopping_patience: int = one[1]
        self.early_stopping_threshold = float(two[1] or 0.0)
        self.metric = metric
        self.greater_is_better = greater_is_better
        self.early_stopping_patience_counter = 0
        self.best: float | None = None
        self._watched: list[Any] | None = None
        """What the count and the best are of: a metric, and whether it goes up."""
        self._came = False
        self._others: set[str] = set()
        """Metrics of steps that came while the watched one did not."""

    def _forget_run(self) -> None:
        self.early_stopping_patience_counter, self.best = 0, None

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        self._came = False
        self._others.clear()
        watched = [self._name(args).removeprefix("eval_"), self._goes_up(args)]
        if self._watched not in (None, watched):  # what was counted is of another metric
            self.early_stopping_patience_counter, self.best = 0, None
        self._watched = watched
        self._stay_stopped(state, control)
        if self._by_step:
            return
        if not args.do_eval or trainer.eval_dataset is None:
            what = (
                f"eval_strategy={args.eval_strategy!r} plans none"
                if trainer.eval_dataset is not None
                else "there is no eval_dataset"
            )
            raise ConfigError(
                f"{self.name} needs evaluations, and {what}; set eval_strategy to 'steps' or "
                f"'epoch' and give eval_dataset"
            )

    def _stay_stopped(self, state: TrainerState, control: TrainerControl) -> None:
        """A run that it has stopped is over, and not trained on when it is started again."""
        if self.early_stopping_patience_counter < self.early_stopping_patience:
            return
        control.should_training_stop = True
        self._came = True
        if state.is_world_process_zero:
            logger.warning(
                "%s: the run was stopped at step %d, after %d in a row without an improvement; "
                "raise early_stopping_patience to go on",
                self.name,
                state.global_step,
                self.early_stopping_patience_counter,
            )

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any],
    ) -> None:
        if self._by_step:
            return
        name = self._name(args)
        for found in (name, f"eval_{name}", name.removeprefix("eval_")):
            if metrics.get(found) is not None:
                self._judge(found, float(metrics[found]), state.global_step, args, state, control)
                return
        if "eval_runtime" not in metrics:  # of other data, under another prefix
            return
        option = "metric" if self.metric else "metric_for_best_model"
        raise ConfigError(f"{self.name}: {option}: " + unknown("evaluation metric", name, metrics))

    def on_metrics(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        step: int,
        metrics: Mapping[str, float],
    ) -> None:
        if not self._by_step:
            return
        value = metrics.get(str(self.metric))
        if value is None:
            if not self._came:
                self._others.update(metrics)
        else:
            self._came = True
            self._judge(str(self.metric), value, step, args, state, control)

    def on_train_end(self, state: TrainerState) -> None:
        # Not an error at once: who brings it may do so for the first time at the end.
        if self._by_step and not self._came and state.is_world_process_zero:
            near = nearest(str(self.metric), self._others)
            logger.warning(
                "%s watched nothing: metric: %r never came%s",
                self.name,
                self.metric,
                "" if near is None else f"; did you mean {near!r}?",
            )

    @property
    def _by_step(self) -> bool:
        return self.metric is not None and "/" in self.metric

    def _name(self, args: Any) -> str:
        return self.metric or str(args.metric_for_best_model)

    def _goes_up(self, args: Any) -> bool:
        if self.greater_is_better is not None:
            return self.greater_is_better
        from headway.config.arguments import greater_is_better

        watched, known = self._name(args), str(args.metric_for_best_model)
        if watched.removeprefix("eval_") == known.removeprefix("eval_"):
            return bool(args.greater_is_better)
        return greater_is_better(watched)

    def _judge(
        self,
        name: str,
        value: float,
        step: int,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
    ) -> None:
        gain = math.inf
        if self.best is None and self.metric is None:
            self.best = state.best_metric  # of a run that began without this callback
        if self.best is not None:
            gain = value - self.best if self._goes_up(args) else self.best - value
        # Anything compared with NaN is false: such a value is neither an improvement nor the best.
        if not math.isnan(value) and gain > self.early_stopping_threshold:
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1
        if math.isfinite(value) and gain > 0:
            self.best = value
        if self.early_stopping_patience_counter < self.early_stopping_patience:
            return
        if state.is_world_process_zero and not control.should_training_stop:
            logger.warning(
                "%s: %s is %g at step %d, the best was %s; %d in a row without an improvement",
                self.name,
                name,
                value,
                step,
                "none" if self.best is None else f"{self.best:g}",
                self.early_stopping_patience_counter,
            )
        control.should_training_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": 1,
            "early_stopping_patience_counter": self.early_stopping_patience_counter,
            "best": self.best,
            "watched": self._watched,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What is missing starts anew; the limits are those of this object.

        The state of Hugging Face's callback of this name is taken as well.
        """
        saved = state.get("attributes") or state
        self.early_stopping_patience_counter = int(
            saved.get("early_stopping_patience_counter") or 0
        )
        best = state.get("best")
        self.best = None if best is None else float(best)
        self._watched = state.get("watched")


def _choose(
    kind: str, name: str, given: Any, default: Any, other: str, as_other: Any
) -> tuple[str, Any]:
    """One value from its two names."""
    if as_other is None:
        return name, given
    if given != default and given != as_other:
        raise ConfigError(
            f"{kind}: {other}: {as_other!r} given, and {name}: {given!r}; they are one: give one"
        )
    return other, as_other


def _require_least(name: str, given: Any) -> None:
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if given is not None and (not number or not math.isfinite(given) or given < 0):
        raise ConfigError(f"{name}: {given!r} given; allowed: a finite number from 0 up, or none")
