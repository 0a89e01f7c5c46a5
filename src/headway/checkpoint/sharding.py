"""Tensors that torch spreads over ranks (DTensor): this rank's part and where it lies.

Owns: the one place that knows how torch cuts a tensor. Does not own: cutting it (strategies), the
way of a part into files (slices.py) and back (intake.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.staged import TensorSlice


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the part of one that is spread, else all. Not a copy."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def local_offsets(tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's part begins in the whole, per dimension."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError("a tensor whose ranks hold terms of a sum has no parts to store")
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    assert tuple(shape) == tuple(local_tensor(tensor).shape), "torch cuts in another way"
    # An empty part may be said to begin anywhere; inside the whole it fits everywhere.
    return tuple(min(o, size) for o, size in zip(offsets, tensor.shape))


def local_part(tensor: Tensor) -> tuple[slice, ...]:
    """The index of this rank's part in the whole."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes = local_tensor(tensor).shape
    return tuple(slice(o, o + s) for o, s in zip(local_offsets(tensor), sizes))


def as_slice(tensor: Tensor) -> Tensor | TensorSlice:
    """A tensor as a checkpoint takes it: the part of one that is spread, else the tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    return TensorSlice(local_tensor(tensor), tuple(tensor.shape), local_offsets(tensor))
