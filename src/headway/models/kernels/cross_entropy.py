"""Softmax, loss and gradient of rows of logits in one kernel.

Owns: the kernel and whether it can be used. Does not own: the products around it (loss.py).

Made of torch's operations, the same is five passes over the largest tensors of a step.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from headway.models.kernels import triton_works

_BLOCK = 8192
_WARPS = 16
# Neighbours that share a maximum, so that the sum needs little more than one exponential each.
_PART = 8


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def cross_entropy_rows(  # type: ignore[no-untyped-def]
        logits, row_stride, labels, losses, num_columns,
        IGNORED: tl.constexpr, WITH_GRADS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        label = tl.load(labels + row)
        logits += row * row_stride
        columns = tl.arange(0, BLOCK)
        # Read before anything is written: gradients take the logits' place.
        known = (label >= 0) & (label < num_columns)
        picked = tl.load(logits + label, mask=known, other=0.0).to(tl.float32)
        if label == IGNORED:
            tl.store(losses + row, 0.0)
            if WITH_GRADS:
                for start in range(0, num_columns, BLOCK):
                    at = start + columns
                    tl.store(logits + at, 0.0, mask=at < num_columns)
        else:
            # Each part of a block keeps a maximum and a sum of its own until the row's end.
            highest = tl.full((BLOCK // PART,), -1e30, tl.float32)
            total = tl.zeros((BLOCK // PART,), tl.float32)
            for start in range(0, num_columns, BLOCK):
                at = start + columns
                x = tl.load(logits + at, mask=at < num_columns, other=-1e30).to(tl.float32)
                x = tl.reshape(x, (BLOCK // PART, PART))
                higher = tl.maximum(highest, tl.max(x, 1))
                total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)
                highest = higher
            top = tl.max(highest, 0)
            # Parts past the row's end have counted -1e30 as a number; against the top it is none.
            denominator = top + tl.log(tl.sum(total * tl.exp(highest - top), 0))
            # A label outside the vocabulary makes loss and gradient NaN: the step is withheld, and
            # by ranks too, which go by the gradient alone.
            denominator = tl.where(known, denominator, float("nan"))
            tl.store(losses + row, denominator - picked)
            if WITH_GRADS:
                for start in range(0, num_columns, BLOCK):
                    at = start + columns
                    x = tl.load(logits + at, mask=at < num_columns, other=-1e30).to(tl.float32)
                    share = tl.exp(x - denominator)
                    share = tl.where(at == label, share - 1.0, share)
                    tl.store(logits + at, share, mask=at < num_columns)

    return cross_entropy_rows


def can_use_kernel(logits: Tensor) -> bool:
    """Whether `cross_entropy_` can be asked for these."""
    return logits.device.type == "cuda" and logits.dtype != torch.float64 and triton_works()


def cross_entropy_(
    logits_CV: Tensor, labels_C: Tensor, *, ignored: int, with_grads: bool
) -> Tensor:
    """The loss of each row in float32; the gradient of their sum takes the logits' place, if asked.

    Rows whose label is `ignored` have neither; of a label outside the vocabulary both are NaN.
    """
    num_rows, num_columns = logits_CV.shape
    assert logits_CV.stride(1) == 1
    labels_C = labels_C.contiguous()
    losses_C = torch.empty(num_rows, dtype=torch.float32, device=logits_CV.device)
    if num_rows:
        with torch.cuda.device_of(logits_CV):
            _kernel()[(num_rows,)](
                logits_CV,
                logits_CV.stride(0),
                labels_C,
                losses_C,
                num_columns,
                IGNORED=ignored,
                WITH_GRADS=with_grads,
                BLOCK=_BLOCK,
                PART=_PART,
                num_warps=_WARPS,
            )
    return losses_C
