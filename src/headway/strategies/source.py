"""Where a strategy gets its model from: a ready one, or a function that makes one.

Owns: construction under a dtype, whole or on the meta device. Does not own: placement, wrapping and
initial values of sharded models (strategies, models/initial.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.data.fetch import preserve_global_randomness
from headway.errors import ConfigError

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass
class ModelSource:
    """One run's model, not yet placed."""

    model: nn.Module | None = None
    """A ready model."""
    make: Callable[[], nn.Module] | None = None
    """Makes one; called under `default_dtype`."""
    default_dtype: str | None = None
    make_meta: Callable[[], nn.Module] | None = None
    """Makes it under `torch.device("meta")`, where `make` would read files; else `make` does."""
    weights: Path | None = None
    """The folder that holds its initial values, where `make` reads them from one."""
    prepare: Callable[[nn.Module], Any] | None = None
    """Done to every module that will be trained, for example activation checkpointing."""
    device: torch.device | None = None
    """Where `make` is called; None: on the host."""
    make_blank: Callable[[], nn.Module | None] | None = None
    """Makes it with memory on the device and no values, for a checkpoint that is about to bring
    them all; it gives None where that cannot be."""

    @property
    def ready(self) -> bool:
        """Whether the model exists already."""
        return self.model is not None

    def build(self) -> nn.Module:
        """The whole model with its values: the ready one, or a new one.

        One that a checkpoint is about to fill may have none yet.
        """
        model = self.model
        if model is None:
            assert self.make is not None, "checked by the trainer"
            model = None if self.make_blank is None else self.make_blank()
        if model is None:
            assert self.make is not None
            with nullcontext() if self.device is None else torch.device(self.device):
                model = construct(self.make, self.default_dtype)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if any(p.is_meta for p in model.parameters()):
            raise ConfigError(
                "the model's parameters are on the meta device and hold no values; materialise "
                "them (to_empty and init_weights, or load_state_dict with assign=True) first"
            )
        return model

    def build_meta(self) -> nn.Module:
        """The model's shapes without its values; needs `model_init`."""
        make = self.make_meta or self.make
        if make is None:
            raise ConfigError("model_init: needed to build the model on the meta device")
        with torch.device("meta"):
            return construct(make, self.default_dtype)

    def describe(self) -> str:
        """The model's tensors and ties as JSON; empty where only building it could tell."""
        model = self.model
        if model is None:
            try:
                with preserve_global_randomness():
                    model = self.build_meta()
            except Exception:  # it needs values; what else is wrong with it `build` will say
                return ""
        first_names: dict[int, str] = {}
        described = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                first = first_names.setdefault(id(value), name)
                tie = "" if first == name else f", tied to {first}"
                described[f"model: {name}"] = f"{value.dtype} {list(value.shape)}{tie}"
        return json.dumps(described)

    def finish(self, module: nn.Module) -> nn.Module:
        """Prepare a module, the whole model or a part of it, for training."""
        if self.prepare is not None:
            self.prepare(module)
        return module


def construct(make: Callable[[], nn.Module], dtype: str | None) -> nn.Module:
    """Make a model while `dtype` is torch's default floating-point type."""
    if dtype is None:
        return make()
    before = torch.get_default_dtype()
    torch.set_default_dtype(_DTYPES[dtype])
    try:
        return make()
    finally:
        torch.set_default_dtype(before)
