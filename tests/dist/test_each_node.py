"""Nodes that share no storage: each keeps whole checkpoints of its own.

Two ranks make a node here, and each node works in a folder of its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway import (
    DDPTrainer,
    FSDP2Trainer,
    PipelineTrainer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from headway.checkpoint import CheckpointError, read_manifest, verify
from headway.dist import init_distributed
from headway.errors import ConfigError
from headway.testing import run_ranks, tiny_dataset, tiny_decoder

KINDS: dict[str, type[Trainer]] = {
    "ddp": DDPTrainer,
    "fsdp2": FSDP2Trainer,
    "pipeline": PipelineTrainer,
}


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.found: dict[int, float] = {}

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if "train/CE loss" in metrics:
            self.found[step] = metrics["train/CE loss"]


def enter_node(folder: str, shared: bool = False) -> int:
    """Be one of two ranks of a node; returns the node's number."""
    rank = int(os.environ["RANK"])
    node = rank // 2
    os.environ.update(GROUP_RANK=str(node), LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
    place = Path(folder, "all" if shared else f"node{node}")
    place.mkdir(exist_ok=True)
    os.chdir(place)
    init_distributed(use_cpu=True)
    return node


def train(kind: str, output_dir: str, max_steps: int, **arguments: Any) -> dict[int, float]:
    """The losses by step of a run that saves every second step."""
    trainer_class, losses = KINDS[kind], Losses()
    settings = {
        "output_dir": output_dir, "max_steps": max_steps, "save_steps": 2, "use_cpu": True,
        "seed": 1, "lr_scheduler_type": "constant", "save_on_each_node": True,
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, **arguments,
    }  # fmt: skip
    trainer = trainer_class(
        args=trainer_class.arguments_class.from_dict(settings),
        model_init=lambda: tiny_decoder(num_layers=4, dropout=0.1),
        train_dataset=tiny_dataset(60, sequence_length=12),
        callbacks=[losses],
        default_callbacks=False,
    )
    trainer.train()
    return losses.found


def message_of(act: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    try:
        act(*arguments, **options)
    except (ConfigError, CheckpointError) as error:
        return str(error)
    return ""


def save_and_resume(folder: str) -> dict[str, Any]:
    enter_node(folder)
    found: dict[str, Any] = {}
    for kind in KINDS:
        whole = train(kind, f"{kind}-whole", 6)
        train(kind, f"{kind}-parts", 4)
        found[kind] = whole, train(kind, f"{kind}-parts", 6)
    return found


@pytest.mark.timeout(300)
def test_every_node_has_the_whole_and_resumes_from_its_own(tmp_path: Path) -> None:
    for found in run_ranks(save_and_resume, 4, str(tmp_path), timeout_s=250):
        for kind, (whole, rest) in found.items():
            assert sorted(rest) == [5, 6], kind
            assert rest == {step: whole[step] for step in rest}, kind
    for kind in KINDS:
        for step in (4, 6):  # the two that are kept
            copies = [tmp_path / f"node{n}" / f"{kind}-parts/checkpoint-{step}" for n in (0, 1)]
            assert [verify(copy) for copy in copies] == [[], []]
            first, second = (read_manifest(copy) for copy in copies)
            assert first.digest == second.digest and first.topology["nodes"] == [0, 0, 1, 1]
        names = [sorted(p.name for p in (tmp_path / f"node{n}" / f"{kind}-parts").iterdir()
                        if p.name.startswith(("checkpoint-", "."))) for n in (0, 1)]  # fmt: skip
        assert names == [["checkpoint-4", "checkpoint-6"]] * 2


def test_one_process_goes_on_from_the_copy_of_any_node(tmp_path: Path) -> None:
    run_ranks(save_once, 4, str(tmp_path))
    args = TrainingArguments(
        output_dir=str(tmp_path / "node1/out"), max_steps=3, use_cpu=True, save_strategy="no"
    )
    trainer = Trainer(
        args=args,
        model_init=lambda: tiny_decoder(num_layers=4),
        train_dataset=tiny_dataset(60, sequence_length=12),
        default_callbacks=False,
    )
    trainer.train()
    steps = [log["step"] for log in trainer.state.log_history if "loss" in log]
    assert trainer.state.global_step == 3 and steps == [2, 3]


def save_once(folder: str) -> None:
    enter_node(folder)
    train("fsdp2", "out", 2)


def lose_copies(folder: str) -> dict[str, Any]:
    node = enter_node(folder)
    context = init_distributed(use_cpu=True)
    train("ddp", "out", 4)
    context.barrier()
    if context.rank == 2:
        shutil.rmtree("out/checkpoint-4")
    context.barrier()
    found: dict[str, Any] = {"older": sorted(train("ddp", "out", 5))}
    context.barrier()
    if context.rank == 2:
        path = next(Path("out/checkpoint-5").glob("optimizer*.safetensors"))
        path.write_bytes(path.read_bytes()[:-1])
    context.barrier()
    found["damaged"] = sorted(train("ddp", "out", 6, save_strategy="no"))
    context.barrier()
    if context.rank == 0:
        for path in Path("out").glob("checkpoint-*"):
            shutil.rmtree(path)
    context.barrier()
    found["none"] = message_of(train, "ddp", "out", 6)
    return {**found, "node": node}


def test_what_counts_is_what_all_nodes_have(tmp_path: Path) -> None:
    for found in run_ranks(lose_copies, 4, str(tmp_path), timeout_s=120):
        assert found["older"] == [3, 4, 5], "checkpoint-4 is not on node 1"
        assert found["damaged"] == [5, 6], "a file of checkpoint-5 is damaged on node 1"
        assert "no checkpoint is on every node" in found["none"]
        assert "checkpoint-5: not on node 0" in found["none"]


def share_storage(folder: str) -> tuple[str, list[str]]:
    enter_node(folder, shared=True)
    told = message_of(train, "ddp", "out", 2)
    init_distributed(use_cpu=True).barrier()
    return told, os.listdir()


def test_shared_storage_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    """Rule 28."""
    for told, there in run_ranks(share_storage, 4, str(tmp_path)):
        assert told.startswith("save_on_each_node: nodes 0, 1 share the storage of output_dir")
        assert there == []
