"""Kernels of the gated MLP in eight bits, in Triton's interpreter; the MLP against torchao's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import kernels_on_cpu  # noqa: F401  before the operations are made
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import opcheck
from triton import language as tl
from triton.runtime import interpreter

from headway.models import fp8_mlp
from headway.models.config import DecoderConfig
from headway.models.decoder import GatedMLP
from headway.models.kernels import swiglu_fp8
from headway.precision import fp8

for kernel in swiglu_fp8._kernels():
    vars(swiglu_fp8).update(inspect.getclosurevars(kernel.fn).nonlocals)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EIGHT_BITS = {tl.float8e4nv: E4M3, tl.float8e5: E5M2}
CHECKS = ("test_schema", "test_faketensor")
# A single number, less than a tile, one, a bit more than one, and more than a program's part.
SIZES = [(2, 1), (6, 5), (64, 128), (66, 129), (16, 272), (4, 8200)]
# The interpreter is slow: small and large numbers in small sizes only.
CASES = [(size, 1.0) for size in SIZES] + [(size, s) for size in SIZES[:4] for s in (1e-3, 30.0)]


@pytest.fixture(autouse=True)
def nearest(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Casts to eight bits as a GPU makes them: the interpreter's own lose a carry."""
    plain = interpreter._convert_float

    def convert(given: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target not in EIGHT_BITS:
            return plain(given, source, target, rounding)
        assert source == tl.float32
        values = torch.from_numpy(np.ascontiguousarray(given))
        top = torch.finfo(EIGHT_BITS[target]).max
        return values.clamp(-top, top).to(EIGHT_BITS[target]).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    yield


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape)).to(torch.bfloat16)


