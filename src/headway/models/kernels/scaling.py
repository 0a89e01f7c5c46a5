"""Multiply a tensor by a number that is on the device, in one pass and rounded once.

Owns: `scale_` and its kernel. Does not own: what is scaled.

torch rounds the number to the tensor's dtype first, or takes three passes where it is widened.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

_BLOCK = 4096


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def scale_blocks(values, factor, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        start = tl.program_id(0).to(tl.int64) * BLOCK
        at = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
        x = tl.load(values + at, mask=at < size, other=0.0).to(tl.float32)
        tl.store(values + at, x * tl.load(factor).to(tl.float32), mask=at < size)

    return scale_blocks


def scale_(values: Tensor, factor: Tensor) -> Tensor:
    """`values` times `factor` (one element) in their own place, multiplied in float32."""
    assert values.is_contiguous() and factor.numel() == 1
    if values.numel():
        with torch.cuda.device_of(values):
            _kernel()[(-(-values.numel() // _BLOCK),)](
                values, factor, values.numel(), BLOCK=_BLOCK, num_warps=8
            )
    return values
