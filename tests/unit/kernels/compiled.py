"""Kernels compiled for GPUs that are not here, with what the code launches them with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import kernels_on_cpu  # noqa: F401  before the operations are made
import pytest
import torch
import triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from headway.models.kernels import cross_entropy, heads, linear, scaling, swiglu
from headway.optim import adamw_step, stochastic_step

CAPABILITIES = [80, 90]
LAUNCH_OPTIONS = ("num_warps", "num_stages")
# Pointers and sizes that are multiples of it get wider loads.
ALIGNMENT = 16


class Recorder:
    """Stands for a kernel and keeps what it is launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert 1 <= len(grid) <= 3 and all(size > 0 for size in grid)
        return lambda *args, **kwargs: self.launches.append((args, kwargs))


def lose(vocabulary: int, *, dtype: torch.dtype, with_grads: bool = True) -> None:
    logits, labels = torch.zeros(2, vocabulary, dtype=dtype), torch.zeros(2, dtype=torch.long)
    cross_entropy.cross_entropy_(logits, labels, ignored=-100, with_grads=with_grads)


def turn(n: int, k: int, size: int, *, dtype: torch.dtype, back: bool) -> None:
    cos = torch.zeros(1, 4, 1, size // 2, dtype=dtype)
    heads.turn_(torch.zeros(2, 4, (n + 2 * k) * size, dtype=dtype), cos, cos, n, k, back=back)


def join(n: int, k: int, size: int, *, dtype: torch.dtype) -> None:
    cos = torch.zeros(1, 4, 1, size // 2, dtype=dtype)
    q, key = (torch.zeros(2, number, 4, size, dtype=dtype).transpose(1, 2) for number in (n, k))
    heads.join_operation(q, key, key.contiguous(), cos, cos)


def gate(width: int, *, dtype: torch.dtype) -> None:
    swiglu.swiglu_backward(
        torch.zeros(2, 2 * width, dtype=dtype), torch.zeros(2, width, dtype=dtype)
    )


def cast(*rows: int) -> None:
    linear._cast_by_kernel(
        [torch.zeros(size, 64) for size in rows], torch.zeros(sum(rows), 64, dtype=HALF)
    )


def step() -> None:
    weights = [nn.Parameter(torch.zeros(size)) for size in (5000, 7)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW(weights, fused=True)
    adamw_step.KernelStep(optimizer).take(torch.zeros(()))


def step_in_bf16(*shape: int, moments: torch.dtype) -> None:
    weight, grad = torch.zeros(2, *shape, dtype=HALF)
    first, second = torch.zeros(2, *shape, dtype=moments)
    settings = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    stochastic_step.update_(weight, grad, first, second, seed=1 << 31, step=1, **settings)


WIDE, HALF = torch.float32, torch.bfloat16
LAUNCHES: dict[str, tuple[ModuleType, Callable[[], None]]] = {
    "loss": (cross_entropy, lambda: lose(32000, dtype=HALF)),
    "loss in float32": (cross_entropy, lambda: lose(128256, dtype=WIDE)),
    "loss without gradient": (cross_entropy, lambda: lose(50257, dtype=HALF, with_grads=False)),
    "turn": (heads, lambda: turn(32, 8, 128, dtype=HALF, back=False)),
    "turn back": (heads, lambda: turn(12, 12, 64, dtype=HALF, back=True)),
    "turn the smallest": (heads, lambda: turn(1, 1, 2, dtype=WIDE, back=False)),
    "join": (heads, lambda: join(32, 8, 128, dtype=HALF)),
    "join the smallest": (heads, lambda: join(1, 1, 2, dtype=WIDE)),
    "gate": (swiglu, lambda: gate(14336, dtype=HALF)),
    "gate of odd width": (swiglu, lambda: gate(1001, dtype=WIDE)),
    "weights": (linear, lambda: cast(64, 8, 8)),
    "one weight": (linear, lambda: cast(33)),
    "factor": (scaling, lambda: scaling.scale_(torch.zeros(8192, dtype=HALF), torch.ones(()))),
    "step": (adamw_step, step),
    "step in bfloat16": (stochastic_step, lambda: step_in_bf16(64, 64, moments=HALF)),
    "of odd size": (stochastic_step, lambda: step_in_bf16(4097, moments=WIDE)),
}


def source_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ASTSource:
    """What a launch has Triton compile: types and alignment of arguments, constants by value."""
    bound = inspect.signature(kernel.fn).bind(*args, **kwargs).arguments
    signature, constants, attributes = {}, {}, {}
    for index, (param, (name, value)) in enumerate(zip(kernel.params, bound.items(), strict=True)):
        assert param.name == name
        if param.is_constexpr or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = mangle_type(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if type(number) is int and number % ALIGNMENT == 0:
            attributes[(index,)] = [["tt.divisibility", ALIGNMENT]]
    return ASTSource(kernel, signature, constants, attributes)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_kernel_compiles(monkeypatch: pytest.MonkeyPatch, launch: str, capability: int) -> None:
    module, start = LAUNCHES[launch]
    recorder = Recorder()
    if hasattr(module, "_kernels"):
        name, kernels = launch.partition(" ")[0], module._kernels()
        kernel = getattr(kernels, name)
        monkeypatch.setattr(module, "_kernels", lambda: kernels._replace(**{name: recorder}))
    else:
        kernel = module._kernel()
        monkeypatch.setattr(module, "_kernel", lambda: recorder)
    monkeypatch.setattr(adamw_step, "_send", lambda values, device: values.to(device))
    start()
    ((args, kwargs),) = recorder.launches
    options = {name: kwargs.pop(name) for name in LAUNCH_OPTIONS if name in kwargs}
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source_of(kernel, args, kwargs), target=target, options=options)
    assert f".target sm_{capability}" in made.asm["ptx"]
    assert made.asm["cubin"].startswith(b"\x7fELF")
    assert made.metadata.num_warps == options["num_warps"]
