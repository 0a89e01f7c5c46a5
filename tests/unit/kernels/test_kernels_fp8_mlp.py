"""When the MLP in eight bits stands for three layers, and the scales it gives: torchao's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchao")

from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import CastConfig, ScalingGranularity
from torchao.float8.float8_utils import amax_to_scale

from headway.models import fp8_mlp
from headway.models.config import DecoderConfig
from headway.models.decoder import GatedMLP

WIDTH = 32


def make_mlp(config: Float8LinearConfig | None = None, ffn: int = 48, bias: bool = False) -> Any:
    mlp = GatedMLP(
        DecoderConfig(
            vocab_size=8,
            hidden_size=WIDTH,
            intermediate_size=ffn,
            num_layers=1,
            num_heads=2,
            max_seq_len=8,
        )
    )
    if bias:
        mlp.up_proj.bias = nn.Parameter(torch.zeros(ffn))
    convert_to_float8_training(mlp, config=config or Float8LinearConfig())
    return mlp


def fits(mlp: Any, x: Tensor) -> bool:
    return fp8_mlp.fits(x, mlp.gate_proj, mlp.up_proj, mlp.down_proj)


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_mlp, "_takes_kernels", lambda x: True)


def given(*shape: int) -> Tensor:
    return torch.zeros(*shape, WIDTH, dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", [(16,), (2, 8), (1, 4, 4), (3, 32)])
def test_layers_with_one_scale_for_a_tensor_fit(shape: tuple[int, ...]) -> None:
    assert fits(make_mlp(), given(*shape))


@pytest.mark.parametrize("shape", [(15,), (3, 5), (1,), (2, 9)])
def test_a_number_of_tokens_that_the_device_does_not_take_goes_the_plain_way(
    shape: tuple[int, ...],
) -> None:
    assert not fits(make_mlp(), given(*shape))


def test_widths_that_the_device_does_not_take_go_the_plain_way() -> None:
    assert not fits(make_mlp(ffn=40), given(16))


def test_another_precision_goes_the_plain_way() -> None:
    assert not fits(make_mlp(), given(16).float())
    assert not fits(make_mlp(), given(16).half())


ROWS = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)


@pytest.mark.parametrize(
    "config",
    [
        Float8LinearConfig.from_recipe_name("rowwise"),
        Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"),
        Float8LinearConfig(cast_config_grad_output_for_grad_weight=ROWS),
        Float8LinearConfig(emulate=True),
    ],
    ids=["rowwise", "rowwise_with_gw_hp", "rows for one product", "emulated"],
)
def test_other_recipes_go_the_plain_way(config: Float8LinearConfig) -> None:
    assert not fits(make_mlp(config), given(16))


def unlike(mlp: Any) -> None:
    mlp.up_proj = make_mlp(Float8LinearConfig(round_scales_to_power_of_2=True)).up_proj


def not_converted(mlp: Any) -> None:
    mlp.down_proj = nn.Linear(48, WIDTH, bias=False)


def replaced(mlp: Any) -> None:
    mlp.gate_proj.forward = lambda x: x


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda mlp: mlp.up_proj.register_forward_hook(lambda *_: None),
    "a hook before": lambda mlp: mlp.down_proj.register_forward_pre_hook(lambda *_: None),
    "a hook on the way back": lambda mlp: mlp.gate_proj.register_full_backward_hook(
        lambda *_: None
    ),
    "layers that are unlike": unlike,
    "a layer that is not converted": not_converted,
    "a forward of its own": replaced,
}


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_do_more_go_the_plain_way(change: str) -> None:
    mlp = make_mlp()
    CHANGES[change](mlp)
    assert not fits(mlp, given(16))


def test_a_bias_goes_the_plain_way() -> None:
    assert not fits(make_mlp(bias=True), given(16))


def test_without_a_gpu_and_a_compiler_the_plain_way_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    assert not fits(make_mlp(), given(16))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("peak_dtype", [torch.float32, torch.bfloat16])
def test_a_scale_is_that_of_torchao(
    dtype: torch.dtype, power_of_2: bool, peak_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    special = torch.tensor([0.0, 1e-30, 1e-12, 448.0, 57344.0, 3e38, math.inf, math.nan])
    for peak in torch.cat([special, torch.randn(50).exp()]).to(peak_dtype):
        found = fp8_mlp.scale_for(peak, dtype, power_of_2)
        wanted = amax_to_scale(peak, dtype, power_of_2)
        assert found.dtype == wanted.dtype == torch.float32
        assert torch.equal(found, wanted) or (found.isnan() and wanted.isnan())
