"""Memory options and compilation on real ranks: the same losses as without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from headway import (
    DDPTrainer,
    DDPTrainingArguments,
    FSDP2Trainer,
    FSDP2TrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
)
from headway.dist import init_distributed
from headway.strategies.offload import ActivationOffload, HostLane
from headway.testing import run_ranks, tiny_dataset, tiny_decoder
from headway.trainers import preparation

KINDS = {
    "ddp": (DDPTrainer, DDPTrainingArguments, {}),
    "fsdp2": (FSDP2Trainer, FSDP2TrainingArguments, {}),
    "pipeline": (
        PipelineTrainer,
        PipelineTrainingArguments,
        {"n_microbatches": 2, "pipe_schedule": "Schedule1F1B"},
    ),
}
RECOMPUTE = {"gradient_checkpointing": True}
COMPILE = {
    "torch_compile": True,
    "torch_compile_backend": "eager",
    "torch_compile_full_graph": True,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "block": RECOMPUTE,
    "selective": {**RECOMPUTE, "gradient_checkpointing_policy": "selective"},
    "every_2": {**RECOMPUTE, "gradient_checkpointing_policy": "every_2"},
}


def _model() -> torch.nn.Module:
    return tiny_decoder(num_layers=4, dropout=0.1)


def _make(kind: str, folder: Path, max_steps: int = 3, **options: Any) -> Any:
    trainer_class, arguments_class, own = KINDS[kind]
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_grad_norm": 1.0,
        "seed": 0,
        "use_cpu": True,
        "max_steps": max_steps,
        **own,
        **options,
    }
    return trainer_class(
        args=arguments_class(**settings),
        model_init=_model,
        train_dataset=tiny_dataset(64, sequence_length=12),
        eval_dataset=tiny_dataset(8, sequence_length=12, seed=1),
        default_callbacks=False,
    )


def _losses(trainer: Any) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in trainer.state.log_history if "loss" in r}


def _run_all(folder: Path, kind: str) -> dict[str, Any]:
    init_distributed(use_cpu=True)
    found: dict[str, Any] = {}
    for name, options in OPTIONS.items():
        trainer = _make(kind, folder / name, **options)
        trainer.train()
        found[name] = _losses(trainer)
    found["offload"] = _run_offloaded(folder / "offload", kind)
    counters.clear()
    trainer = _make(kind, folder / "compile", **COMPILE)
    trainer.train()
    found["compile"], found["graphs"] = _losses(trainer), counters["stats"]["unique_graphs"]
    found["eval_loss"] = trainer.evaluate()["eval_loss"]
    found["names"] = sorted(trainer.strategy.unwrap().state_dict())
    low = _make(kind, folder / "low", max_steps=1, default_dtype="bfloat16")
    low.train()
    found["dtypes"] = sorted({str(p.dtype) for p in low.strategy.unwrap().parameters()})
    found["low loss"] = _losses(low)[1]
    return found


def _bytes_of_a_forward() -> int:
    model, ids = _model(), torch.arange(48).view(4, 12)
    offload = ActivationOffload(HostLane(), torch.device("cpu"), min_bytes=0)
    offload.watch(model)
    with offload():
        model(ids, labels=ids, num_items_in_batch=88)
    return offload.num_bytes


def _run_offloaded(folder: Path, kind: str) -> dict[int, float]:
    """With the hooks that a GPU has, and plain copies."""
    offload = ActivationOffload(HostLane(), torch.device("cpu"), min_bytes=0)
    plain, preparation.make_offload = preparation.make_offload, lambda device: offload
    try:
        trainer = _make(kind, folder, enable_activation_offloading=True)
        trainer.train()
    finally:
        preparation.make_offload = plain
    assert offload.num_bytes > 0
    if kind != "pipeline":  # there each rank has a part
        # Weights stay, also those that FSDP2 gathers for a forward.
        # The smallest matrix has 2 KiB, all of them 180.
        assert abs(offload.num_bytes - _bytes_of_a_forward()) < 2048
    return _losses(trainer)


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2", "pipeline"])
def test_options_change_memory_and_not_the_losses(tmp_path, kind):
    found = run_ranks(_run_all, 2, tmp_path, kind, timeout_s=280)
    for rank in found:
        assert len(rank["plain"]) == 3
        for name in ("block", "selective", "every_2", "offload"):
            assert rank[name] == rank["plain"], name
        for step, loss in rank["plain"].items():
            assert rank["compile"][step] == pytest.approx(loss, rel=1e-5)
        assert rank["graphs"] == 1
        assert rank["dtypes"] == ["torch.bfloat16"]
        assert rank["low loss"] == pytest.approx(rank["plain"][1], rel=0.02)
    assert found[0]["eval_loss"] == found[1]["eval_loss"]
    names = sorted({name for rank in found for name in rank["names"]})
    assert names == sorted(_model().state_dict())


def _resume(folder: Path, kind: str) -> tuple[dict[int, float], dict[int, float], set[str]]:
    init_distributed(use_cpu=True)
    saving = {"save_strategy": "steps", "save_steps": 2, "save_async": False}
    whole = _make(kind, folder / "whole", 4, **saving)
    whole.train()
    _make(kind, folder / "part", 4, stop_at=2, **saving).train()
    resumed = _make(kind, folder / "part", 4, construct_model_on="meta", **saving)
    seen: set[str] = set()

    def model_init() -> torch.nn.Module:
        model = _model()
        seen.add(model.lm_head.weight.device.type)
        return model

    resumed.model_init = model_init
    resumed.train()
    return _losses(whole), _losses(resumed), seen


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_checkpoint_fills_a_model_without_values(tmp_path, kind):
    for whole, resumed, seen in run_ranks(_resume, 2, tmp_path, kind, timeout_s=200):
        assert seen == {"meta"}
        assert {step: resumed[step] for step in (3, 4)} == {step: whole[step] for step in (3, 4)}
