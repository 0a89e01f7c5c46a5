"""Projections computed as one are those computed apart, in value and gradient."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from headway.models import kernels, projections
from headway.models.projections import joins, project_joined


@pytest.mark.parametrize("bias", [False, True])
def test_joined_projections_equal_separate_ones(bias: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(24, size, bias=bias, dtype=torch.float64) for size in (16, 8, 8)]
    x = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)
    wrt = [x, *(p for layer in layers for p in layer.parameters())]
    weights = [torch.randn(2, 5, layer.out_features, dtype=torch.float64) for layer in layers]

    def grads_of(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(sum((o * w).sum() for o, w in zip(outputs, weights)), wrt)

    assert not joins(x, *layers)  # on a CPU the weights would be copied for nothing
    apart = tuple(layer(x) for layer in layers)
    joined = project_joined(x, *layers).split([16, 8, 8], dim=-1)
    for one, other in zip(apart, joined, strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(grads_of(apart), grads_of(joined), strict=True):
        torch.testing.assert_close(one, other)


def test_joined_projections_follow_autocast() -> None:
    """Also of an input in single precision, as norms other than the decoder's own give it."""
    torch.manual_seed(0)
    layers = [nn.Linear(24, size, bias=False) for size in (16, 8)]
    x = torch.randn(2, 5, 24, requires_grad=True)
    wrt = [x, *(layer.weight for layer in layers)]
    with torch.autocast("cpu", torch.bfloat16):
        apart = torch.cat([layer(x) for layer in layers], dim=-1)
        joined = project_joined(x, *layers)
    assert joined.dtype == apart.dtype == torch.bfloat16
    torch.testing.assert_close(joined, apart)
    grad = torch.randn_like(joined)
    found, wanted = (torch.autograd.grad(out, wrt, grad) for out in (joined, apart))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_nothing_is_joined_where_triton_makes_no_kernels(monkeypatch):
    """Such as on a machine without a C compiler; graphs are made after it was tried."""

    class Broken(ModuleType):
        language = ModuleType("triton.language")

        @staticmethod
        def jit(function):
            def launch(*args):
                raise RuntimeError("no C compiler")

            return {(1,): launch}

    monkeypatch.setitem(sys.modules, "triton", Broken("triton"))
    monkeypatch.setitem(sys.modules, "triton.language", Broken.language)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    monkeypatch.setattr(kernels.torch, "zeros", lambda *args, **options: None)
    on_gpu = SimpleNamespace(is_cuda=True)
    assert projections._has_kernels(on_gpu)
    assert kernels.triton_works.__wrapped__() is False
    assert not projections._has_kernels(on_gpu)


def test_dtypes_that_the_kernels_would_change_go_the_plain_way(monkeypatch):
    """They compute in float32, and would take weights that torch refuses beside their input."""
    monkeypatch.setattr(projections, "_has_kernels", lambda x: True)
    monkeypatch.setattr(projections, "is_compiled_here", lambda: True)
    single, half, double = (
        (torch.ones(1, 4, dtype=dtype), nn.Linear(4, 4, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    )
    assert joins(*single) and joins(*half)
    assert joins(half[0], single[1])  # autocast's
    assert not joins(*double)
    assert not joins(single[0], half[1])
