"""A small run on data with noise in it, in which one batch can be poisoned.

Owns: data whose loss has a floor, so that runs of the same length end at the same loss, and a batch
that ruins the weights in one step. The poison is in the data: who reads them again has it again.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from headway.args import TrainingArguments
from headway.checkpoint.sharding import local_tensor
from headway.data.order import SampleOrder
from headway.engine.events import TrainerCallback
from headway.models import Decoder
from headway.testing.tiny import tiny_decoder
from headway.trainers.trainer import Trainer

NUM_SAMPLES, LENGTH, BATCH_SIZE = 512, 16, 4
_NUM_SYMBOLS = 16


def noisy_dataset(num_samples: int, seed: int) -> list[dict[str, list[int]]]:
    """Each token mostly decides the next one; one in three is drawn at random."""
    dice = random.Random(seed)
    samples = []
    for _ in range(num_samples):
        tokens = [dice.randrange(_NUM_SYMBOLS)]
        while len(tokens) < LENGTH:
            follows = (tokens[-1] * 5 + 3) % _NUM_SYMBOLS
            tokens.append(dice.randrange(_NUM_SYMBOLS) if dice.random() < 1 / 3 else follows)
        samples.append({"input_ids": tokens, "labels": list(tokens)})
    return samples


def small_decoder() -> Decoder:
    """A model that comes near the floor of the noisy data within 60 steps."""
    return tiny_decoder(
        vocab_size=_NUM_SYMBOLS, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2
    )


def sample_at(step: int, seed: int = 0) -> int:
    """A sample that a run of `poisoned_trainer` reads in a step of its first epoch."""
    order = SampleOrder(NUM_SAMPLES, seed, True)
    return int(order.indices(0, (step - 1) * BATCH_SIZE, 1)[0])


class Poison(TrainerCallback):
    """The gradient of a window with this sample is noise of this size, on all ranks.

    Of a size that ruins the weights, and with which no product comes near what floats can hold:
    past that, it would depend on the machine what is finite.
    """

    priority = 100

    def __init__(self, sample: int | None, *, value: float = 3.0) -> None:
        self.sample, self.value = sample, value
        self.steps: list[int] = []
        """Steps that were taken."""
        self.hits: list[int] = []
        """Those of them with the poison."""
        self._hit = False

    def on_window(self, window: Any) -> None:
        ids = () if window.sample_ids is None else window.sample_ids.tolist()
        hit = torch.tensor(int(self.sample in ids))
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(hit)
        self._hit = bool(hit)

    def on_gradients(self, model: Any, state: Any) -> None:
        self.steps.append(state.global_step + 1)
        if not self._hit:
            return
        self.hits.append(state.global_step + 1)
        noise = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            gradient = local_tensor(parameter.grad)
            gradient.copy_(torch.randn(gradient.shape, generator=noise) * self.value)


def poisoned_trainer(
    folder: Path | str,
    callbacks: list[Any],
    trainer_class: type[Trainer] = Trainer,
    num_shares: int = 1,
    **changes: Any,
) -> Trainer:
    """A run of 64 steps that saves every 10, with the same windows on any number of ranks.

    `num_shares`: among how many ranks each window is dealt out.
    """
    settings: dict[str, Any] = {
        "output_dir": str(Path(folder) / "out"),
        "use_cpu": True,
        "seed": 0,
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "cosine",
        "per_device_train_batch_size": BATCH_SIZE // num_shares,
        "per_device_eval_batch_size": 64 // num_shares,
        "max_steps": 64,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 10,
        **changes,
    }
    arguments_class: type[TrainingArguments] = trainer_class.arguments_class
    return trainer_class(
        args=arguments_class(**settings),
        model_init=small_decoder,
        train_dataset=noisy_dataset(NUM_SAMPLES, seed=0),
        eval_dataset=noisy_dataset(64, seed=1),
        callbacks=callbacks,
        default_callbacks=False,
    )


def final_loss(trainer: Trainer) -> float:
    """What a run ended at, on data it has not seen."""
    return float(trainer.evaluate()["eval_loss"])
