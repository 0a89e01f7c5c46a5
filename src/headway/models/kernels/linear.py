"""A product with several weights at once, that keeps nothing but its input for the way back.

Owns: `joined_linear`, its two operations. Does not own: when weights are joined (projections.py).

Left to themselves, autocast and the compiler keep each weight a second time in half precision from
the forward to the backward pass, and round its gradient to half precision before widening it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.kernels import define_operation

_ANY_DEVICE = "CompositeExplicitAutograd"


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


class _JoinedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.has_bias = bias is not None
        return F.linear(x, torch.cat(weights).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *weights = ctx.saved_tensors
        rows = grads[0].flatten(0, -2)
        grad_x = (rows @ cast_again(weights, x.dtype)).view(x.shape)
        grad_bias = rows.sum(0) if ctx.has_bias else None
        if not any(ctx.needs_input_grad[2:]):
            return grad_x, grad_bias, *(None for _ in weights)
        grad_weight = weight_grad(rows, x.flatten(0, -2), weights[0].dtype)
        return grad_x, grad_bias, *grad_weight.split([weight.shape[0] for weight in weights])


def joined_linear(x: Tensor, weights: list[Tensor], bias: Tensor | None = None) -> Tensor:
    """`x` [..., D] times all weights, side by side; in the dtype of `x`, which the bias has too."""
    out: Tensor = _JoinedLinear.apply(x, bias, *weights)
    return out
