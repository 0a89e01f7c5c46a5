"""Tensors that torch spreads over ranks (DTensor): this rank's part and where it lies.

Owns: the one place that knows how torch cuts a tensor. Does not own: cutting it (strategies), the
way of a part into files (slices.py) and back (intake.py).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.header import StoredTensor
from headway.checkpoint.intake import Destination
from headway.checkpoint.staged import TensorSlice

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_spread(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether ranks hold the tensor together."""
    # Nobody has one before torch's module was imported, which takes a second: not done for this.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the part of one that is spread, else all. Not a copy."""
    if not is_spread(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def local_offsets(tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's part begins in the whole, per dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError("a tensor whose ranks hold terms of a sum has no parts to store")
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    assert tuple(shape) == tuple(local_tensor(tensor).shape), "torch cuts in another way"
    # An empty part may be said to begin anywhere; inside the whole it fits everywhere.
    return tuple(min(o, size) for o, size in zip(offsets, tensor.shape))


def local_part(held: Tensor | TensorSlice) -> tuple[slice, ...]:
    """The index of this rank's part in the whole."""
    if isinstance(held, Tensor):
        held = as_slice(held)
    if isinstance(held, Tensor):
        return tuple(slice(0, size) for size in held.shape)
    return tuple(slice(o, o + s) for o, s in zip(held.offsets, held.tensor.shape))


def as_slice(tensor: Tensor) -> Tensor | TensorSlice:
    """A tensor as a checkpoint takes it: this rank's part of one that is spread, else all of it."""
    if not is_spread(tensor):
        return tensor
    local, offsets = local_tensor(tensor), local_offsets(tensor)
    whole = local.shape == tensor.shape
    return local if whole else TensorSlice(local, tuple(tensor.shape), offsets)


def as_destination(stored: StoredTensor, tensor: Tensor) -> Destination:
    """Where a stored tensor is read to: of one that is spread, only this rank's part is read."""
    if not is_spread(tensor):
        return Destination(stored, tensor)
    return Destination(stored, local_tensor(tensor), local_offsets(tensor))


def empty_state(
    param: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Memory for a state of a parameter: it lies as the parameter does if it has the same shape.

    That is, spread over the ranks, and in the same order in memory, which fused kernels go by.
    """
    lies_alike = shape == tuple(param.shape)
    if not is_spread(param) or not shape or device != param.device:
        if lies_alike and not is_traceable_wrapper_subclass(param):
            return torch.empty_like(param, dtype=dtype, device=device, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device=device)
    if lies_alike:
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    from torch.distributed.tensor import DTensor, Replicate

    # As optimizers make it: what is not of the parameter's shape is the same on all ranks.
    everywhere = [Replicate()] * param.device_mesh.ndim
    local = torch.empty(shape, dtype=dtype, device=device)
    return DTensor.from_local(local, param.device_mesh, everywhere, run_check=False)
