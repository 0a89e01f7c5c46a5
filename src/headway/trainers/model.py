"""What a trainer needs to know of a model: activation checkpointing, operation counts."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from headway.trainers.plan import sample_length

logger = logging.getLogger(__name__)


def enable_hf_activation_checkpointing(rank: int, module: nn.Module) -> None:
    """Switch on recomputation through the method that transformers models and ours have."""
    enable = getattr(module, "gradient_checkpointing_enable", None)
    if not callable(enable):
        logger.warning(
            "gradient_checkpointing=True has no effect: %s has no gradient_checkpointing_enable; "
            "pass enable_activation_checkpoint_fn",
            type(module).__name__,
        )
        return
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def flops_per_token(model: nn.Module, dataset: Any) -> float:
    """Floating-point operations of one training step per token."""
    count = getattr(getattr(model, "config", None), "flops_per_token", None)
    length = sample_length(dataset)
    if length is not None and callable(count):
        return float(count(length))
    # Six per parameter that takes part in a matrix product; embeddings look up, they do not.
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    parameters = sum(p.numel() for p in model.parameters() if id(p) not in embedded)
    head = _output_weight(model)
    tied = head is not None and id(head) in embedded
    return 6.0 * (parameters + (head.numel() if head is not None and tied else 0))


def _output_weight(model: nn.Module) -> torch.Tensor | None:
    try:
        head = getattr(model, "get_output_embeddings", lambda: None)()
    except NotImplementedError:  # transformers models without one
        return None
    weight = getattr(head, "weight", None)
    return weight if isinstance(weight, torch.Tensor) else None
