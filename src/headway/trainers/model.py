"""Getting a model ready to train: construction, activation checkpointing, operation counts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headway.args import TrainingArguments
from headway.errors import ConfigError
from headway.trainers.plan import sample_length

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def build_model(
    model: nn.Module | None,
    model_init: Callable[[], nn.Module] | None,
    args: TrainingArguments,
    *,
    rank: int,
    enable_checkpointing: Callable[[int, nn.Module], None] | None,
) -> nn.Module:
    """The given model, or one made by `model_init` under `default_dtype`."""
    if model is None:
        assert model_init is not None, "checked by the trainer"
        model = construct(model_init, args.default_dtype)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if any(p.is_meta for p in model.parameters()):
        raise ConfigError(
            "the model's parameters are on the meta device and hold no values; materialise them "
            "(to_empty and init_weights, or load_state_dict with assign=True) first"
        )
    if args.gradient_checkpointing:
        (enable_checkpointing or enable_hf_activation_checkpointing)(rank, model)
    return model


def construct(model_init: Callable[[], nn.Module], dtype: str | None) -> nn.Module:
    """Make a model while `dtype` is torch's default floating-point type."""
    if dtype is None:
        return model_init()
    before = torch.get_default_dtype()
    torch.set_default_dtype(_DTYPES[dtype])
    try:
        return model_init()
    finally:
        torch.set_default_dtype(before)


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
