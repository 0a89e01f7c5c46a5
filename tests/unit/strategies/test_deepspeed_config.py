"""DeepSpeed's configuration: complete, validated, and accepted by DeepSpeed itself."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.args import TrainingArguments
from headway.errors import ConfigError
from headway.strategies import DeepSpeedConfig, build_deepspeed_config, make_deepspeed_plugin

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None


def values_of(config: Any) -> list[Any]:
    if isinstance(config, dict):
        return [leaf for value in config.values() for leaf in values_of(value)]
    return [config]


def write(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_fields_and_defaults() -> None:
    assert {field.name: field.default for field in fields(DeepSpeedConfig)} == {
        "config_file": None,
        "zero_stage": 2,
        "offload_optimizer": False,
        "offload_param": False,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 500_000_000,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 100_000,
    }


def test_everything_is_decided() -> None:
    built = build_deepspeed_config(
        DeepSpeedConfig(zero_stage=3, offload_optimizer=True, offload_param=True),
        micro_batch_size=4,
        accumulation=3,
        world_size=2,
        max_grad_norm=0.5,
        mixed_precision="bf16",
        optimizer={"type": "adamw", "params": {"lr": 1e-3, "betas": (0.9, 0.95)}},
    )
    assert "auto" not in values_of(built)
    assert built["train_batch_size"] == 24
    assert built["train_micro_batch_size_per_gpu"] == 4
    assert built["gradient_accumulation_steps"] == 3
    assert built["gradient_clipping"] == 0.5
    assert built["bf16"]["enabled"] is True and built["fp16"]["enabled"] is False
    assert built["optimizer"] == {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}
    zero = built["zero_optimization"]
    assert zero["stage"] == 3
    assert (
        zero["offload_optimizer"]
        == zero["offload_param"]
        == {
            "device": "cpu",
            "pin_memory": True,
        }
    )
    assert zero["stage3_prefetch_bucket_size"] == 50_000_000
    assert zero["stage3_param_persistence_threshold"] == 100_000
    json.dumps(built)


def test_stage_3_keys_only_in_stage_3() -> None:
    zero = build_deepspeed_config(DeepSpeedConfig(), world_size=1)["zero_optimization"]
    assert zero == {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 500_000_000,
    }


def test_values_from_training_arguments() -> None:
    args = TrainingArguments(
        per_device_train_batch_size=8, gradient_accumulation_steps=2, max_grad_norm=1.5
    )
    built = build_deepspeed_config(args=args, world_size=4)
    assert (built["train_batch_size"], built["gradient_clipping"]) == (64, 1.5)
    assert built["fp16"]["enabled"] is built["bf16"]["enabled"] is False


def test_world_size_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert build_deepspeed_config(micro_batch_size=2)["train_batch_size"] == 6


def test_own_optimizer_is_neither_named_nor_replaced() -> None:
    built = build_deepspeed_config(DeepSpeedConfig(offload_optimizer=True), world_size=1)
    assert "optimizer" not in built
    assert built["zero_allow_untested_optimizer"] is True
    assert built["zero_force_ds_cpu_optimizer"] is False


def test_a_torch_optimizer_is_described() -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.25, weight_decay=0.5)
    described = build_deepspeed_config(optimizer=optimizer, world_size=1)["optimizer"]
    assert described["type"] == "AdamW"
    assert described["params"]["lr"] == 0.25 and described["params"]["weight_decay"] == 0.5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"zero_stage": 4}, "zero_stage: 4 given; allowed: 0, 1, 2, 3"),
        ({"zero_stage": True}, "zero_stage"),
        ({"zero_stage": 1, "offload_param": True}, "offload_param: needs zero_stage 3, got 1"),
        ({"zero_stage": 0, "offload_optimizer": True}, "offload_optimizer: needs zero_stage 1"),
        ({"reduce_bucket_size": 0}, "reduce_bucket_size"),
        ({"overlap_comm": "yes"}, "overlap_comm"),
        ({"zero_stge": 2}, "did you mean 'zero_stage'"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_deepspeed_config(given, world_size=1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mixed_precision": "bf15"}, "did you mean 'bf16'"),
        ({"micro_batch_size": -1}, "micro_batch_size"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
        ({"optimizer": {"type": "AdanW", "params": {}}}, "did you mean 'AdamW'"),
        ({"optimizer": {"lr": 1}}, "'type' and 'params'"),
        ({"optimizer": 3}, "optimizer"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_deepspeed_config(world_size=1, **given)


def test_a_file_overrides_the_options_and_its_autos_are_settled(tmp_path: Path) -> None:
    path = write(
        tmp_path / "ds.json",
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": 2.0,
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
        },
    )
    built = build_deepspeed_config(
        DeepSpeedConfig(config_file=path, zero_stage=3, reduce_bucket_size=7),
        micro_batch_size=2,
        accumulation=2,
        world_size=2,
        max_grad_norm=1.0,
        mixed_precision="bf16",
    )
    assert "auto" not in values_of(built)
    assert (built["train_batch_size"], built["gradient_accumulation_steps"]) == (8, 2)
    assert built["gradient_clipping"] == 2.0
    assert built["bf16"]["enabled"] is True
    assert built["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 7}


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"train_batch_size": 24}, (24, 4, 3)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, (24, 2, 6)),
        ({"gradient_accumulation_steps": 5}, (20, 2, 5)),
        ({"train_micro_batch_size_per_gpu": 7}, (42, 7, 3)),
        ({}, (12, 2, 3)),
    ],
)
def test_batch_sizes_a_file_leaves_out_follow(
    tmp_path: Path, named: dict[str, int], expected: tuple[int, int, int]
) -> None:
    path = write(tmp_path / "ds.json", {**named, "zero_optimization": {"stage": 1}})
    built = build_deepspeed_config(
        {"config_file": path}, micro_batch_size=2, accumulation=3, world_size=2
    )
    assert expected == (
        built["train_batch_size"],
        built["train_micro_batch_size_per_gpu"],
        built["gradient_accumulation_steps"],
    )


def test_bad_files(tmp_path: Path) -> None:
    def build(path: str) -> None:
        build_deepspeed_config(DeepSpeedConfig(config_file=path), world_size=2)

    with pytest.raises(ConfigError, match=r"config_file: cannot read .*nowhere\.json"):
        build(str(tmp_path / "nowhere.json"))
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        build(str(tmp_path / "text.json"))
    with pytest.raises(ConfigError, match="holds no JSON object"):
        build(write(tmp_path / "list.json", [1]))
    with pytest.raises(ConfigError, match=r"'auto' for scheduler\.params\.warmup_num_steps"):
        build(
            write(tmp_path / "auto.json", {"scheduler": {"params": {"warmup_num_steps": "auto"}}})
        )
    with pytest.raises(ConfigError, match="train_batch_size=7 is not"):
        build(write(tmp_path / "odd.json", {"train_batch_size": 7}))
    both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    with pytest.raises(ConfigError, match="fp16 and bf16 are both enabled"):
        build(write(tmp_path / "both.json", both))


@pytest.mark.skipif(HAS_DEEPSPEED or not HAS_ACCELERATE, reason="DeepSpeed is installed")
def test_without_deepspeed_the_extra_is_named() -> None:
    with pytest.raises(ConfigError, match=r"headway\[deepspeed\]"):
        make_deepspeed_plugin(DeepSpeedConfig(), world_size=1)


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_deepspeed_accepts_it(stage: int, precision: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig as Validator

    built = build_deepspeed_config(
        DeepSpeedConfig(zero_stage=stage, offload_optimizer=stage > 0, offload_param=stage == 3),
        micro_batch_size=4,
        accumulation=2,
        max_grad_norm=1.0,
        mixed_precision=precision,
        optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
        world_size=1,
    )
    read = Validator(built)
    assert read.train_batch_size == 8 and read.gradient_accumulation_steps == 2
    assert read.gradient_clipping == 1.0
    assert read.zero_optimization_stage == stage
    assert read.zero_config.overlap_comm is True
    assert read.bfloat16_config.enabled is (precision == "bf16")
    assert read.float16_config.enabled is (precision == "fp16")
    assert read.optimizer_name == "adamw" and read.optimizer_params == {"lr": 1e-3}
