"""The gated MLP in eight bits by its own kernels computes what torchao's three layers do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("torchao")

from headway.models import Decoder, DecoderConfig, fp8_mlp
from headway.models import decoder as decoder_module
from headway.models.kernels import swiglu_fp8
from headway.precision import fp8


def has_fp8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_fp8(), reason="needs compute capability 8.9"),
    pytest.mark.timeout(300),  # several compilations in one test
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = ("product_peaks", "product_cast", "grad_peaks", "grad_cast")


@pytest.fixture(autouse=True)
def compiled_anew() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def make_model(*, eight_bits: bool = True, compiled: bool = True) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_layers=2,
        num_heads=4,
        max_seq_len=128,
    )
    model = Decoder(config).cuda()
    if eight_bits:
        fp8.convert(model, "tensorwise", 16, torch.device("cuda"), exclude=["lm_head"])
    if compiled:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    return model


def take_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "fits", lambda *_: False)


def grads_of(model: Decoder, factor: float = 1.0) -> dict[str, Tensor]:
    """The loss, and the gradients of all weights."""
    torch.manual_seed(1)
    ids = torch.randint(512, (4, 128), device="cuda")
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(ids, ids).loss
    (factor * loss).backward()
    made = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(made) == len(list(model.parameters()))
    return {"loss": loss.detach(), **made}


def kernels_of(run: Callable[[], Any]) -> Counter[str]:
    """How often each of the MLP's kernels ran on the device."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    names = [e.name for e in profile.events() if e.device_type == on_device]
    return Counter({n: found for n in NAMES if (found := names.count(f"swiglu_{n}"))})


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def test_compiled_blocks_with_and_without_the_kernels_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = grads_of(make_model(eight_bits=False, compiled=False))
    found = grads_of(make_model())
    torch.compiler.reset()
    take_plain_way(monkeypatch)
    plain = grads_of(make_model())
    assert found["loss"].item() == pytest.approx(plain["loss"].item(), rel=2e-3)
    for name, wanted in plain.items():
        assert found[name].dtype == wanted.dtype
        # Eight bits are off by more than the two differ by, and one no more than the other.
        off = error(wanted, exact[name])
        assert error(found[name], wanted) < off + 5e-3, name
        assert error(found[name], exact[name]) < 1.2 * off + 5e-3, name


def test_a_compiled_block_runs_each_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    grads_of(model)
    assert kernels_of(lambda: grads_of(model)) == dict.fromkeys(NAMES, 2)
    torch.compiler.reset()
    take_plain_way(monkeypatch)
    model = make_model()
    grads_of(model)
    assert not kernels_of(lambda: grads_of(model))


def test_what_is_not_compiled_or_not_in_eight_bits_runs_none() -> None:
    for settings in ({"compiled": False}, {"eight_bits": False}):
        model = make_model(**settings)
        grads_of(model)
        assert not kernels_of(lambda model=model: grads_of(model))


@torch.no_grad()
def test_an_odd_number_of_tokens_goes_the_plain_way() -> None:
    ids = torch.randint(512, (1, 37), device="cuda")
    model, plain = make_model(), make_model(compiled=False)
    with torch.autocast("cuda", torch.bfloat16):
        found = model(ids).logits
        assert error(found.float(), plain(ids).logits.float()) < 0.06
        assert not kernels_of(lambda: model(ids))
        # And an even one beside it does not.
        ids = torch.randint(512, (1, 48), device="cuda")
        model(ids)
        assert kernels_of(lambda: model(ids)) == {"product_peaks": 2, "product_cast": 2}


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_is_seen_in_all_weights(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    found = grads_of(make_model(), factor)
    torch.compiler.reset()
    take_plain_way(monkeypatch)
    plain = grads_of(make_model(), factor)
    for name, wanted in plain.items():
        assert torch.equal(found[name].isfinite(), wanted.isfinite()), name
    assert not found["model.layers.0.mlp.gate_proj.weight"].isfinite().any()


@pytest.mark.parametrize("spoiled", ["x", "grad"])
def test_one_nan_spoils_every_gradient_of_the_mlp(spoiled: str) -> None:
    mlp = make_model(compiled=False).model.layers[0].mlp
    compiled = torch.compile(mlp, dynamic=False)
    given = {name: torch.randn(2, 64, 256, device="cuda").bfloat16() for name in ("x", "grad")}
    given[spoiled][1, 63, 255] = float("nan")
    with torch.autocast("cuda", torch.bfloat16):
        out = compiled(given["x"].requires_grad_())
    out.backward(given["grad"])
    grads = [given["x"].grad, *(layer.weight.grad for layer in mlp.children())]
    assert not any(grad.isfinite().any() for grad in grads)


# -- the kernels by themselves: what the device rounds ----------------------------------------


# The last is that of a large model: whole tiles, many programs.
@pytest.mark.parametrize("shape", [(2, 1), (34, 129), (240, 1008), (16384, 8192)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_kernels_cast_as_torch_does(shape: tuple[int, int], scale: float) -> None:
    torch.manual_seed(0)
    gate, up, grad = (scale * torch.randn(3, *shape, device="cuda")).bfloat16()
    wide = [t.float().requires_grad_() for t in (gate, up)]
    product = F.silu(wide[0]) * wide[1]
    of_gate, of_up = torch.autograd.grad(product, wide, grad.float())
    wanted, dtypes = (of_gate, of_up, product.detach()), (E5M2, E5M2, E4M3)
    peaks = [*swiglu_fp8.grad_peaks(gate, up, grad).amax(1)]
    peaks.append(swiglu_fp8.product_peaks(gate, up).max())
    for peak, t in zip(peaks, wanted, strict=True):
        torch.testing.assert_close(peak, t.abs().max(), rtol=1e-5, atol=0)
    scales = [fp8_mlp.scale_for(p, d, False) for p, d in zip(peaks, dtypes, strict=True)]
    made = swiglu_fp8.grad_cast(gate, up, grad, *scales, E5M2, E4M3)
    cast = swiglu_fp8.product_cast(gate, up, scales[2], E4M3)
    for found, t, s, dtype in zip((made[0], made[2], cast), wanted, scales, dtypes, strict=True):
        top = torch.finfo(dtype).max
        nearest = (t * s).clamp(-top, top).to(dtype)
        steps = (found.view(torch.uint8).int() - nearest.view(torch.uint8).int()).abs()
        steps[(found.float() == 0) & (nearest.float() == 0)] = 0
        assert steps.max() <= 1
        assert (steps > 0).sum() <= max(1, steps.numel() // 500)
    # Bits, as NaN equals nothing.
    for one, other in ((made[1], made[0]), (made[3], made[2]), (made[4], cast)):
        steps = (one.t().view(torch.uint8).int() - other.view(torch.uint8).int()).abs()
        if other is not cast:
            assert steps.max() == 0
        # Computed by another kernel: a value in the middle of two may go to the other one.
        assert steps.max() <= 1 and (steps > 0).sum() <= steps.numel() // 500


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_peak_that_is_no_number_is_not_lost(value: float) -> None:
    given = torch.ones(3, 300, 1000, device="cuda", dtype=torch.bfloat16)
    for spoiled in range(3):
        one = given.clone()
        one[spoiled, 299, 999] = value
        peaks = swiglu_fp8.grad_peaks(*one).amax(1)
        assert not peaks.isfinite().all()
        assert swiglu_fp8.product_peaks(*one[:2]).max().isfinite() == (spoiled == 2)
        # An infinite gate has a slope that is no number.
        assert peaks.isnan().any() == (value != value or spoiled == 0)
