"""TrainerConfig: the defaults, and a clear refusal of everything that cannot be meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from xaytune_runs import make_config, make_loader, make_model, train

from headway.args import (
    AccelTrainingArguments,
    DDPTrainingArguments,
    FSDP2TrainingArguments,
    TrainingArguments,
)
from headway.compat.xaytune import Trainer, TrainerConfig
from headway.compat.xaytune.plan import make_arguments, plan_steps
from headway.compat.xaytune.strategy import TRAINERS
from headway.errors import ConfigError


def test_the_defaults_are_those_of_the_original() -> None:
    assert TrainerConfig().to_dict() == {
        "strategy": "auto",
        "mixed_precision": "bf16",
        "batch_size": 4,
        "gradient_accumulation": 1,
        "learning_rate": 2e-4,
        "num_epochs": 3,
        "max_steps": -1,
        "warmup_steps": 0,
        "warmup_ratio": 0.0,
        "scheduler": "cosine",
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "seed": 42,
        "checkpoint_every_n_steps": 500,
        "save_last": True,
        "activation_checkpointing": False,
        "async_checkpoint": False,
        "output_dir": "output",
        "save_total_limit": None,
    }


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("strategy", "fdsp", "did you mean 'fsdp'"),
        ("mixed_precision", "bf15", "did you mean 'bf16'"),
        ("scheduler", "cosin", "did you mean 'cosine'"),
        ("batch_size", 0, "at least 1"),
        ("batch_size", 2.5, "must be int"),
        ("batch_size", "4", "write the number without quotes"),
        ("gradient_accumulation", 0, "at least 1"),
        ("num_epochs", 0, "at least 1"),
        ("max_steps", 0, "-1 for no limit"),
        ("max_steps", -2, "-1 for no limit"),
        ("learning_rate", 0.0, "above 0"),
        ("learning_rate", -1e-3, "at least 0"),
        ("learning_rate", float("nan"), "got nan"),
        ("learning_rate", float("inf"), "got inf"),
        ("warmup_steps", -1, "at least 0"),
        ("warmup_ratio", 1.5, "from 0 to 1"),
        ("weight_decay", -0.1, "at least 0"),
        ("max_grad_norm", -1.0, "at least 0"),
        ("seed", -1, "at least 0"),
        ("checkpoint_every_n_steps", -5, "at least 0"),
        ("output_dir", "s3://bucket/run", "is an address; a folder is needed"),
        ("save_last", "yes", "must be bool"),
        ("save_total_limit", 0, "at least 1"),
    ],
)
def test_an_impossible_value_is_refused_by_name(option: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        TrainerConfig(**{option: value})
    assert option in str(caught.value)


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(scheduler="step", batch_size=0, warmup_steps=10, warmup_ratio=0.1)
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    assert all(name in text for name in ("scheduler", "batch_size", "exclude each other"))


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'lerning_rate'; did you mean 'learning_rate'"):
        Trainer({"lerning_rate": 1e-3})
    with pytest.raises(ConfigError, match="must be a TrainerConfig, got int"):
        Trainer(3)  # type: ignore[arg-type]


def test_an_overridden_training_step_is_refused() -> None:
    class Own(Trainer):
        def training_step(self, model: Any, batch: Any, optimizer: Any, state: Any) -> float:
            return 0.0

    with pytest.raises(ConfigError, match=r"training_step would never be called.*loss_fn"):
        Own(TrainerConfig())


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)],
)
def test_operations_run_in_the_precision_and_weights_stay(
    precision: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, seen = make_model(), set()
    model.linear.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    train(make_config(tmp_path, max_steps=1, mixed_precision=precision), model=model)
    assert seen == {dtype}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("precision", "expected"), [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "no")]
)
def test_precision_is_headways_own(precision: str, expected: str, device: str) -> None:
    args = make_arguments(
        TrainerConfig(mixed_precision=precision),
        device=torch.device(device),
        total_steps=1,
        batch_size=1,
        num_eval_steps=None,
        builds_scheduler=True,
    )
    assert args.mixed_precision == expected


def test_the_config_becomes_headways_arguments() -> None:
    config = TrainerConfig(
        gradient_accumulation=3, activation_checkpointing=True, warmup_ratio=0.1, seed=5
    )
    args = make_arguments(
        config,
        device=torch.device("cpu"),
        total_steps=205,
        batch_size=8,
        num_eval_steps=0,
        builds_scheduler=True,
    )
    assert args.gradient_accumulation_steps == 3
    assert args.gradient_checkpointing is True
    assert (args.warmup_steps, args.max_steps, args.seed) == (20, 205, 5)
    assert (args.save_strategy, args.save_steps) == ("steps", 500)
    assert args.eval_strategy == "epoch"
    given = make_arguments(
        config,
        device=torch.device("cpu"),
        total_steps=205,
        batch_size=8,
        num_eval_steps=0,
        builds_scheduler=False,
        builds_optimizer=False,
    )
    usual = TrainingArguments()
    for name in ("learning_rate", "weight_decay", "lr_scheduler_type", "warmup_steps"):
        assert getattr(given, name) == getattr(usual, name), "no option that would have no effect"


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("none", TrainingArguments),
        ("ddp", DDPTrainingArguments),
        ("fsdp", FSDP2TrainingArguments),
        ("deepspeed", AccelTrainingArguments),
    ],
)
def test_each_strategy_has_its_trainer_and_arguments(strategy: str, expected: type) -> None:
    assert TrainerConfig(strategy=strategy).strategy == strategy
    chosen = TRAINERS[strategy].arguments_class
    assert chosen is expected
    args = make_arguments(
        TrainerConfig(mixed_precision="bf16"),
        device=torch.device("cuda", 0),
        total_steps=4,
        batch_size=2,
        num_eval_steps=None,
        builds_scheduler=True,
        arguments_class=chosen,
        world_size=2,
    )
    assert type(args) is expected
    # DeepSpeed's precision is its own.
    assert args.mixed_precision == (None if strategy == "deepspeed" else "bf16")
    assert args.device is None  # rank 1 is not to train on rank 0's device


@pytest.mark.parametrize(
    ("world_size", "sharded", "steps"), [(1, False, 6), (2, False, 4), (2, True, 6), (4, False, 2)]
)
def test_steps_are_counted_for_all_ranks(world_size: int, sharded: bool, steps: int) -> None:
    # 22 samples in batches of 4 are 6 batches, in windows of 2, for 2 epochs.
    loader = make_loader()
    if sharded:
        loader.is_sharded = True  # type: ignore[attr-defined]
    config = TrainerConfig(num_epochs=2, gradient_accumulation=2)
    assert plan_steps(config, loader, world_size) == steps


def _other_scheduler() -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(make_model().parameters()), 1)


def _plateau() -> Any:
    optimizer = torch.optim.SGD(make_model().parameters())
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("model", lambda: "gpt", "model must be a torch.nn.Module, got str"),
        ("model", lambda: nn.Identity(), "no parameter"),
        ("optimizer", lambda: "adam", "optimizer must be a torch.optim.Optimizer, got str"),
        ("scheduler", lambda: 3, r"scheduler must have step\(\), got int"),
        ("scheduler", _other_scheduler, "belongs to another optimizer"),
        ("scheduler", _plateau, "ReduceLROnPlateau"),
        ("train_dataloader", lambda: 7, "train_dataloader must be a DataLoader"),
        ("train_dataloader", lambda: {"x": 1}, "train_dataloader must be a DataLoader"),
        ("train_dataloader", list, "train_dataloader is empty"),
        ("eval_dataloader", list, "eval_dataloader is empty"),
        ("eval_every_n_steps", lambda: -1, "eval_steps"),
    ],
)
def test_a_wrong_argument_of_train_is_refused(
    option: str, value: Any, message: str, tmp_path: Path
) -> None:
    options = {"eval_dataloader": make_loader(), option: value()}
    with pytest.raises(ConfigError, match=message):
        train(make_config(tmp_path), **options)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_warm_up_longer_than_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="warmup_steps=50 is longer"):
        train(make_config(tmp_path, warmup_steps=50))


def test_without_data_there_is_no_training(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="train_dataloader"):
        Trainer(make_config(tmp_path)).train(model=make_model())  # type: ignore[call-arg]
