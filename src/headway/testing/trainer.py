"""A trainer so small that a test can afford many of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.args import TrainingArguments
from headway.testing.tiny import tiny_dataset, tiny_decoder
from headway.trainers.trainer import Trainer


def tiny_trainer(
    folder: str | Path, callbacks: Sequence[Any] = (), num_samples: int = 8, **arguments: Any
) -> Trainer:
    """A tiny decoder on tiny data, with only the given callbacks; writes to `folder`/out.

    Logs every step and saves nothing unless `arguments` (of TrainingArguments) say otherwise.
    """
    settings = {
        "output_dir": str(Path(folder) / "out"),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 0,
        "use_cpu": True,
        **arguments,
    }
    return Trainer(
        args=TrainingArguments(**settings),
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(num_samples, sequence_length=8),
        eval_dataset=tiny_dataset(4, sequence_length=8, seed=1),
        callbacks=list(callbacks),
        default_callbacks=False,
    )
