"""What a trainer needs to know of a model: activation checkpointing, operation counts."""

from __future__ import annotations

from typing import Any

from torch import nn

from headway.models.operations import count_matmul_parameters
from headway.strategies import recompute
from headway.trainers.plan import sample_length


def enable_hf_activation_checkpointing(rank: int, module: nn.Module) -> None:
    """Recompute whole blocks: by the switch that transformers models and ours have, or by hand."""
    recompute.enable(module)


def flops_per_token(model: nn.Module, dataset: Any) -> float:
    """Floating-point operations of one training step per token."""
    count = getattr(getattr(model, "config", None), "flops_per_token", None)
    length = sample_length(dataset)
    if length is not None and callable(count):
        return float(count(length))
    told = getattr(model, "matmul_parameters", None)  # a part of a model tells for the whole
    return 6.0 * (told() if callable(told) else count_matmul_parameters(model))
