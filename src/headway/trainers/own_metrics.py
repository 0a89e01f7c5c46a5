"""Metrics that a user's function computes from all that the model gave in an evaluation.

Owns: what the function is called with, and what it may return. Does not own: the pass over the data
(engine/evaluate.py), what ranks send each other of it (outputs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from headway.engine.evaluate import EvalResult
from headway.errors import ConfigError, naming
from headway.trainers.outputs import Array, join_batches


class EvalPrediction(NamedTuple):
    """What `compute_metrics` is called with, as Hugging Face's: all samples of an evaluation."""

    predictions: Array
    label_ids: Array


ComputeMetrics = Callable[[EvalPrediction], Mapping[str, Any]]
PreprocessLogits = Callable[[Tensor, Tensor | None], Tensor]


def compute_own_metrics(
    compute: ComputeMetrics, result: EvalResult, prefix: str
) -> dict[str, float]:
    """What the function makes of a pass, under names with the pass's prefix."""
    predictions, labels = join_batches(result.logits), join_batches(result.labels)
    if predictions is None or labels is None:
        missing = "batch has 'labels'" if labels is None else "output of the model has logits"
        raise ConfigError(
            f"compute_metrics: no {missing} in the {prefix} data, and it is given nothing else; "
            "give a callback with on_evaluate that measures the rest"
        )
    with naming("compute_metrics"):
        found = compute(EvalPrediction(predictions, labels))
    if not isinstance(found, Mapping):
        raise ConfigError(f"compute_metrics returned {found!r}; allowed: a dict of numbers")
    metrics = {}
    for key, value in found.items():
        if not isinstance(key, str):
            raise ConfigError(f"compute_metrics returned the key {key!r}; allowed: a name")
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"compute_metrics returned {value!r} for {key!r}; allowed: a number"
            ) from None
        metrics[key if key.startswith(f"{prefix}_") else f"{prefix}_{key}"] = number
    return metrics
