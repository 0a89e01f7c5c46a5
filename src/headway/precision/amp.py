"""Automatic mixed precision: weights stay as they are, operations run in fewer bits.

Owns: what `mixed_precision` means on a device. Does not own: where it is entered (strategies).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from headway.errors import ConfigError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Context = Callable[[], AbstractContextManager[Any]]


def autocast(mixed_precision: str | None, device: torch.device) -> Context:
    """Makes the context under which a model is called."""
    if mixed_precision in (None, "no"):
        return nullcontext
    assert mixed_precision is not None
    if mixed_precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError(
            f"mixed_precision='bf16': {torch.cuda.get_device_name(device)} cannot compute in "
            "bfloat16; use 'fp16' or 'no'"
        )
    # Weights cast for one forward are kept until its end, so that a tied or reused one is cast
    # once.
    return partial(torch.autocast, device.type, dtype=_DTYPES[mixed_precision])


def check_scaled(model: nn.Module) -> None:
    """Refuse weights whose gradients could not be unscaled without loss."""
    halves = [n for n, p in model.named_parameters() if p.dtype == torch.float16]
    if halves:
        raise ConfigError(
            f"mixed_precision='fp16' needs weights in float32, but {len(halves)} parameters are "
            f"float16 ({halves[0]}, ...); leave default_dtype at float32"
        )
