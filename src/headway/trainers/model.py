"""What a trainer needs to know of a model: activation checkpointing, operation counts."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from headway.models.operations import count_matmul_parameters
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
    told = getattr(model, "matmul_parameters", None)  # a part of a model tells for the whole
    return 6.0 * (told() if callable(told) else count_matmul_parameters(model))
