"""Wrapping a model for one's own loop: names, options, and what they mean to `fully_shard`."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from headway.dist import DistributedContext
from headway.errors import ConfigError
from headway.strategies import DeepSpeedConfig, FSDPConfig, get_strategy, wrap_model_distributed
from headway.testing import run_ranks, tiny_decoder

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
ALONE = DistributedContext(device_name="cpu")
BATCH = torch.arange(32).reshape(4, 8)


def decoder(seed: int = 3, **sizes: Any) -> nn.Module:
    torch.manual_seed(seed)
    return tiny_decoder(**{"hidden_size": 16, "intermediate_size": 32, **sizes})


class Tower(nn.Module):
    """Blocks without a method that switches activation checkpointing on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.num_calls = 0
        self.layers[0].register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num_calls += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


# -- choosing ------------------------------------------------------------------------------------


def test_auto_shares_out_only_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_strategy("auto") == "none"
    assert get_strategy("auto", 4) == "ddp"
    assert get_strategy("auto", 4, model=nn.Linear(2, 2)) == "ddp"

    class Device:
        total_memory = 1000

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Device)
    large = nn.Linear(50, 1, bias=False)
    assert get_strategy("auto", 4, model=large) == "fsdp"
    assert get_strategy("auto", 4, model=large.requires_grad_(False)) == "ddp"
    assert get_strategy("auto", 1, model=large) == "none"


@pytest.mark.parametrize("name", ["none", "ddp", "fsdp", "deepspeed"])
def test_a_known_name_stays(name: str) -> None:
    assert get_strategy(name) == get_strategy(name, 8) == name


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fsdp'"):
        get_strategy("fspd", 2)
    with pytest.raises(ConfigError, match="unknown strategy"):
        wrap_model_distributed(nn.Linear(1, 1), strategy="megatron", ctx=ALONE)


# -- options -------------------------------------------------------------------------------------


def test_fsdp_fields_and_defaults() -> None:
    assert {field.name: field.default for field in fields(FSDPConfig)} == {
        "sharding_strategy": "full_shard",
        "cpu_offload": False,
        "backward_prefetch": None,
        "mixed_precision": True,
        "auto_wrap_min_params": 100_000,
        "forward_prefetch": False,
        "sync_module_states": True,
        "limit_all_gathers": True,
        "activation_checkpointing": False,
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sharding_strategy": "no_shard"}, "strategy='ddp'"),
        ({"sharding_strategy": "fullshard"}, "did you mean 'full_shard'"),
        ({"backward_prefetch": "backward_post"}, "no 'backward_post'"),
        ({"backward_prefetch": "before"}, "backward_prefetch"),
        ({"limit_all_gathers": False}, "limit_all_gathers"),
        ({"auto_wrap_min_params": -1}, "auto_wrap_min_params"),
        ({"cpu_offload": "yes"}, "cpu_offload"),
        ({"forward_prefech": True}, "did you mean 'forward_prefetch'"),
    ],
)
def test_what_fully_shard_lacks_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        wrap_model_distributed(nn.Linear(1, 1), strategy="fsdp", ctx=ALONE, fsdp_config=given)


@pytest.mark.parametrize(
    ("strategy", "kwargs", "words"),
    [
        ("ddp", {"find_unused_params": True}, "did you mean 'find_unused_parameters'"),
        ("fsdp", {"reshard_after": True}, "did you mean 'reshard_after_forward'"),
        ("none", {"anything": 1}, "it takes none"),
        ("ddp", {"mixed_precision": "bf15"}, "did you mean 'bf16'"),
        ("deepspeed", {"deepspeed_config": {}, "accumulaton": 2}, "did you mean 'accumulation'"),
        ("deepspeed", {"deepspeed_config": {"zero_stage": 9}}, "zero_stage"),
    ],
)
def test_a_wrong_argument_is_named(strategy: str, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        wrap_model_distributed(nn.Linear(1, 1), strategy=strategy, ctx=ALONE, **kwargs)


def test_deepspeed_is_never_a_silent_unwrapped_model() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="needs deepspeed_config"):
        wrap_model_distributed(model, strategy="deepspeed", ctx=ALONE)
    with pytest.raises(ConfigError, match="needs an optimizer"):
        wrap_model_distributed(
            model, strategy="deepspeed", ctx=ALONE, deepspeed_config=DeepSpeedConfig()
        )
    if not HAS_DEEPSPEED:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match=r"headway\[deepspeed\]"):
            wrap_model_distributed(
                model,
                strategy="deepspeed",
                ctx=ALONE,
                deepspeed_config=DeepSpeedConfig(),
                optimizer=optimizer,
            )


@pytest.mark.parametrize("strategy", ["none", "auto", "ddp", "fsdp"])
def test_one_rank_stays_unwrapped(strategy: str) -> None:
    model = nn.Linear(1, 1)
    assert wrap_model_distributed(model, strategy=strategy, ctx=ALONE) is model
    assert type(model) is nn.Linear


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_ranks_need_a_process_group(strategy: str) -> None:
    context = DistributedContext(world_size=2, device_name="cpu")
    with pytest.raises(ConfigError, match="init_distributed"):
        wrap_model_distributed(nn.Linear(1, 1), strategy=strategy, ctx=context)


# -- activation checkpointing --------------------------------------------------------------------


