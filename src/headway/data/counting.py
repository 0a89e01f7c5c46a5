"""What a batch amounts to: target tokens, input tokens, samples.

Owns: the three counts that normalise the loss and drive tokens/s.
Does not own: the loss itself (models), nor sums over windows and ranks (loader, engine).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

IGNORED_LABEL = -100


def count_targets(batch: Any) -> int | torch.Tensor:
    """Labels other than -100 that a model is to predict, else samples.

    Token labels of a dict belong to the inputs beside them, so a causal model predicts
    `labels[..., 1:]`. Where they have not the shape of `input_ids`, and none of these counts, but
    the first of a row does, it is a label of another kind. Those of a pair (inputs, labels) belong
    to the outputs, and those beside `decoder_input_ids` have been shifted already: all of them
    count.
    A tensor only for labels on a device other than the CPU, where a number would need a sync.
    """
    labels = _labels_of(batch)
    if labels is None or labels.is_floating_point():
        return count_samples(batch)
    shifted = are_beside_inputs(batch, labels)
    of_tokens = shifted and getattr(batch.get("input_ids"), "shape", None) == labels.shape
    if labels.device.type != "cpu":
        every = (labels != IGNORED_LABEL).sum()
        if not shifted:
            return every
        later = (labels[..., 1:] != IGNORED_LABEL).sum()
        return later if of_tokens else torch.where(later > 0, later, every)
    # On small batches numpy costs a fraction of torch, and contiguous a fraction of strided.
    kept = labels.numpy() != IGNORED_LABEL
    first = np.count_nonzero(kept[..., 0]) if shifted and kept.size else 0
    number = int(np.count_nonzero(kept))
    later_number = number - int(first)
    return later_number if of_tokens else later_number or number


def count_labels(batch: Any) -> int | torch.Tensor:
    """Labels other than -100, for a model that predicts each at its place; else samples."""
    labels = _labels_of(batch)
    if labels is None or labels.is_floating_point():
        return count_samples(batch)
    number = (labels != IGNORED_LABEL).sum()
    return int(number) if labels.device.type == "cpu" else number


def are_beside_inputs(batch: Any, labels: torch.Tensor) -> bool:
    """Whether token labels are those of the inputs, so that a place's target is the next label."""
    return isinstance(batch, Mapping) and labels.dim() >= 2 and "decoder_input_ids" not in batch


def _labels_of(batch: Any) -> torch.Tensor | None:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        labels = batch[1]
    return labels if isinstance(labels, torch.Tensor) else None


def count_tokens(batch: Any) -> int:
    """Input tokens that are not padding; samples where there are no `input_ids`."""
    if not isinstance(batch, Mapping):
        return count_samples(batch)
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        return count_samples(batch)
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.device.type == "cpu" and mask.shape == ids.shape:
        return int(np.count_nonzero(mask.numpy()))
    documents = batch.get("document_ids")
    if isinstance(documents, torch.Tensor) and documents.device.type == "cpu":
        return int(np.count_nonzero(documents.numpy() >= 0))
    return ids.numel()


def count_samples(batch: Any) -> int:
    """The first dimension of the first tensor in the batch; 1 if there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    values = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        return 1
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.shape[0] if value.dim() else 1
    return len(batch) if isinstance(batch, (list, tuple)) else 1
