"""A product with several weights at once, that keeps nothing but its input for the way back.

Owns: `joined_linear`, its gradients and operations, the kernel that casts weights. Does not own:
when weights are joined (projections.py), what else is done in the same pass (heads.py, flash4.py).

Left to themselves, autocast and the compiler keep each weight a second time in half precision from
the forward to the backward pass, and round its gradient to half precision before widening it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.kernels import define_operation

_ANY_DEVICE = "CompositeExplicitAutograd"
_BLOCK = 2048
MOST_WEIGHTS = 3


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def cast_parts(  # type: ignore[no-untyped-def]
        first, second, third, joined, end_1, end_2, end_3, BLOCK: tl.constexpr
    ):
        """Up to three tensors, one after the other; `end_1` to `end_3`: where each one ends."""
        start = tl.program_id(0).to(tl.int64) * BLOCK
        at = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
        # Of the three loads those that are masked as a whole read nothing.
        one = tl.load(first + at, mask=at < end_1, other=0.0)
        two = tl.load(second + (at - end_1), mask=(at >= end_1) & (at < end_2), other=0.0)
        three = tl.load(third + (at - end_2), mask=(at >= end_2) & (at < end_3), other=0.0)
        value = tl.where(at < end_1, one, tl.where(at < end_2, two, three))
        tl.store(joined + at, value, mask=at < end_3)

    return cast_parts


def _cast_by_kernel(weights: list[Tensor], joined: Tensor) -> None:
    """Fill `joined` with all weights at once: on a GPU, one by one, starting takes longer."""
    parts = [weight.contiguous() for weight in weights]
    sizes = [part.numel() for part in parts] + [0] * (MOST_WEIGHTS - len(parts))
    ends = [sum(sizes[: n + 1]) for n in range(MOST_WEIGHTS)]
    parts += parts[:1] * (MOST_WEIGHTS - len(parts))
    if not ends[-1]:
        return
    with torch.cuda.device_of(joined):
        _kernel()[(-(-ends[-1] // _BLOCK),)](*parts, joined, *ends, BLOCK=_BLOCK, num_warps=4)


def _fake_cast(weights: list[Tensor], dtype: torch.dtype) -> Tensor:
    rows = sum(weight.shape[0] for weight in weights)
    return weights[0].new_empty(rows, weights[0].shape[1], dtype=dtype)


@define_operation(
    "cast_again(Tensor[] weights, ScalarType dtype) -> Tensor", _fake_cast, dispatch_key=_ANY_DEVICE
)
def cast_again(weights: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The weights in `dtype`, one below the other.

    Not the operations of the forward pass: the compiler would find them equal, and keep theirs.
    """
    joined = _fake_cast(weights, dtype)
    if joined.is_cuda:
        _cast_by_kernel(weights, joined)
        return joined
    start = 0
    for weight in weights:
        joined[start : start + weight.shape[0]].copy_(weight)
        start += weight.shape[0]
    return joined


def _fake_weight_grad(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.new_empty(grad.shape[1], x.shape[1], dtype=dtype)


@define_operation(
    "weight_grad(Tensor grad, Tensor x, ScalarType dtype) -> Tensor",
    _fake_weight_grad,
    dispatch_key=_ANY_DEVICE,
)
def weight_grad(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """grad.T @ x as the sum that the product makes in `dtype`, never rounded in between."""
    if grad.is_cuda and dtype == torch.float32 and grad.dtype != dtype:
        return torch.mm(grad.t(), x, out_dtype=dtype)
    return grad.t().to(dtype) @ x.to(dtype)


def join(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One below the other, as the forward pass wants them."""
    return torch.cat(list(weights)).to(dtype)


def joined_gradients(
    grad: Tensor, x: Tensor, weights: Sequence[Tensor], *, bias: bool, wanted: bool
) -> list[Tensor | None]:
    """Of `x`, of the bias if there is one, and of each weight if they are wanted.

    As many as `MOST_WEIGHTS` weights would have, nothing in the place of those that are not there.
    """
    rows = grad.flatten(0, -2)
    grad_x = (rows @ cast_again(list(weights), x.dtype)).view(x.shape)
    found: list[Tensor | None] = [grad_x, rows.sum(0) if bias else None]
    if wanted:
        grad_weight = weight_grad(rows, x.flatten(0, -2), weights[0].dtype)
        found += grad_weight.split([weight.shape[0] for weight in weights])
    return found + [None] * (2 + MOST_WEIGHTS - len(found))


class _JoinedLinear(torch.autograd.Function):
    # As many arguments in every call: where no gradient is wanted, the compiler tells by their
    # number whether `forward` takes a context, and takes `x` for it if they are as many as its own.
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        first: Tensor,
        second: Tensor | None,
        third: Tensor | None,
    ) -> Tensor:
        weights = [weight for weight in (first, second, third) if weight is not None]
        ctx.save_for_backward(x, *weights)
        ctx.has_bias = bias is not None
        return F.linear(x, join(weights, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *weights = ctx.saved_tensors
        wanted = any(ctx.needs_input_grad[2:])
        return tuple(joined_gradients(grads[0], x, weights, bias=ctx.has_bias, wanted=wanted))


def joined_linear(x: Tensor, weights: list[Tensor], bias: Tensor | None = None) -> Tensor:
    """`x` [..., D] times all weights, side by side; in the dtype of `x`, which the bias has too.

    At most `MOST_WEIGHTS` of them.
    """
    given = [*weights, *[None] * (MOST_WEIGHTS - len(weights))]
    out: Tensor = _JoinedLinear.apply(x, bias, *given)
    return out
