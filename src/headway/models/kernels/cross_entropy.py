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

_BLOCK = 4096
_WARPS = 8
# A row that fits into the registers of a core is read once; of a longer one, twice.
_LONGEST_HELD = 32768
_WARPS_HELD = 32


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def cross_entropy_rows(  # type: ignore[no-untyped-def]
        logits, row_stride, labels, losses, grads, num_columns,
        IGNORED: tl.constexpr, WITH_GRADS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        label = tl.load(labels + row)
        logits += row * row_stride
        grads += row * num_columns
        columns = tl.arange(0, BLOCK)
        if label == IGNORED:
            tl.store(losses + row, 0.0)
            if WITH_GRADS:
                for start in range(0, num_columns, BLOCK):
                    at = start + columns
                    tl.store(grads + at, 0.0, mask=at < num_columns)
        elif HELD:
            inside = columns < num_columns
            x = tl.load(logits + columns, mask=inside, other=-1e30).to(tl.float32)
            top = tl.max(x, 0)
            share = tl.exp(x - top)
            # A label outside the vocabulary makes loss and gradient NaN: the step is withheld, and
            # by ranks too, which go by the gradient alone.
            known = (label >= 0) & (label < num_columns)
            total = tl.where(known, tl.sum(share, 0), float("nan"))
            picked = tl.load(logits + label, mask=known, other=0.0).to(tl.float32)
            tl.store(losses + row, top + tl.log(total) - picked)
            if WITH_GRADS:
                share *= 1.0 / total
                share = tl.where(columns == label, share - 1.0, share)
                tl.store(grads + columns, share, mask=inside)
        else:
            # Each lane keeps a maximum and a sum of its own until the row's end.
            highest = tl.full((BLOCK,), -1e30, tl.float32)
            total = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, num_columns, BLOCK):
                at = start + columns
                x = tl.load(logits + at, mask=at < num_columns, other=-1e30).to(tl.float32)
                higher = tl.maximum(highest, x)
                total = total * tl.exp(highest - higher) + tl.exp(x - higher)
                highest = higher
            top = tl.max(highest, 0)
            # Lanes past the row's end have counted -1e30 as a number; against the top it is none.
            denominator = top + tl.log(tl.sum(total * tl.exp(highest - top), 0))
            # A label outside the vocabulary makes loss and gradient NaN: the step is withheld, and
            # by ranks too, which go by the gradient alone.
            known = (label >= 0) & (label < num_columns)
            denominator = tl.where(known, denominator, float("nan"))
            picked = tl.load(logits + label, mask=known, other=0.0).to(tl.float32)
            tl.store(losses + row, denominator - picked)
            if WITH_GRADS:
                for start in range(0, num_columns, BLOCK):
                    at = start + columns
                    x = tl.load(logits + at, mask=at < num_columns, other=-1e30).to(tl.float32)
                    share = tl.exp(x - denominator)
                    share = tl.where(at == label, share - 1.0, share)
                    tl.store(grads + at, share, mask=at < num_columns)

    return cross_entropy_rows


def can_use_kernel(logits: Tensor) -> bool:
    """Whether `loss_and_grads` can be asked for these."""
    return logits.device.type == "cuda" and logits.dtype != torch.float64 and triton_works()


def loss_and_grads(
    logits_CV: Tensor, labels_C: Tensor, *, ignored: int, grad_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """The loss of each row in float32, and the gradient of their sum in `grad_dtype`, if given.

    Rows whose label is `ignored` have neither; of a label outside the vocabulary both are NaN.
    """
    num_rows, num_columns = logits_CV.shape
    assert logits_CV.stride(1) == 1
    labels_C = labels_C.contiguous()
    losses_C = torch.empty(num_rows, dtype=torch.float32, device=logits_CV.device)
    grads_CV = None
    if grad_dtype is not None:
        grads_CV = torch.empty(logits_CV.shape, dtype=grad_dtype, device=logits_CV.device)
    held = _BLOCK < num_columns <= _LONGEST_HELD
    if num_rows:
        with torch.cuda.device_of(logits_CV):
            _kernel()[(num_rows,)](
                logits_CV,
                logits_CV.stride(0),
                labels_C,
                losses_C,
                logits_CV if grads_CV is None else grads_CV,
                num_columns,
                IGNORED=ignored,
                WITH_GRADS=grads_CV is not None,
                HELD=held,
                BLOCK=1 << (num_columns - 1).bit_length() if held else _BLOCK,
                num_warps=_WARPS_HELD if held else _WARPS,
            )
    return losses_C, grads_CV
