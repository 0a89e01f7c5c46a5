"""Kernels in eight bits compiled for GPUs that have them and are not here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
from compiled import LAUNCH_OPTIONS, Recorder, source_of
from triton.backends.compiler import GPUTarget

from headway.models.kernels import swiglu_fp8

CAPABILITIES = [89, 90, 100]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def launch_product_peaks(*shape: int) -> None:
    t = torch.zeros(shape, dtype=torch.bfloat16)
    swiglu_fp8.product_peaks(t, t)


def launch_product_cast(*shape: int) -> None:
    t = torch.zeros(shape, dtype=torch.bfloat16)
    swiglu_fp8.product_cast(t, t, torch.ones(()), E4M3)


def launch_grad_peaks(*shape: int) -> None:
    t = torch.zeros(shape, dtype=torch.bfloat16)
    swiglu_fp8.grad_peaks(t, t, t)


def launch_grad_cast(*shape: int) -> None:
    t, one = torch.zeros(shape, dtype=torch.bfloat16), torch.ones(())
    swiglu_fp8.grad_cast(t, t, t, one, one, one, E5M2, E4M3)


LAUNCHES: dict[str, Callable[..., None]] = {
    "product_peaks": launch_product_peaks,
    "product_cast": launch_product_cast,
    "grad_peaks": launch_grad_peaks,
    "grad_cast": launch_grad_cast,
}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("shape", [(256, 8192), (34, 1001)], ids=["usual", "odd"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_kernel_compiles(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, int], capability: int
) -> None:
    kernels, recorder = swiglu_fp8._kernels(), Recorder()
    monkeypatch.setattr(swiglu_fp8, "_kernels", lambda: kernels._replace(**{name: recorder}))
    LAUNCHES[name](*shape)
    ((args, kwargs),) = recorder.launches
    if "BY_DEVICE" in kwargs:
        kwargs["BY_DEVICE"] = True
    options = {key: kwargs.pop(key) for key in LAUNCH_OPTIONS if key in kwargs}
    target = GPUTarget("cuda", capability, 32)
    source = source_of(getattr(kernels, name), args, kwargs)
    made = triton.compile(source, target=target, options=options)
    assert f".target sm_{capability}" in made.asm["ptx"]
    assert made.asm["cubin"].startswith(b"\x7fELF")
    # With these beside it, Triton has written transposed stores of single bytes wrongly.
    assert "max.NaN" not in made.asm["ptx"] and "min.NaN" not in made.asm["ptx"]
