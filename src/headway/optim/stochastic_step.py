"""One parameter's update by StochasticAdamW in one pass over memory, rounding included.

Owns: the kernel and when it fits. Does not own: the optimizer, and the plain form of the update
(stochastic_adamw), whose results this has but for the draw of the bits that round.

torch's operations read and write values of four bytes a dozen times where this takes two each.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from headway.models.kernels import triton_works

_BLOCK = 1024
_GRADIENT_DTYPES = (torch.bfloat16, torch.float32)


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def keep(target, at, inside, exact, noise):  # type: ignore[no-untyped-def]
        if target.dtype.element_ty == tl.bfloat16:
            bits = exact.to(tl.int32, bitcast=True)
            rounded = ((bits + (noise & 0xFFFF)) & -65536).to(tl.float32, bitcast=True)
            # In a NaN the carry could run through to the sign.
            exact = tl.where((bits & 0x7F800000) != 0x7F800000, rounded, exact)
        tl.store(target + at, exact.to(target.dtype.element_ty), mask=inside)

    # A seed differs at every launch: its value must not choose the code.
    @triton.jit(do_not_specialize=["seed"])  # type: ignore[untyped-decorator]
    def update_blocks(  # type: ignore[no-untyped-def]
        weights, grads, means, squares, size, seed,
        keep_share, step_size, correction, one_less_beta1, beta2, one_less_beta2, eps,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        start = tl.program_id(0).to(tl.int64) * BLOCK
        at = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
        inside = at < size
        grad = tl.load(grads + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(means + at, mask=inside, other=0.0).to(tl.float32)
        square = tl.load(squares + at, mask=inside, other=0.0).to(tl.float32)
        mean += one_less_beta1 * (grad - mean)
        square = beta2 * square + one_less_beta2 * grad * grad
        weight *= keep_share
        weight -= step_size * mean / (tl.sqrt(square / correction) + eps)
        # Counters of 32 bits: those of 64, as an index has, take several times as long.
        low, high = at.to(tl.uint32), (at >> 32).to(tl.uint32)
        noise, more_noise, _, _ = tl.philox(seed, low, high, low * 0, low * 0)
        keep(means, at, inside, mean, noise.to(tl.int32, bitcast=True))
        keep(squares, at, inside, square, noise.to(tl.int32, bitcast=True) >> 16)
        keep(weights, at, inside, weight, more_noise.to(tl.int32, bitcast=True))

    return update_blocks


def fits(weight: Tensor, grad: Tensor, *moments: Tensor) -> bool:
    """Whether the kernel is for these: weights to be rounded, all in a row on one GPU."""
    return (
        weight.is_cuda
        and weight.dtype == torch.bfloat16
        and grad.dtype in _GRADIENT_DTYPES
        and all(
            type(t) in (Tensor, torch.nn.Parameter)
            and t.layout == torch.strided
            and t.device == weight.device
            and t.shape == weight.shape
            and t.is_contiguous()
            for t in (weight, grad, *moments)
        )
        and triton_works()
    )


def update_(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    seed: int,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """The update numbered `step`; what is in bfloat16 is rounded by bits that `seed` chooses.

    `seed` is below 2**32.
    """
    size, (beta1, beta2) = weight.numel(), betas
    if size == 0:
        return
    with torch.cuda.device_of(weight):
        _kernel()[(-(-size // _BLOCK),)](
            weight,
            grad,
            mean,
            square,
            size,
            seed - (1 << 31),  # one type for all: Triton would make a kernel for each
            1 - lr * weight_decay,
            lr / (1 - beta1**step),
            1 - beta2**step,
            1 - beta1,
            beta2,
            1 - beta2,
            eps,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    # Autograd does not see what the kernel writes; a graph that holds the weights must know.
    torch.autograd.graph.increment_version([weight, mean, square])
