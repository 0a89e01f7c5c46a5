"""Copies of many tensors in one stretch of memory.

Owns: where in it each of them lies. Does not own: the memory, and what is copied when.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from headway.checkpoint.tensors import num_bytes

ALIGN_BYTES = 16


def aligned(size: int) -> int:
    """A size with the room that keeps what follows on a boundary."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def packed_bytes(tensors: Iterable[Tensor]) -> int:
    """What contiguous copies of the tensors take in one stretch."""
    return sum(aligned(num_bytes(tensor)) for tensor in tensors)


def cut_up(memory: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """A stretch of bytes as places for a contiguous copy of each tensor."""
    places, offset = [], 0
    # One view per dtype and one cut per tensor: there may be thousands, and a GPU waits meanwhile.
    as_dtype: dict[torch.dtype, Tensor] = {}
    for tensor in tensors:
        size, dtype = tensor.element_size(), tensor.dtype
        if dtype not in as_dtype:
            as_dtype[dtype] = memory[: memory.numel() // size * size].view(dtype)
        shape, strides, stride = tensor.shape, [], 1
        for length in reversed(shape):
            strides.append(stride)
            stride *= length
        places.append(as_dtype[dtype].as_strided(shape, strides[::-1], offset // size))
        offset += aligned(stride * size)
    return places
