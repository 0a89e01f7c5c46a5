"""silu(gate) * up and its gradients in eight bits, as products of FP8 layers want them.

Owns: the operations and their kernels. Does not own: scales, products, gradients (fp8_mlp.py).

A tensor under one scale is read twice, for its greatest magnitude and to be cast; so gate and up
are read, and what follows from them is never written in more than eight bits. A matrix product in
eight bits wants both its operands with the summed dimension last in memory: what takes part in
two products is written in both orders, from one reading.

Shapes: T tokens, F width of gate and up.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.models.kernels import define_operation

_BLOCK = 2048
_WARPS = 4
_ROUNDS = 8
"""Blocks of which a program finds the greatest magnitude."""
_TILE_TOKENS = 64
_TILE_WIDTH = 128
_TILE_WARPS = 8


class Kernels(NamedTuple):
    product_peaks: Any
    product_cast: Any
    grad_peaks: Any
    grad_cast: Any


@functools.cache
def _kernels() -> Kernels:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def magnitude(x):  # type: ignore[no-untyped-def]
        """As an integer in the same order, in which NaN is above infinity: none is lost."""
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF

    @triton.jit  # type: ignore[untyped-decorator]
    def store_peak(target, peaks):  # type: ignore[no-untyped-def]
        tl.store(target, tl.max(peaks, axis=0).to(tl.float32, bitcast=True))

    @triton.jit  # type: ignore[untyped-decorator]
    def product_of(gate, up):  # type: ignore[no-untyped-def]
        return gate * tl.sigmoid(gate) * up

    @triton.jit  # type: ignore[untyped-decorator]
    def grads_of(gate, up, grad):  # type: ignore[no-untyped-def]
        """Of gate and up, and their product."""
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        return grad * up * (sigmoid + silu * (1.0 - sigmoid)), grad * silu, silu * up

    @triton.jit  # type: ignore[untyped-decorator]
    def load(source, at, inside):  # type: ignore[no-untyped-def]
        return tl.load(source + at, mask=inside, other=0.0).to(tl.float32)

    @triton.jit  # type: ignore[untyped-decorator]
    def swiglu_product_peaks(  # type: ignore[no-untyped-def]
        gate, up, peaks, size, BLOCK: tl.constexpr, ROUNDS: tl.constexpr
    ):
        start = tl.program_id(0).to(tl.int64) * BLOCK * ROUNDS
        found = tl.zeros((BLOCK,), tl.int32)
        for i in range(ROUNDS):
            at = start + i * BLOCK + tl.arange(0, BLOCK)
            inside = at < size
            product = product_of(load(gate, at, inside), load(up, at, inside))
            found = tl.maximum(found, magnitude(product))
        store_peak(peaks + tl.program_id(0), found)

    @triton.jit  # type: ignore[untyped-decorator]
    def swiglu_product_cast(  # type: ignore[no-untyped-def]
        gate, up, scale, product, size, BLOCK: tl.constexpr
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        scaled = product_of(load(gate, at, inside), load(up, at, inside)) * tl.load(scale)
        tl.store(product + at, scaled.to(product.dtype.element_ty), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def swiglu_grad_peaks(  # type: ignore[no-untyped-def]
        gate, up, grad, peaks, size, BLOCK: tl.constexpr, ROUNDS: tl.constexpr
    ):
        start = tl.program_id(0).to(tl.int64) * BLOCK * ROUNDS
        found_gate = tl.zeros((BLOCK,), tl.int32)
        found_up = tl.zeros((BLOCK,), tl.int32)
        for i in range(ROUNDS):
            at = start + i * BLOCK + tl.arange(0, BLOCK)
            inside = at < size
            grad_gate, grad_up, _ = grads_of(
                load(gate, at, inside), load(up, at, inside), load(grad, at, inside)
            )
            found_gate = tl.maximum(found_gate, magnitude(grad_gate))
            found_up = tl.maximum(found_up, magnitude(grad_up))
        store_peak(peaks + tl.program_id(0), found_gate)
        store_peak(peaks + tl.num_programs(0) + tl.program_id(0), found_up)

    @triton.jit  # type: ignore[untyped-decorator]
    def swiglu_grad_cast(  # type: ignore[no-untyped-def]
        gate, up, grad, gate_scale, up_scale, product_scale,
        grad_gate, grad_gate_t, grad_up, grad_up_t, product_t, num_tokens, width,
        TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        tiles = tl.cdiv(width, WIDTH)
        token = (tl.program_id(0) // tiles).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        column = (tl.program_id(0) % tiles).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
        at = token[:, None] * width + column[None, :]
        inside = (token < num_tokens)[:, None] & (column < width)[None, :]
        at_t = column[:, None] * num_tokens + token[None, :]
        inside_t = (column < width)[:, None] & (token < num_tokens)[None, :]
        of_gate, of_up, product = grads_of(
            load(gate, at, inside), load(up, at, inside), load(grad, at, inside)
        )
        # The scales bring all values into the range of eight bits; only NaN is beyond it.
        gate8 = (of_gate * tl.load(gate_scale)).to(grad_gate.dtype.element_ty)
        up8 = (of_up * tl.load(up_scale)).to(grad_up.dtype.element_ty)
        product8 = (product * tl.load(product_scale)).to(product_t.dtype.element_ty)
        tl.store(grad_gate + at, gate8, mask=inside)
        tl.store(grad_up + at, up8, mask=inside)
        tl.store(grad_gate_t + at_t, tl.trans(gate8), mask=inside_t)
        tl.store(grad_up_t + at_t, tl.trans(up8), mask=inside_t)
        tl.store(product_t + at_t, tl.trans(product8), mask=inside_t)

    return Kernels(swiglu_product_peaks, swiglu_product_cast, swiglu_grad_peaks, swiglu_grad_cast)


def _num_peaks(gate: Tensor) -> int:
    return -(-gate.numel() // (_BLOCK * _ROUNDS))


def _fake_product_peaks(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(_num_peaks(gate), dtype=torch.float32)


@define_operation("swiglu_product_peaks(Tensor gate, Tensor up) -> Tensor", _fake_product_peaks)
def product_peaks(gate: Tensor, up: Tensor) -> Tensor:
    """Greatest magnitudes of parts of silu(gate) * up; NaN where a part has one."""
    gate, up = gate.contiguous(), up.contiguous()
    peaks = _fake_product_peaks(gate, up)
    if gate.numel():
        with torch.cuda.device_of(gate):
            _kernels().product_peaks[(len(peaks),)](
                gate, up, peaks, gate.numel(), BLOCK=_BLOCK, ROUNDS=_ROUNDS, num_warps=_WARPS
            )
    return peaks


def _fake_product_cast(gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return gate.new_empty(gate.shape, dtype=dtype)


@define_operation(
    "swiglu_product_cast(Tensor gate, Tensor up, Tensor scale, ScalarType dtype) -> Tensor",
    _fake_product_cast,
)
def product_cast(gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """silu(gate) * up * scale in `dtype`, none of which may be above its range."""
    gate, up = gate.contiguous(), up.contiguous()
    product = _fake_product_cast(gate, up, scale, dtype)
    if gate.numel():
        with torch.cuda.device_of(gate):
            _kernels().product_cast[(-(-gate.numel() // _BLOCK),)](
                gate, up, scale, product, gate.numel(), BLOCK=_BLOCK, num_warps=_WARPS
            )
    return product


def _fake_grad_peaks(gate: Tensor, up: Tensor, grad: Tensor) -> Tensor:
    return gate.new_empty(2, _num_peaks(gate), dtype=torch.float32)


@define_operation(
    "swiglu_grad_peaks(Tensor gate, Tensor up, Tensor grad) -> Tensor", _fake_grad_peaks
)
def grad_peaks(gate: Tensor, up: Tensor, grad: Tensor) -> Tensor:
    """Greatest magnitudes of parts of the gradients of gate and of up [2, parts].

    `grad` is that of silu(gate) * up.
    """
    gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
    peaks = _fake_grad_peaks(gate, up, grad)
    if gate.numel():
        with torch.cuda.device_of(gate):
            _kernels().grad_peaks[(peaks.shape[1],)](
                gate, up, grad, peaks, gate.numel(), BLOCK=_BLOCK, ROUNDS=_ROUNDS, num_warps=_WARPS
            )
    return peaks


def _fake_grad_cast(
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
    gate_scale: Tensor,
    up_scale: Tensor,
    product_scale: Tensor,
    grad_dtype: torch.dtype,
    product_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    num_tokens, width = gate.shape
    return (
        gate.new_empty(num_tokens, width, dtype=grad_dtype),
        gate.new_empty(width, num_tokens, dtype=grad_dtype),
        gate.new_empty(num_tokens, width, dtype=grad_dtype),
        gate.new_empty(width, num_tokens, dtype=grad_dtype),
        gate.new_empty(width, num_tokens, dtype=product_dtype),
    )


@define_operation(
    "swiglu_grad_cast(Tensor gate, Tensor up, Tensor grad, Tensor gate_scale, Tensor up_scale, "
    "Tensor product_scale, ScalarType grad_dtype, ScalarType product_dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_grad_cast,
)
def grad_cast(
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
    gate_scale: Tensor,
    up_scale: Tensor,
    product_scale: Tensor,
    grad_dtype: torch.dtype,
    product_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """The scaled gradient of gate [T, F] and [F, T], that of up alike, the product [F, T].

    None may be above the range of its dtype.
    """
    gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
    scales = gate_scale, up_scale, product_scale
    made = _fake_grad_cast(gate, up, grad, *scales, grad_dtype, product_dtype)
    num_tokens, width = gate.shape
    if gate.numel():
        tiles = -(-num_tokens // _TILE_TOKENS) * -(-width // _TILE_WIDTH)
        with torch.cuda.device_of(gate):
            _kernels().grad_cast[(tiles,)](
                gate,
                up,
                grad,
                *scales,
                *made,
                num_tokens,
                width,
                TOKENS=_TILE_TOKENS,
                WIDTH=_TILE_WIDTH,
                num_warps=_TILE_WARPS,
            )
    return made
