"""Metrics that a user's function computes from all that the model gave in an evaluation.

Owns: what the function is called with, and what it may return. Does not own: the pass over the data
(engine/evaluate.py), what ranks send each other of it (outputs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headway.engine.evaluate import EvalResult
from headway.errors import ConfigError
from headway.trainers.outputs import Array

PADDING = -100
"""Fills what is shorter than the longest batch, as in Hugging Face's Trainer."""


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
    predictions, labels = pad_batches(result.logits), pad_batches(result.labels)
    if predictions is None or labels is None:
        missing = "labels" if labels is None else "logits from the model"
        raise ConfigError(f"compute_metrics: the {prefix} data gave no {missing} to compare")
    found = compute(EvalPrediction(predictions, labels))
    if not isinstance(found, Mapping):
        raise ConfigError(f"compute_metrics returned {found!r}; allowed: a dict of numbers")
    metrics = {}
    for key, value in found.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"compute_metrics returned {value!r} for {key!r}; allowed: a number"
            ) from None
        metrics[key if key.startswith(f"{prefix}_") else f"{prefix}_{key}"] = number
    return metrics


def pad_batches(tensors: list[Tensor]) -> Array | None:
    """One array of all batches; those with smaller samples are filled up."""
    if not tensors:
        return None
    batches = [torch.atleast_1d(tensor) for tensor in tensors]
    if len({batch.dim() for batch in batches}) > 1:
        shapes = sorted({tuple(batch.shape) for batch in batches})
        raise ConfigError(f"compute_metrics: batches cannot be joined, of shapes {shapes}")
    sizes = [max(lengths) for lengths in zip(*(batch.shape[1:] for batch in batches))]
    return np.concatenate([_fill_up(batch, sizes).numpy() for batch in batches])


def _fill_up(batch: Tensor, sizes: list[int]) -> Tensor:
    gaps = [wanted - length for wanted, length in zip(sizes, batch.shape[1:])]
    if not any(gaps):
        return batch
    # `pad` begins with the last dim, and wants what to add before and after.
    return F.pad(batch, [n for gap in reversed(gaps) for n in (0, gap)], value=PADDING)
