"""The second half of a gated MLP, whose gradient is made in one pass and keeps little.

Owns: `gated_down` and the kernel of its backward pass. Does not own: the layers (decoder.py).

For the backward pass only gate and up are kept; their product is made again by the same kernel
that makes their gradients, side by side as the joined projection wants them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.kernels import define_operation
from headway.models.kernels.linear import cast_again, weight_grad

_MOST_COLUMNS = 8192
_COLUMNS_OF_A_WARP = 512


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def swiglu_backward_rows(  # type: ignore[no-untyped-def]
        joined, grad, grad_joined, product, num_columns, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < num_columns
        narrow, wide = row * num_columns + at, row * 2 * num_columns + at
        gate = tl.load(joined + wide, mask=inside).to(tl.float32)
        up = tl.load(joined + wide + num_columns, mask=inside).to(tl.float32)
        given = tl.load(grad + narrow, mask=inside).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        slope = sigmoid + silu * (1.0 - sigmoid)
        tl.store(grad_joined + wide, given * up * slope, mask=inside)
        tl.store(grad_joined + wide + num_columns, given * silu, mask=inside)
        tl.store(product + narrow, silu * up, mask=inside)

    return swiglu_backward_rows


def _fake(joined: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return joined.new_empty(joined.shape), grad.new_empty(grad.shape)


@define_operation("swiglu_backward(Tensor joined, Tensor grad) -> (Tensor, Tensor)", _fake)
def swiglu_backward(joined: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """From gate and up [N, 2 F] and the gradient of silu(gate) * up [N, F]: theirs, and it."""
    joined, grad = joined.contiguous(), grad.contiguous()
    num_rows, num_columns = grad.shape
    grad_joined, product = _fake(joined, grad)
    if num_rows:
        with torch.cuda.device_of(joined):
            block = min(_MOST_COLUMNS, max(32, 1 << (num_columns - 1).bit_length()))
            _kernel()[(num_rows, -(-num_columns // block))](
                joined,
                grad,
                grad_joined,
                product,
                num_columns,
                BLOCK=block,
                num_warps=max(1, block // _COLUMNS_OF_A_WARP),
            )
    return grad_joined, product


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(joined, weight)
        gate, up = joined.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, weight.to(joined.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        joined, weight = ctx.saved_tensors
        rows = grads[0].flatten(0, -2)
        grad_product = rows @ cast_again([weight], joined.dtype)
        grad_joined, product = swiglu_backward(joined.flatten(0, -2), grad_product)
        return grad_joined.view(joined.shape), weight_grad(rows, product, weight.dtype)


def gated_down(joined: Tensor, weight: Tensor) -> Tensor:
    """`silu(gate) * up` of `joined` [..., 2 F], projected by `weight` [D, F]."""
    out: Tensor = _GatedDown.apply(joined, weight)
    return out
