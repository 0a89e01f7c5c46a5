"""Strategies of several ranks on CUDA: wrapped for real on one rank, and two ranks on one card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist

from headway import (
    DDPTrainer,
    DDPTrainingArguments,
    FSDP2Trainer,
    FSDP2TrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from headway.dist import init_distributed
from headway.dist.group import DistributedContext
from headway.testing import run_ranks, tiny_dataset, tiny_decoder

pytestmark = pytest.mark.gpu


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []

    def on_metrics(self, metrics: dict[str, float]) -> None:
        if "train/CE loss" in metrics:
            self.found.append((metrics["train/CE loss"], metrics["optim/total grad norm"]))


def wrapped_anyway(base: Any, strategy_class: Any) -> Any:
    """The trainer, but with its wrapper also on one rank."""

    class Forced(base):  # type: ignore[misc]
        def _make_strategy(self) -> Any:
            context = DistributedContext(world_size=1, backend="cpu:gloo,cuda:nccl")
            return strategy_class(context, torch.device(self.env.device), self.args)

    return Forced


def train(trainer_class: Any, arguments_class: Any, folder: str, **settings: Any) -> Any:
    losses = Losses()
    arguments = {
        "output_dir": folder, "per_device_train_batch_size": 4, "max_steps": 12, "seed": 0,
        "num_train_epochs": 10, "logging_steps": 3, "save_strategy": "steps", "save_steps": 6,
        "learning_rate": 3e-3, "max_grad_norm": 0.5, **settings,
    }  # fmt: skip
    trainer = trainer_class(
        args=arguments_class.from_dict(arguments),
        model_init=lambda: tiny_decoder(num_layers=4),
        train_dataset=tiny_dataset(48, sequence_length=16),
        eval_dataset=tiny_dataset(8, sequence_length=16, seed=1),
        callbacks=[losses],
        default_callbacks=False,
    )
    trainer.train()
    return losses.found, trainer.evaluate()["eval_loss"], str(trainer.strategy.device)


def on_one_rank(kind: str, folder: str) -> Any:
    """DDP or FSDP2 over a real NCCL group of one, and a resume from what it saved."""
    init_distributed(alone=True)
    assert "nccl" in dist.get_backend_config()
    if kind == "ddp":
        from headway.strategies.ddp import DistributedDataParallelStrategy

        classes = wrapped_anyway(DDPTrainer, DistributedDataParallelStrategy), DDPTrainingArguments
    else:
        from headway.strategies.fsdp2 import FullyShardedStrategy

        classes = wrapped_anyway(FSDP2Trainer, FullyShardedStrategy), FSDP2TrainingArguments
    whole = train(*classes, f"{folder}/whole")
    part = train(*classes, f"{folder}/part", stop_at="6 steps")
    rest = train(*classes, f"{folder}/part")
    return whole, part[0] + rest[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_wrapped_on_one_rank_over_nccl(kind, tmp_path):
    alone = train(Trainer, TrainingArguments, str(tmp_path / "single"))
    (result,) = run_ranks(on_one_rank, 1, kind, str(tmp_path / kind), backend=None, timeout_s=200)
    (found, eval_loss, device), resumed = result
    assert device == "cuda:0"
    assert len(found) == 12
    for (loss, norm), (wanted, wanted_norm) in zip(found, alone[0], strict=True):
        assert loss == pytest.approx(wanted, rel=1e-4)
        assert norm == pytest.approx(wanted_norm, rel=1e-3)
    assert eval_loss == pytest.approx(alone[1], rel=1e-4)
    assert resumed == found


def on_shared_card(kind: str, folder: str) -> Any:
    init_distributed(backend="gloo")
    classes = {
        "ddp": (DDPTrainer, DDPTrainingArguments),
        "fsdp2": (FSDP2Trainer, FSDP2TrainingArguments),
    }[kind]
    return train(*classes, folder, per_device_train_batch_size=2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_gloo_ranks_share_the_card(kind, tmp_path):
    alone = train(Trainer, TrainingArguments, str(tmp_path / "single"))
    results = run_ranks(on_shared_card, 2, kind, str(tmp_path / kind), backend=None, timeout_s=200)
    for found, eval_loss, device in results:
        assert device == "cuda:0"
        for (loss, norm), (wanted, wanted_norm) in zip(found, alone[0], strict=True):
            assert loss == pytest.approx(wanted, rel=1e-4)
            assert norm == pytest.approx(wanted_norm, rel=1e-3)
        assert eval_loss == pytest.approx(alone[1], rel=1e-4)
