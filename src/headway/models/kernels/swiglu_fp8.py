"""silu(gate) * up and its gradients in eight bits, as products of FP8 layers want them.

Owns: the operations and their kernels. Does not own: scales, products, gradients (fp8_mlp.py).

A tensor under one scale is read twice, for its greatest magnitude and to be cast; so gate and up
are read, and what follows from them is never written in more than eight bits. A matrix product in
eight bits wants both its operands with the summed dimension last in memory: what takes part in
two products is written in both orders, from one reading. Bytes are transposed in pairs, as numbers
of two bytes that the device makes at once: single ones come to wrong places on an H200 with Triton
3.6, and so do pairs that are put together of two casts.

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
_TILE_PAIRS = 32
_TILE_WIDTH = 64
_TILE_WARPS = 8


class Kernels(NamedTuple):
    product_peaks: Any
    grad_peaks: Any
    product_cast: Any
    grad_cast: Any


@functools.cache
def _kernels() -> Kernels:
    return Kernels(*_peak_kernels(), *_cast_kernels())


class Parts(NamedTuple):
    """What the kernels have in common."""

    load: Any
    product_of: Any
    grads_of: Any


@functools.cache
def _parts() -> Parts:
    import triton
    import triton.language as tl

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

    return Parts(load, product_of, grads_of)


def _peak_kernels() -> tuple[Any, Any]:
    import triton
    import triton.language as tl

    load, product_of, grads_of = _parts()

    @triton.jit  # type: ignore[untyped-decorator]
    def magnitude(x):  # type: ignore[no-untyped-def]
        """As an integer in the same order, in which NaN is above infinity: none is lost."""
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF

    @triton.jit  # type: ignore[untyped-decorator]
    def store_peak(target, peaks):  # type: ignore[no-untyped-def]
        tl.store(target, tl.max(peaks, axis=0).to(tl.float32, bitcast=True))

    @triton.jit  # type: ignore[untyped-decorator]
    def swiglu_product_peaks(  # type: ignore[no-untyped-def]
        gate, up, peaks, size, BLOCK: tl.constexpr
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        product = product_of(load(gate, at, inside), load(up, at, inside))
        store_peak(peaks + tl.program_id(0), magnitude(product))

    @triton.jit  # type: ignore[untyped-decorator]
    def swiglu_grad_peaks(  # type: ignore[no-untyped-def]
        gate, up, grad, peaks, size, BLOCK: tl.constexpr
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        grad_gate, grad_up, _ = grads_of(
            load(gate, at, inside), load(up, at, inside), load(grad, at, inside)
        )
        store_peak(peaks + tl.program_id(0), magnitude(grad_gate))
        store_peak(peaks + tl.num_programs(0) + tl.program_id(0), magnitude(grad_up))

    return swiglu_product_peaks, swiglu_grad_peaks


def _cast_kernels() -> tuple[Any, Any]:
    import triton
    import triton.language as tl

    load, product_of, grads_of = _parts()

    @triton.jit  # type: ignore[untyped-decorator]
    def swiglu_product_cast(  # type: ignore[no-untyped-def]
        gate, up, scale, product, size, BLOCK: tl.constexpr
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        scaled = product_of(load(gate, at, inside), load(up, at, inside)) * tl.load(scale)
        tl.store(product + at, scaled.to(product.dtype.element_ty), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def join(even, odd, E5: tl.constexpr, BY_DEVICE: tl.constexpr):  # type: ignore[no-untyped-def]
        """Two values in eight bits as one number of two bytes, the first below."""
        if BY_DEVICE:
            if E5:
                return tl.inline_asm_elementwise(
                    "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;", "=h,f,f", [even, odd],
                    dtype=tl.int16, is_pure=True, pack=1,
                )  # fmt: skip
            return tl.inline_asm_elementwise(
                "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [even, odd],
                dtype=tl.int16, is_pure=True, pack=1,
            )  # fmt: skip
        kind = tl.float8e5 if E5 else tl.float8e4nv
        low = even.to(kind).to(tl.uint8, bitcast=True).to(tl.int16)
        return low | (odd.to(kind).to(tl.uint8, bitcast=True).to(tl.int16) << 8)

    @triton.jit  # type: ignore[untyped-decorator]
    def swiglu_grad_cast(  # type: ignore[no-untyped-def]
        gate, up, grad, gate_scale, up_scale, product_scale,
        grad_gate, gate_pairs, grad_up, up_pairs, product_pairs, num_pairs, width,
        PAIRS: tl.constexpr, WIDTH: tl.constexpr, GRAD_E5: tl.constexpr, PRODUCT_E5: tl.constexpr,
        BY_DEVICE: tl.constexpr,
    ):  # fmt: skip
        tiles = tl.cdiv(width, WIDTH)
        pair = (tl.program_id(0) // tiles).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
        column = (tl.program_id(0) % tiles).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
        at = 2 * pair[:, None] * width + column[None, :]
        inside = (pair < num_pairs)[:, None] & (column < width)[None, :]
        at_t = column[:, None] * num_pairs + pair[None, :]
        inside_t = (column < width)[:, None] & (pair < num_pairs)[None, :]
        even_gate, even_up, even_product = grads_of(
            load(gate, at, inside), load(up, at, inside), load(grad, at, inside)
        )
        odd_gate, odd_up, odd_product = grads_of(
            load(gate + width, at, inside),
            load(up + width, at, inside),
            load(grad + width, at, inside),
        )
        # The scales bring all values into the range of eight bits; only NaN is beyond it.
        by = tl.load(gate_scale)
        even_gate, odd_gate = even_gate * by, odd_gate * by
        tl.store(grad_gate + at, even_gate.to(grad_gate.dtype.element_ty), mask=inside)
        tl.store(grad_gate + at + width, odd_gate.to(grad_gate.dtype.element_ty), mask=inside)
        pairs = join(even_gate, odd_gate, GRAD_E5, BY_DEVICE)
        tl.store(gate_pairs + at_t, tl.trans(pairs), mask=inside_t)
        by = tl.load(up_scale)
        even_up, odd_up = even_up * by, odd_up * by
        tl.store(grad_up + at, even_up.to(grad_up.dtype.element_ty), mask=inside)
        tl.store(grad_up + at + width, odd_up.to(grad_up.dtype.element_ty), mask=inside)
        pairs = join(even_up, odd_up, GRAD_E5, BY_DEVICE)
        tl.store(up_pairs + at_t, tl.trans(pairs), mask=inside_t)
        by = tl.load(product_scale)
        pairs = join(even_product * by, odd_product * by, PRODUCT_E5, BY_DEVICE)
        tl.store(product_pairs + at_t, tl.trans(pairs), mask=inside_t)

    return swiglu_product_cast, swiglu_grad_cast


def _num_peaks(gate: Tensor) -> int:
    return -(-gate.numel() // _BLOCK)


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
                gate, up, peaks, gate.numel(), BLOCK=_BLOCK, num_warps=_WARPS
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
                gate, up, grad, peaks, gate.numel(), BLOCK=_BLOCK, num_warps=_WARPS
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
    torch._check(num_tokens % 2 == 0, lambda: f"{num_tokens} tokens, which are not in pairs")
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

    None may be above the range of its dtype, and T is even.
    """
    gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
    scales = gate_scale, up_scale, product_scale
    made = _fake_grad_cast(gate, up, grad, *scales, grad_dtype, product_dtype)
    num_pairs, width = gate.shape[0] // 2, gate.shape[1]
    if gate.numel():
        tiles = -(-num_pairs // _TILE_PAIRS) * -(-width // _TILE_WIDTH)
        with torch.cuda.device_of(gate):
            _kernels().grad_cast[(tiles,)](
                gate,
                up,
                grad,
                *scales,
                made[0],
                made[1].view(torch.int16),
                made[2],
                made[3].view(torch.int16),
                made[4].view(torch.int16),
                num_pairs,
                width,
                PAIRS=_TILE_PAIRS,
                WIDTH=_TILE_WIDTH,
                GRAD_E5=grad_dtype == torch.float8_e5m2,
                PRODUCT_E5=product_dtype == torch.float8_e5m2,
                BY_DEVICE=gate.is_cuda,
                num_warps=_TILE_WARPS,
            )
    return made