def test_activation_checkpointing_recomputes() -> None:
    config = FSDPConfig(activation_checkpointing=True)
    names = [name for name, _ in Tower().named_parameters()]
    tower = Tower()
    wrap_model_distributed(tower, strategy="fsdp", ctx=ALONE, fsdp_config=config)
    tower(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert tower.num_calls == 2
    assert list(tower.state_dict()) == names
    model = wrap_model_distributed(decoder(), strategy="fsdp", ctx=ALONE, fsdp_config=config)
    assert model.is_gradient_checkpointing
    with pytest.raises(ConfigError, match="activation_checkpointing: Linear has neither"):
        wrap_model_distributed(nn.Linear(1, 1), strategy="fsdp", ctx=ALONE, fsdp_config=config)


# -- two ranks -----------------------------------------------------------------------------------


def gradients_of(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    from torch.distributed.tensor import DTensor

    model(input_ids=batch, labels=batch).loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        found[name.removeprefix("module.")] = gradient.clone()
    return found


CONFIGS: dict[str, dict[str, Any]] = {
    "defaults, by blocks": {"mixed_precision": False, "auto_wrap_min_params": 100},
    "whole": {"mixed_precision": False, "auto_wrap_min_params": 0},
    "blocks too small": {"mixed_precision": False, "auto_wrap_min_params": 10_000},
    "kept, fetched ahead": {
        "mixed_precision": False,
        "auto_wrap_min_params": 100,
        "sharding_strategy": "shard_grad_op",
        "forward_prefetch": True,
        "backward_prefetch": "backward_pre",
    },
    "on the host, recomputed": {
        "mixed_precision": False,
        "auto_wrap_min_params": 100,
        "cpu_offload": True,
        "activation_checkpointing": True,
    },
    "bf16": {"auto_wrap_min_params": 100},
}


def _wrap_on_rank() -> dict[str, Any]:
    """Gradients of every way of wrapping, on this rank's half of the batch, and facts on it."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    from headway.dist import init_distributed

    ctx = init_distributed(use_cpu=True)
    half = BATCH.chunk(2)[ctx.rank]
    results: dict[str, Any] = {}
    # Rank 1 starts from other values; rank 0's count.
    wrapped = wrap_model_distributed(
        decoder(3 + ctx.rank), strategy="auto", ctx=ctx, find_unused_parameters=True
    )
    assert isinstance(wrapped, DistributedDataParallel) and wrapped.device_ids is None
    assert wrapped.find_unused_parameters
    results["ddp"] = gradients_of(wrapped, half)
    with pytest.raises(ConfigError, match="device_ids"):
        wrap_model_distributed(decoder(), strategy="ddp", ctx=ctx, device_ids=[0])
    facts = {}
    for name, given in CONFIGS.items():
        model = decoder(3 + ctx.rank)
        config = FSDPConfig(**given)
        assert wrap_model_distributed(model, strategy="fsdp", ctx=ctx, fsdp_config=config) is model
        results[name] = gradients_of(model, half)
        sharded = [m for m in model.modules() if isinstance(m, FSDPModule)]
        facts[name] = sorted(type(m).__name__ for m in sharded)
    stack = nn.Sequential(
        nn.Linear(8, 8), nn.Linear(8, 32), nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 1))
    )
    wrap_model_distributed(
        stack, strategy="fsdp", ctx=ctx, fsdp_config={"auto_wrap_min_params": 288}
    )
    assert stack(torch.ones(1, 8)).dtype == torch.float32
    facts["by size"] = [name for name, m in stack.named_modules() if isinstance(m, FSDPModule)]
    tied = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9, bias=False))
    tied[2].weight = tied[0].weight
    wrap_model_distributed(tied, strategy="fsdp", ctx=ctx, fsdp_config={"auto_wrap_min_params": 1})
    tied(torch.arange(3)).sum().backward()
    assert tied[2].weight is tied[0].weight and tied[0].weight.grad is not None
    facts["tied, by size"] = [n for n, m in tied.named_modules() if isinstance(m, FSDPModule)]
    lonely = wrap_model_distributed(
        decoder(3 + ctx.rank),
        strategy="fsdp",
        ctx=ctx,
        fsdp_config={"sync_module_states": False, "mixed_precision": False},
    )
    # Nobody made the ranks agree: rank 1's slice is of its own values.
    mine = dict(decoder(3 + ctx.rank).named_parameters())
    for name, parameter in lonely.named_parameters():
        assert torch.equal(parameter.to_local(), mine[name].chunk(2)[ctx.rank])
    results["facts"] = facts
    return results


def test_two_ranks_reduce_to_the_mean_of_one_process() -> None:
    expected = gradients_of(decoder(), BATCH)
    ranks = run_ranks(_wrap_on_rank, 2)
    for results in ranks:
        facts = results.pop("facts")
        assert set(results) == {"ddp", *CONFIGS}
        for name, found in results.items():
            tolerance = 0.02 if name == "bf16" else 1e-6
            assert found.keys() == expected.keys(), name
            for key, gradient in expected.items():
                assert found[key].dtype == torch.float32
                torch.testing.assert_close(
                    found[key], gradient, rtol=tolerance, atol=tolerance, msg=f"{name}: {key}"
                )
        assert facts["whole"] == ["FSDPDecoder"]
        assert facts["defaults, by blocks"] == [
            "FSDPDecoder",
            "FSDPDecoderLayer",
            "FSDPDecoderLayer",
        ]
        assert facts["blocks too small"] == ["FSDPDecoder"]
        assert facts["by size"] == ["", "1", "2.0"]
        assert facts["tied, by size"] == ["", "1"]
