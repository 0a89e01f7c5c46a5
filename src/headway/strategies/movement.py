"""Moving a batch of any shape to a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def move_batch(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on `device`; its form stays."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move_batch(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_batch(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move_batch(value, device) for value in batch)
    return batch
