"""Projections of one input, computed as one.

Owns: when that can be done. Does not own: the layers, the product (kernels/), what follows it.

Weights keep their names and their memory; only a compiled graph joins them, where it costs nothing:
under autocast they are copied anyway. One wide product takes less time than two narrow ones, and
its gradient needs no sum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headway.models import kernels
from headway.models.kernels.linear import joined_linear
from headway.models.norm import compute_dtype


def joins(x: Tensor, *layers: nn.Module) -> bool:
    """Whether these linear layers are worth joining, and do nothing that would be passed over."""
    return (
        _has_kernels(x)
        and x.dtype != torch.float64
        and is_compiled_here()
        and all(map(is_plain_linear, layers))
        and layers[0].weight.dtype in (x.dtype, torch.float32)
        and all(layer.weight.dtype == layers[0].weight.dtype for layer in layers)
        and len({layer.bias is None for layer in layers}) == 1
    )


def _has_kernels(x: Tensor) -> bool:
    return kernels.HAS_TRITON and x.is_cuda


def is_compiled_here() -> bool:
    """Whether this call becomes part of a graph that is run here, and not exported."""
    # Not `is_exporting()`: in a graph, torch 2.11 takes it for True whatever the graph is for.
    return torch.compiler.is_compiling() and not getattr(
        torch.compiler, "_is_exporting_flag", False
    )


def project_joined(x: Tensor, *layers: nn.Module) -> Tensor:
    """Their outputs side by side; all have a bias, or none of them."""
    return joined_linear(*operands(x, *layers))


def operands(x: Tensor, *layers: nn.Module) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Of the product with all layers: `x` in its dtype, the weights, and the bias of all."""
    x = x.to(compute_dtype(x))
    weights: list[Tensor] = [layer.get_parameter("weight") for layer in layers]
    biases: list[Tensor] = [layer.bias for layer in layers if isinstance(layer.bias, Tensor)]
    return x, weights, torch.cat(biases).to(x.dtype) if biases else None


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether a call of it is the product with its weight, its bias added, and nothing else."""
    return type(layer) is nn.Linear and does_no_more(layer)


def does_no_more(layer: nn.Module) -> bool:
    """Nothing beside what its class does, as adapters, hooks and quantized weights would."""
    return (
        type(layer.weight) is nn.Parameter
        and ("forward" not in layer.__dict__ or hasattr(layer.forward, "adds_nothing"))
        and not has_hooks(layer)
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of it calls somebody else's functions as well."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
