"""Which evaluation was the best so far, and whether there was one of where a run stands."""

from __future__ import annotations

from collections.abc import Mapping

from headway.args import TrainingArguments
from headway.checkpoint.best import is_better, lookup_metric
from headway.engine.state import TrainerState
from headway.errors import ConfigError, unknown


def require_metric(metrics: Mapping[str, float], name: str, option: str) -> float:
    """A metric by its name, with or without the `eval_` prefix; absent is the user's mistake."""
    value = lookup_metric(metrics, name)
    if value is None:
        problem = f"{option}: " + unknown("evaluation metric", name, list(metrics))
        if name.removeprefix("eval_") == "loss":
            problem += ". There is no loss, since eval_dataset has no label that counts"
        raise ConfigError(problem)
    return value


def update_best(state: TrainerState, args: TrainingArguments, metrics: Mapping[str, float]) -> bool:
    """Remember an evaluation that is better than all before it; NaN never is."""
    value = require_metric(metrics, args.metric_for_best_model, "metric_for_best_model")
    if not is_better(value, state.best_metric, greater_is_better=bool(args.greater_is_better)):
        return False
    state.best_metric = value
    state.best_global_step = state.global_step
    return True


def evaluation_of_step(state: TrainerState, args: TrainingArguments) -> dict[str, float] | None:
    """What the history of a run has of an evaluation of the step where it stands.

    None too if it lacks a metric that checkpoints are ranked by now.
    """
    wanted = {args.metric_for_best_model}
    if args.preserve_best_model:
        wanted.add(args.best_model_metric)
    for log in reversed(state.log_history):
        if log.get("step") == state.global_step and "eval_runtime" in log:
            found = {name: value for name, value in log.items() if name not in ("step", "epoch")}
            return found if all(lookup_metric(found, one) is not None for one in wanted) else None
    return None
