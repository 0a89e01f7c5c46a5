"""A gated MLP whose three layers are torchao's FP8 layers with one scale for each tensor.

Owns: `fp8_gated_mlp`, when it can stand for the three layers (`fits`). Does not own: the layers,
which are changed by precision/fp8.py, the kernels between the products (kernels/swiglu_fp8.py).

Scales, roundings and products are those of torchao's layers as the compiler makes them: what lies
between the products is not rounded to the activations' dtype before it is cast to eight bits.
Casts of the input, the weights and the output's gradient are torch's operations, so that the
compiler joins them with what comes before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headway.models import kernels
from headway.models.kernels.swiglu_fp8 import grad_cast, grad_peaks, product_cast, product_peaks
from headway.models.norm import compute_dtype
from headway.models.projections import does_no_more, is_compiled_here

_MULTIPLE = 16
"""Of which the device wants all dimensions of a product in eight bits."""
_LEAST_PEAK = 1e-12
"""torchao's: a tensor of zeros has a scale, too."""


def fits(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> bool:
    """Whether `fp8_gated_mlp` computes what these layers do, and is faster."""
    return (
        _is_float8(gate)
        and _is_float8(up)
        and _is_float8(down)
        and settings_of(gate) == settings_of(up)
        and settings_of(gate) == settings_of(down)
        and _takes_kernels(x)
        and compute_dtype(x) == torch.bfloat16
        and _in_multiples(x.numel() // x.shape[-1], gate, down)
    )


def _in_multiples(num_tokens: int, *layers: nn.Module) -> bool:
    sizes = [size for layer in layers for size in layer.get_parameter("weight").shape]
    return num_tokens % _MULTIPLE == 0 and all(size % _MULTIPLE == 0 for size in sizes)


def _takes_kernels(x: Tensor) -> bool:
    # Not compiled, the casts around the kernels would cost more than these save.
    return kernels.HAS_TRITON and x.is_cuda and is_compiled_here()


def _is_float8(layer: nn.Module) -> bool:
    """torchao's layer, by name: it is not imported where nobody asked for it."""
    kind = type(layer)
    if kind.__name__ != "Float8Linear" or not kind.__module__.startswith("torchao."):
        return False
    if layer.bias is not None:
        return False
    if not does_no_more(layer):
        return False
    c: Any = layer.config
    casts = (
        c.cast_config_input,
        c.cast_config_input_for_grad_weight,
        c.cast_config_weight,
        c.cast_config_weight_for_grad_input,
        c.cast_config_grad_output,
        c.cast_config_grad_output_for_grad_weight,
    )
    for cast in casts:
        if cast.scaling_type.value != "dynamic" or cast.scaling_granularity.value != "tensorwise":
            return False
    return not c.emulate


def settings_of(layer: nn.Module) -> tuple[Any, ...]:
    """What of an FP8 layer's configuration `fp8_gated_mlp` wants to know."""
    c: Any = layer.config
    return (
        c.cast_config_input.target_dtype,
        c.cast_config_weight.target_dtype,
        c.cast_config_grad_output.target_dtype,
        c.gemm_config_output.use_fast_accum,
        c.gemm_config_grad_input.use_fast_accum,
        c.gemm_config_grad_weight.use_fast_accum,
        c.round_scales_to_power_of_2,
    )


def scale_for(peak: Tensor, dtype: torch.dtype, power_of_2: bool) -> Tensor:
    """What brings a tensor of this greatest magnitude to the range of `dtype`.

    NaN for NaN and zero for infinity, which both make NaN of all that the tensor is part of.
    """
    top = torch.finfo(dtype).max
    scale = (top / peak.to(torch.float64).clamp(min=_LEAST_PEAK)).to(torch.float32)
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_2 else scale


def _scale_of(x: Tensor, dtype: torch.dtype, power_of_2: bool) -> Tensor:
    return scale_for(x.abs().max(), dtype, power_of_2)


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    top = torch.finfo(dtype).max
    return (x.to(torch.float32) * scale).clamp(-top, top).to(dtype)


def _multiply(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """a [M, K] times b [N, K] transposed, both of them eight bits wide."""
    return torch._scaled_mm(
        a,
        b.t(),
        scale_a=a_scale.reciprocal(),
        scale_b=b_scale.reciprocal(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )


class _Float8GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        input_dtype: torch.dtype,
        weight_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        fast_output: bool,
        fast_grad_input: bool,
        fast_grad_weight: bool,
        power_of_2: bool,
    ) -> Tensor:
        x_scale = _scale_of(x, input_dtype, power_of_2)
        gate_scale = _scale_of(gate_weight, weight_dtype, power_of_2)
        up_scale = _scale_of(up_weight, weight_dtype, power_of_2)
        down_scale = _scale_of(down_weight, weight_dtype, power_of_2)
        x8 = _cast(x, x_scale, input_dtype)
        gate8 = _cast(gate_weight, gate_scale, weight_dtype)
        up8 = _cast(up_weight, up_scale, weight_dtype)
        gate = _multiply(x8, x_scale, gate8, gate_scale, x.dtype, fast_output)
        up = _multiply(x8, x_scale, up8, up_scale, x.dtype, fast_output)
        product_scale = scale_for(product_peaks(gate, up).max(), input_dtype, power_of_2)
        product8 = product_cast(gate, up, product_scale, input_dtype)
        down8 = _cast(down_weight, down_scale, weight_dtype)
        ctx.save_for_backward(
            x, gate_weight, up_weight, down_weight, gate, up,
            x_scale, gate_scale, up_scale, down_scale, product_scale,
        )  # fmt: skip
        ctx.dtypes = input_dtype, weight_dtype, grad_dtype
        ctx.fast = fast_grad_input, fast_grad_weight
        ctx.power_of_2 = power_of_2
        return _multiply(product8, product_scale, down8, down_scale, x.dtype, fast_output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (
            x, gate_weight, up_weight, down_weight, gate, up,
            x_scale, gate_scale, up_scale, down_scale, product_scale,
        ) = ctx.saved_tensors  # fmt: skip
        input_dtype, weight_dtype, grad_dtype = ctx.dtypes
        fast_input, fast_weight = ctx.fast
        grad = grads[0].contiguous()
        dtype = grad.dtype

        grad_scale = _scale_of(grad, grad_dtype, ctx.power_of_2)
        grad8 = _cast(grad, grad_scale, grad_dtype)
        down8_t = _cast(down_weight, down_scale, weight_dtype).t().contiguous()
        grad_product = _multiply(grad8, grad_scale, down8_t, down_scale, dtype, fast_input)

        peaks = grad_peaks(gate, up, grad_product).amax(1)
        grad_gate_scale = scale_for(peaks[0], grad_dtype, ctx.power_of_2)
        grad_up_scale = scale_for(peaks[1], grad_dtype, ctx.power_of_2)
        grad_gate, grad_gate_t, grad_up, grad_up_t, product_t = grad_cast(
            gate, up, grad_product, grad_gate_scale, grad_up_scale, product_scale,
            grad_dtype, input_dtype,
        )  # fmt: skip

        gate8_t = _cast(gate_weight, gate_scale, weight_dtype).t().contiguous()
        up8_t = _cast(up_weight, up_scale, weight_dtype).t().contiguous()
        x8_t = _cast(x, x_scale, input_dtype).t().contiguous()
        grad8_t = grad8.t().contiguous()
        grad_x = _multiply(grad_gate, grad_gate_scale, gate8_t, gate_scale, dtype, fast_input)
        grad_x = grad_x + _multiply(grad_up, grad_up_scale, up8_t, up_scale, dtype, fast_input)
        of_gate = _multiply(grad_gate_t, grad_gate_scale, x8_t, x_scale, dtype, fast_weight)
        of_up = _multiply(grad_up_t, grad_up_scale, x8_t, x_scale, dtype, fast_weight)
        of_down = _multiply(grad8_t, grad_scale, product_t, product_scale, dtype, fast_weight)
        return (
            grad_x.to(x.dtype),
            of_gate.to(gate_weight.dtype),
            of_up.to(up_weight.dtype),
            of_down.to(down_weight.dtype),
            *(None,) * 7,
        )


def fp8_gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    settings: tuple[Any, ...],
) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) @ down.T by layers of these `settings_of`; x [..., D]."""
    # Rows one after the other, as the device wants them in eight bits.
    rows = x.to(compute_dtype(x)).flatten(0, -2).contiguous()
    out: Tensor = _Float8GatedMLP.apply(rows, gate_weight, up_weight, down_weight, *settings)
    return out.view(*x.shape[:-1], out.shape[-1])
