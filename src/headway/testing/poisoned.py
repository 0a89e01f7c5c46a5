"""A small run on data with noise in it, in which one batch can be poisoned.

Owns: data whose loss has a floor, so that runs of the same length end at the same loss, and a batch
that ruins the weights in one step. The poison is in the data: who reads them again has it again.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from headway import TrainerCallback
from headway.args import TrainingArguments
from headway.testing import tiny_decoder
from headway.trainers.trainer import Trainer

_NUM_SYMBOLS = 16


def noisy_dataset(num_samples: int, seed: int) -> list[dict[str, list[int]]]:
    """Each token mostly decides the next one; one in three is drawn at random."""
    dice = random.Random(seed)
    samples = []
    for _ in range(num_samples):
        tokens = [dice.randrange(_NUM_SYMBOLS)]
        while len(tokens) < 16:
            follows = (tokens[-1] * 5 + 3) % _NUM_SYMBOLS
            tokens.append(dice.randrange(_NUM_SYMBOLS) if dice.random() < 1 / 3 else follows)
        samples.append({"input_ids": tokens, "labels": list(tokens)})
    return samples


class Poison(TrainerCallback):
    """The gradient of a window with this sample is noise, and ten thousand times too large."""

    priority = 100

    def __init__(self, sample: int | None, *, value: float = 1e4) -> None:
        self.sample, self.value = sample, value
        self.steps: list[int] = []
        """Steps that were taken."""
        self.hits: list[int] = []
        self._hit = False

    def on_window(self, window: Any) -> None:
        self._hit = self.sample is not None and self.sample in window.sample_ids.tolist()

    def on_gradients(self, model: Any, state: Any) -> None:
        self.steps.append(state.global_step + 1)
        if not self._hit:
            return
        self.hits.append(state.global_step + 1)
        noise = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            draw = torch.randn(parameter.shape, generator=noise)
            parameter.grad.copy_(draw * self.value)


def sample_at(step: int, batch_size: int = 4, num_samples: int = 512, seed: int = 0) -> int:
    """A sample that a run reads in a step of its first epoch."""
    from headway.data.order import SampleOrder

    return int(SampleOrder(num_samples, seed, True).indices(0, (step - 1) * batch_size, 1)[0])


def make_trainer(
    folder: Path | str,
    callbacks: list[Any],
    *,
    trainer_class: type[Trainer] = Trainer,
    arguments_class: type[TrainingArguments] = TrainingArguments,
    **changes: Any,
) -> Trainer:
    settings: dict[str, Any] = {
        "output_dir": str(Path(folder) / "out"),
        "use_cpu": True,
        "seed": 0,
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "cosine",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 64,
        "max_steps": 64,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 10,
        **changes,
    }
    return trainer_class(
        args=arguments_class(**settings),
        model_init=lambda: tiny_decoder(
            vocab_size=_NUM_SYMBOLS, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2
        ),
        train_dataset=noisy_dataset(512, seed=0),
        eval_dataset=noisy_dataset(64, seed=1),
        callbacks=callbacks,
        default_callbacks=False,
    )


def final_loss(trainer: Trainer) -> float:
    return float(trainer.evaluate()["eval_loss"])