def plain_forms(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate and up, and the product, all in single precision."""
    wide = [t.float().requires_grad_() for t in (gate, up)]
    product = F.silu(wide[0]) * wide[1]
    return *torch.autograd.grad(product, wide, grad.float()), product.detach()


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    return fp8_mlp.scale_for(x.abs().max(), dtype, False)


def assert_rounded(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """The nearest of eight bits; where single precision is a hair off, the next one to it."""
    nearest = wanted.to(dtype)
    assert found.dtype == dtype and found.shape == wanted.shape
    # The numbers of one sign lie in the order of their bits.
    steps = found.view(torch.uint8).int() - nearest.view(torch.uint8).int()
    same = (steps == 0) | ((found.float() == 0) & (nearest.float() == 0))
    assert torch.all(same | (steps.abs() == 1))
    assert (~same).sum() <= max(1, same.numel() // 500)


@pytest.mark.parametrize(("shape", "scale"), CASES)
def test_peaks_are_the_greatest_magnitudes(shape: tuple[int, int], scale: float) -> None:
    torch.manual_seed(0)
    gate, up, grad = draw(*shape, scale=scale), draw(*shape, scale=scale), draw(*shape)
    of_gate, of_up, product = (t.abs().max() for t in plain_forms(gate, up, grad))
    torch.testing.assert_close(swiglu_fp8.product_peaks(gate, up).max(), product)
    peaks = swiglu_fp8.grad_peaks(gate, up, grad).amax(1)
    torch.testing.assert_close(peaks, torch.stack([of_gate, of_up]))


@pytest.mark.parametrize("place", [0, 17, -1])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("spoiled", [0, 1, 2])
def test_a_peak_that_is_no_number_is_not_lost(place: int, value: float, spoiled: int) -> None:
    given = [torch.ones(3, 8200, dtype=torch.bfloat16) for _ in range(3)]
    given[spoiled].view(-1)[place] = value
    of_gate, of_up, product = (t.abs().max() for t in plain_forms(*given))
    assert torch.equal(swiglu_fp8.product_peaks(*given[:2]).max().isfinite(), product.isfinite())
    peaks = swiglu_fp8.grad_peaks(*given).amax(1)
    wanted = torch.stack([of_gate, of_up])
    assert not wanted.isfinite().all()
    torch.testing.assert_close(peaks, wanted, equal_nan=True)


@pytest.mark.parametrize(("shape", "scale"), CASES)
def test_what_is_cast_is_the_plain_form(shape: tuple[int, int], scale: float) -> None:
    torch.manual_seed(0)
    gate, up, grad = draw(*shape, scale=scale), draw(*shape, scale=scale), draw(*shape)
    wanted = plain_forms(gate, up, grad)
    scales = [scale_of(t, d) for t, d in zip(wanted, (E5M2, E5M2, E4M3))]
    of_gate, of_up, product = (t * s for t, s in zip(wanted, scales))
    made = swiglu_fp8.grad_cast(gate, up, grad, *scales, E5M2, E4M3)
    assert_rounded(made[0], of_gate, E5M2)
    assert_rounded(made[2], of_up, E5M2)
    cast = swiglu_fp8.product_cast(gate, up, scales[2], E4M3)
    assert_rounded(cast, product, E4M3)
    for one, other in ((made[1], made[0]), (made[3], made[2]), (made[4], cast)):
        assert one.is_contiguous()
        assert torch.equal(one.t().float(), other.float())


def test_an_open_gate_is_cast_exactly() -> None:
    """Where no exponential is rounded, every one of the eight bits is known."""
    torch.manual_seed(0)
    gate = 100 + 10 * torch.randn(34, 70).to(torch.bfloat16).abs()
    up, grad = draw(34, 70), draw(34, 70)
    wanted = (grad * up.float(), grad * gate.float(), gate * up.float())
    scales = [scale_of(t, d) for t, d in zip(wanted, (E5M2, E5M2, E4M3))]
    made = swiglu_fp8.grad_cast(gate, up, grad, *scales, E5M2, E4M3)
    for found, value, scale, dtype in zip(
        (made[0], made[2], made[4].t()), wanted, scales, (E5M2, E5M2, E4M3), strict=True
    ):
        assert torch.equal(found.float(), (value * scale).to(dtype).float())


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(16, 48, dtype=torch.bfloat16)
    assert not swiglu_fp8.product_peaks(zeros, zeros).any()
    scale = fp8_mlp.scale_for(torch.zeros(()), E5M2, False)
    assert scale.isfinite()
    for t in swiglu_fp8.grad_cast(zeros, zeros, zeros, scale, scale, scale, E5M2, E4M3):
        assert not t.float().any()


@pytest.mark.parametrize("peak", [float("nan"), float("inf")])
def test_a_scale_of_no_number_spoils_the_cast(peak: float) -> None:
    """NaN does so everywhere; infinity where it is: the rest becomes NaN in the product."""
    gate = torch.full((16, 48), 100.0, dtype=torch.bfloat16)
    gate[3, 5] = peak
    ones = torch.ones_like(gate)
    scale = fp8_mlp.scale_for(torch.tensor(peak), E5M2, False)
    made = swiglu_fp8.grad_cast(gate, ones, ones, scale, scale, scale, E5M2, E4M3)
    spoiled = torch.ones(16, 48, dtype=torch.bool)
    if peak == float("inf"):
        spoiled = gate.isinf()
        assert not scale.reciprocal().isfinite()
    for found in (
        made[2],
        made[3].t(),
        made[4].t(),
        swiglu_fp8.product_cast(gate, ones, scale, E4M3),
    ):
        assert torch.equal(found.float().isnan(), spoiled)


def test_operands_lie_in_memory_as_they_like() -> None:
    torch.manual_seed(0)
    gate, up, grad = draw(20, 34).t(), draw(34, 40)[:, ::2], draw(1, 20).expand(34, 20)
    scale = torch.tensor(3.0)
    packed = [t.contiguous() for t in (gate, up, grad)]
    for found, wanted in zip(
        swiglu_fp8.grad_cast(gate, up, grad, scale, scale, scale, E5M2, E4M3),
        swiglu_fp8.grad_cast(*packed, scale, scale, scale, E5M2, E4M3),
        strict=True,
    ):
        assert torch.equal(found.float(), wanted.float())
    assert torch.equal(swiglu_fp8.product_peaks(gate, up), swiglu_fp8.product_peaks(*packed[:2]))


def test_operations_give_what_the_compiler_is_told() -> None:
    gate, up, grad = draw(6, 5), draw(5, 6).t(), draw(6, 5)
    scale = torch.tensor(3.0)
    for operation, given in (
        (swiglu_fp8.product_peaks, (gate, up)),
        (swiglu_fp8.grad_peaks, (gate, up, grad)),
        (swiglu_fp8.product_cast, (gate, up, scale, E4M3)),
        (swiglu_fp8.grad_cast, (gate, up, grad, scale, scale, scale, E5M2, E4M3)),
    ):
        opcheck(operation, given, test_utils=CHECKS)
        made = operation(*given)
        for t in made if isinstance(made, tuple) else [made]:
            assert t.stride() == torch.empty(t.shape).stride()


# -- the whole MLP against three layers of torchao's ------------------------------------------


def make_mlp(hidden: int = 64, ffn: int = 176) -> GatedMLP:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    mlp = GatedMLP(
        DecoderConfig(
            vocab_size=8,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_layers=1,
            num_heads=2,
            max_seq_len=64,
        )
    )
    for layer in mlp.children():
        nn.init.normal_(layer.weight, std=0.3)
    with fp8.on_any_device():
        fp8.convert(mlp, "tensorwise", 16, torch.device("cpu"))
    return mlp


def outputs(run: Any, mlp: GatedMLP, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and all gradients."""
    mlp.zero_grad()
    x = x.clone().requires_grad_()
    out = run(x)
    out.backward(grad)
    made = [out.detach(), x.grad, *(layer.weight.grad for layer in mlp.children())]
    assert all(isinstance(t, Tensor) for t in made)
    return made


def ours(mlp: GatedMLP, x: Tensor) -> Tensor:
    weights = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
    return fp8_mlp.fp8_gated_mlp(x, *weights, fp8_mlp.settings_of(mlp.gate_proj))


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)], ids=["whole", "half"]
)
def test_output_and_gradients_are_those_of_three_layers(dtype: torch.dtype, limit: float) -> None:
    """In half precision torchao's layers, not compiled, round what is between them; we do not."""
    mlp = make_mlp()
    x, grad = torch.randn(2, 24, 64).to(dtype), (1e-3 * torch.randn(2, 24, 64)).to(dtype)
    found = outputs(lambda t: ours(mlp, t), mlp, x, grad)
    wanted = outputs(mlp, mlp, x, grad)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (one - other).norm() <= limit * other.norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["input", "gradient"])
