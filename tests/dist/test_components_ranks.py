"""`checkpoint_components` on two ranks: parts of a sharded run, and weights from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway import DDPTrainer, FSDP2Trainer, TrainerCallback
from headway.checkpoint import CheckpointError, read_manifest
from headway.checkpoint.sharding import local_tensor
from headway.dist.failure import PeerFailure
from headway.testing import run_ranks, tiny_dataset, tiny_decoder

NO_MODEL = ["optimizer", "scheduler", "trainer", "dataset", "rng"]


class Shards(TrainerCallback):
    """Keeps what this rank holds of the weights; rank 1 may forget the norm at the end."""

    def __init__(self, folder: Path, forgets: bool = False) -> None:
        self.folder, self.forgets = folder, forgets

    def _place(self, step: int, trainer: Any) -> Path:
        return self.folder / f"weights-{step}-{trainer.env.rank}.pt"

    def on_save(self, model: Any, trainer: Any, step: int) -> None:
        torch.save(held(model), self._place(step, trainer))

    def on_load_model_weights(self, model: Any, trainer: Any, path: str) -> None:
        kept = torch.load(self._place(int(path.rpartition("-")[2]), trainer))
        for name, tensor in model.state_dict().items():
            if not (self.forgets and trainer.env.rank == 1 and name == "model.norm.weight"):
                local_tensor(tensor).copy_(kept[name])


def held(model: Any) -> dict[str, torch.Tensor]:
    return {name: local_tensor(value).clone() for name, value in model.state_dict().items()}


def train(cls: Any, folder: Path, steps: int, parts: Any, forgets: bool = False) -> Any:
    trainer = cls(
        args={
            "output_dir": str(folder),
            "per_device_train_batch_size": 2,
            "max_steps": 4,
            "save_steps": 2,
            "stop_at": steps,
            "seed": 3,
            "use_cpu": True,
            "checkpoint_components": parts,
        },
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(48, sequence_length=8),
        default_callbacks=False,
        callbacks=[Shards(folder, forgets)],
    )
    trainer.train()
    return trainer


def resume_both(folder: Path) -> None:
    for cls in (DDPTrainer, FSDP2Trainer):
        place = folder / cls.__name__
        whole = held(train(cls, place / "whole", 4, None).model)
        train(cls, place / "parts", 2, NO_MODEL)
        keys = {e["key"] for e in read_manifest(place / "parts" / "checkpoint-2").components}
        assert keys == {"optimizer", "scheduler", "callbacks", "dataset", "rng"}
        again = held(train(cls, place / "parts", 4, NO_MODEL).model)
        assert all(torch.equal(value, again[name]) for name, value in whole.items()), cls
        # What one rank does not bring, no rank goes on without.
        with pytest.raises((CheckpointError, PeerFailure), match=r"values.* model\.norm\.weight"):
            train(cls, place / "parts", 4, NO_MODEL, forgets=True)


def test_sharded_weights_from_outside_are_checked_on_every_rank(tmp_path: Path) -> None:
    for cls in (DDPTrainer, FSDP2Trainer):
        for name in ("whole", "parts"):
            (tmp_path / cls.__name__ / name).mkdir(parents=True)
    run_ranks(resume_both, 2, tmp_path, timeout_s=100)
