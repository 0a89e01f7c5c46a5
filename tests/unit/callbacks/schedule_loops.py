"""Training written out by hand, to compare scheduled runs with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.data.order import SampleOrder
from headway.testing import tiny_dataset, tiny_decoder

LENGTH, RATE, SEED, MAX_NORM = 16, 1e-2, 3, 1.0


class Samples(list):
    """A dataset that says how long its samples are."""

    sequence_length = LENGTH

    def __init__(self) -> None:
        super().__init__(tiny_dataset(64, sequence_length=LENGTH))


class Curve(TrainerCallback):
    """Every step's figures, and those of the state after it."""

    priority = -1000

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}
        self.tokens: list[int] = []

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics.setdefault(step, {}).update(metrics)

    def on_step_end(self, state: Any) -> None:
        self.tokens.append(state.num_input_tokens_seen)

    def of(self, name: str) -> list[float]:
        return [metrics[name] for _, metrics in sorted(self.metrics.items()) if name in metrics]

    @property
    def losses(self) -> list[float]:
        return self.of("train/CE loss")

    @property
    def rates(self) -> list[float]:
        return self.of("optim/LR (group 0)")


def make_trainer(
    folder: Path,
    callbacks: Sequence[Any],
    dataset: Any = None,
    trainer: type[Trainer] = Trainer,
    **args: Any,
) -> tuple[Trainer, Curve]:
    curve = Curve()
    settings = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "seed": SEED,
        "learning_rate": RATE,
        "lr_scheduler_type": "linear",
        "max_grad_norm": MAX_NORM,
        "per_device_train_batch_size": 2,
        "logging_steps": 1000,
        "save_strategy": "no",
        **args,
    }
    made = trainer(
        args=trainer.arguments_class(**settings),
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(64, sequence_length=LENGTH) if dataset is None else dataset,
        callbacks=[*callbacks, curve],
        default_callbacks=False,
    )
    assert isinstance(made.args, TrainingArguments)
    return made, curve


def read_samples(position: int, count: int, num_samples: int = 64, epoch: int = 0) -> Tensor:
    """The next samples of the run's order."""
    samples = tiny_dataset(num_samples, sequence_length=LENGTH)
    numbers = SampleOrder(num_samples, SEED).indices(epoch, position, count)
    return torch.tensor([samples[number]["input_ids"] for number in numbers])


def train_by_hand(
    batches: Sequence[Tensor], rates: Sequence[float], frozen: Sequence[set[str]] = ()
) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step, and the weights in the end; a batch is [samples, length]."""
    torch.manual_seed(SEED)
    model = tiny_decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    losses = []
    for number, (ids, rate) in enumerate(zip(batches, rates, strict=True)):
        logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="mean"
        )
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            if frozen and name in frozen[number]:
                parameter.grad = None
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def assert_same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def assert_close(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """By their norms: Adam makes a whole step of the rounding of a gradient that is nearly 0."""
    for name, value in first.items():
        assert (value - second[name]).norm() < 1e-3 * second[name].norm(), name


def resume_at(
    folder: Path, step: int, make: Any, steps: int, **args: Any
) -> tuple[Trainer, list[Curve]]:
    """A run that stops after a step with a checkpoint, and one that goes on from there."""
    first, before = make(folder, save_strategy="no", max_steps=steps, stop_at=step, **args)
    first.args.save_strategy, first.args.save_steps = "steps", step
    first.train()
    second, after = make(folder, max_steps=steps, **args)
    second.train(resume_from_checkpoint=True)
    return second, [before, after]