def test_what_is_no_number_spoils_what_it_spoils_in_three_layers(value: float, where: str) -> None:
    mlp = make_mlp()
    x, grad = torch.randn(32, 64), torch.randn(32, 64)
    (x if where == "input" else grad)[3, 7] = value
    found = outputs(lambda t: ours(mlp, t), mlp, x, grad)
    wanted = outputs(mlp, mlp, x, grad)
    assert not wanted[-1].isfinite().any()
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())


BACKEND = "aot_eager_decomp_partition"


def operations_of(run: Callable[[], Any]) -> dict[str, int]:
    """How often each of the MLP's operations is called."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    start = "headway::swiglu_"
    return {
        event.key.removeprefix(start): event.count
        for event in profile.key_averages()
        if event.key.startswith(start)
    }


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fp8_mlp, "_takes_kernels", lambda x: True)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_a_compiled_mlp_runs_each_kernel_once(with_kernels: None) -> None:
    mlp = make_mlp()
    x, grad = draw(2, 24, 64), draw(2, 24, 64)
    compiled = torch.compile(mlp, backend=BACKEND, fullgraph=True)
    found = outputs(compiled, mlp, x, grad)
    wanted = outputs(lambda t: ours(mlp, t), mlp, x, grad)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 1e-2 * other.norm()
    names = ("product_peaks", "product_cast", "grad_peaks", "grad_cast")
    assert operations_of(lambda: outputs(compiled, mlp, x, grad)) == dict.fromkeys(names, 1)


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_without_gradients_only_the_product_is_made(with_kernels: None, dynamic: bool) -> None:
    """And not where the device does not take the number of tokens."""
    mlp = make_mlp()
    compiled = torch.compile(mlp, backend=BACKEND, fullgraph=True, dynamic=dynamic)
    for num_tokens, calls in ((48, 1), (37, 0), (64, 1)):
        x = draw(num_tokens, 64)
        wanted = mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
        found = compiled(x)
        assert (found - wanted).norm() <= 3e-2 * wanted.norm()
        wanted_calls = dict.fromkeys(("product_peaks", "product_cast"), calls) if calls else {}
        assert operations_of(lambda x=x: compiled(x)) == wanted_calls
