"""Averages of weights on two ranks: against those computed from a checkpoint of every step.

A window of merging and a moving average go through a killed rank, a resume, and resumes by another
number of ranks that cut the model in another way.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.callbacks import EMACallback, ModelMergeCallback
from headway.checkpoint import read_manifest, validate_checkpoint
from headway.checkpoint.tensors import read_shards
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError
from headway.testing import RankFailure, run_ranks, tiny_dataset, tiny_decoder
from headway.trainers.parallel import DDPTrainer, FSDP2Trainer, PipelineTrainer
from headway.trainers.trainer import Trainer

# A number of rows that two ranks cannot share evenly, and a weight that two stages share.
make = partial(tiny_decoder, num_layers=2, vocab_size=259, tie_embeddings=True)
FIRST, MIDDLE, MERGE, LAST = 3, 4, 5, 6
DECAY = 0.8

KINDS: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
    "single": (Trainer, {"per_device_train_batch_size": 4}),
    "ddp": (DDPTrainer, {"per_device_train_batch_size": 2}),
    "fsdp2": (FSDP2Trainer, {"per_device_train_batch_size": 2}),
    "pipeline": (PipelineTrainer, {"per_device_train_batch_size": 4, "n_microbatches": 2}),
}


class End(TrainerCallback):
    """Stops the run at a step, or kills a rank of it there."""

    priority = 100

    def __init__(self, stop_at: int | None, kill: bool) -> None:
        self.stop_at, self.kill = stop_at, kill

    def on_step_end(self, args: Any, state: Any, control: Any) -> None:
        if self.kill:
            if state.global_step == MERGE and args.process_index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        elif state.global_step == self.stop_at:
            control.should_training_stop = True


def train(
    kind: str,
    folder: Path,
    stop_at: int | None = None,
    kill: bool = False,
    resume: bool | str = True,
    **arguments: Any,
) -> None:
    """A checkpoint of every step, a merge inside of the run, an average used in evaluations."""
    trainer_class, own = KINDS[kind]
    trainer_class(
        args={
            "output_dir": str(folder),
            "per_device_eval_batch_size": 4,
            "logging_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "max_steps": LAST,
            "save_strategy": "steps",
            "save_steps": 1,
            "save_total_limit": None,
            # The checkpoint before the kill is to be there.
            "save_async": not kill,
            "seed": 0,
            "use_cpu": True,
            "learning_rate": 1e-2,
            **own,
            **arguments,
        },
        model_init=make,
        train_dataset=tiny_dataset(32, sequence_length=8, vocab_size=259),
        eval_dataset=tiny_dataset(4, sequence_length=8, seed=1, vocab_size=259),
        callbacks=[
            ModelMergeCallback(merge_step=MERGE, merge_last_n_steps=MERGE - FIRST + 1),
            EMACallback(decay=DECAY, start_step=1, use_for_eval=True, export=True),
            End(stop_at, kill),
        ],
        default_callbacks=False,
    ).train(resume_from_checkpoint=resume)


def train_until_a_kill(folder: Path) -> None:
    for kind in ("ddp", "pipeline"):
        train(kind, folder / kind, stop_at=MIDDLE)
        train(kind, folder / kind)
    train("fsdp2", folder / "single-fsdp2")
    try:
        train("ddp", folder / "refused", post_local_sgd={"enabled": True, "start_step": 0})
    except ConfigError as error:
        (folder / f"refused-{os.environ['RANK']}.txt").write_text(str(error))
    train("fsdp2", folder / "fsdp2", kill=True)


def train_on(folder: Path) -> None:
    train("fsdp2", folder / "fsdp2")


def read(path: Path, prefix: str = "model") -> dict[str, Tensor]:
    return read_shards(path, prefix)


def check(folder: Path) -> None:
    """The averages of a run equal those made from its checkpoints."""
    steps = {n: read(folder / f"checkpoint-{n}") for n in range(1, LAST + 1)}
    merged = folder / f"checkpoint-{MERGE}-merged"
    assert validate_checkpoint(merged) and read_manifest(merged).kind == "merged"
    found = read(merged)
    assert found.keys() == steps[1].keys()
    for name, value in found.items():
        total = torch.zeros_like(value)
        for step in range(FIRST, MERGE + 1):
            total += steps[step][name]
        assert torch.equal(value, total / (MERGE - FIRST + 1)), (folder.name, name)
    average = dict(steps[1])
    for step in range(2, LAST + 1):
        average = {n: a.lerp(steps[step][n], 1 - DECAY) for n, a in average.items()}
    exported = read(folder / f"checkpoint-{LAST}-ema")
    for name, value in read(folder / f"checkpoint-{LAST}", "state/callback-EMACallback").items():
        assert torch.equal(value, average[name.removeprefix("ema.")]), (folder.name, name)
        assert torch.equal(value, exported[name.removeprefix("ema.")]), (folder.name, name)
    assert len(exported) == len(average)


@pytest.mark.timeout(180)
def test_they_are_those_of_the_checkpoints_whatever_happens(tmp_path: Path) -> None:
    train("single", tmp_path / "single", stop_at=MIDDLE)
    copytree(tmp_path / "single", tmp_path / "single-fsdp2")
    with pytest.raises(RankFailure) as killed:
        run_ranks(train_until_a_kill, 2, tmp_path, timeout_s=120)
    assert killed.value.exitcode == -signal.SIGKILL, killed.value.traceback
    for rank in (0, 1):
        assert "post_local_sgd" in (tmp_path / f"refused-{rank}.txt").read_text()
    left = {path.name for path in (tmp_path / "fsdp2").glob("checkpoint-*")}
    assert {f"checkpoint-{MIDDLE}"} <= left and not any("merged" in name for name in left)
    copytree(tmp_path / "fsdp2", tmp_path / "fsdp2-single")
    run_ranks(train_on, 2, tmp_path, timeout_s=120)
    train("single", tmp_path / "fsdp2-single")
    for name in ("ddp", "pipeline", "fsdp2", "single-fsdp2", "fsdp2-single"):
        check(tmp_path / name)
