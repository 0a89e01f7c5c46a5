"""Which evaluation was the best so far."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headway.args import TrainingArguments
from headway.engine.state import TrainerState
from headway.errors import ConfigError, unknown


def find_metric(metrics: Mapping[str, float], name: str) -> float:
    """A metric by its name, with or without the `eval_` prefix."""
    for key in (name, f"eval_{name}", name.removeprefix("eval_")):
        if key in metrics:
            return metrics[key]
    raise ConfigError("metric_for_best_model: " + unknown("evaluation metric", name, list(metrics)))


def update_best(state: TrainerState, args: TrainingArguments, metrics: Mapping[str, float]) -> bool:
    """Remember an evaluation that is better than all before it; NaN never is."""
    value = find_metric(metrics, args.metric_for_best_model)
    if math.isnan(value):
        return False
    best = state.best_metric
    if best is not None and not (value > best if args.greater_is_better else value < best):
        return False
    state.best_metric = value
    state.best_global_step = state.global_step
    return True
