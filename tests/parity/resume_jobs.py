"""Small jobs that can be interrupted, and everything about them that must come out the same."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.models import Decoder
from headway.testing import tiny_dataset, tiny_decoder

NUM_SAMPLES, BATCH, MAX_STEPS = 18, 2, 12


class AutocastDecoder(Decoder):
    """Computes in bfloat16 where autocast does, with weights in float32."""

    @functools.wraps(Decoder.forward)
    def forward(self, *args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(*args, **kwargs)


class Record(TrainerCallback):
    """What every step saw and did."""

    def __init__(self):
        self.samples, self.losses, self.norms, self.rates = [], [], [], []

    def on_window(self, window):
        self.samples.append(window.sample_ids.tolist())

    def on_train_metrics(self, loss, grad_norm):
        self.losses.append(loss.item())
        self.norms.append(grad_norm.item())

    def on_pre_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def steps(self):
        return list(zip(self.samples, self.losses, self.norms, self.rates))


class Damped(TrainerCallback):
    """Scales gradients by how many steps it has seen: a callback whose state matters."""

    def __init__(self):
        self.seen = 0

    def on_gradients(self, model):
        self.seen += 1
        for parameter in model.parameters():
            parameter.grad.mul_(1 / (1 + self.seen))

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class DampedByStep(TrainerCallback):
    """Scales gradients by the run's own counter."""

    def on_gradients(self, model, state):
        for parameter in model.parameters():
            parameter.grad.mul_(1 / (1 + state.global_step))


class Jittered(TrainerCallback):
    """Scales gradients by a random number of the named generator."""

    def __init__(self, generator):
        self.draw = {"python": random.random, "numpy": np.random.rand}[generator]

    def on_gradients(self, model):
        scale = 0.5 + self.draw()
        for parameter in model.parameters():
            parameter.grad.mul_(scale)


@dataclass(frozen=True)
class Job:
    """One way of training; `callbacks` are made anew for every run."""

    dropout: float = 0.2
    accumulation: int = 1
    workers: int = 0
    autocast: bool = False
    optimizer: str = "adamw"
    schedule: str = "cosine"
    callbacks: tuple[Any, ...] = ()

    @property
    def steps_per_epoch(self) -> int:
        return -(-NUM_SAMPLES // (BATCH * self.accumulation))

    def make_model(self):
        model = tiny_decoder(dropout=self.dropout)
        if not self.autocast:
            return model
        return AutocastDecoder(replace(model.config))

    def optimizer_options(self) -> dict[str, Any]:
        if self.optimizer == "adamw":
            return {}
        options = {"lr": 5e-2, "momentum": 0.9, "nesterov": True}
        return {"optimizer_cls_and_kwargs": (torch.optim.SGD, options)}


@dataclass
class Outcome:
    """A finished part of a run and the state of everything at its end."""

    steps: list[Any]
    tensors: dict[str, torch.Tensor]
    generators: list[Any]
    counters: dict[str, Any]
    trainer: Trainer


def run(folder: Path, job: Job, stop: int | None = None, **arguments: Any) -> Outcome:
    """Train from where `folder` stands to `stop`, or to the end."""
    record = Record()
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": job.accumulation,
        "max_steps": MAX_STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": job.schedule,
        "warmup_steps": 2,
        "max_grad_norm": 1.0,
        "weight_decay": 0.1,
        "logging_steps": 3,
        "save_strategy": "steps",
        "save_total_limit": None,
        "dataloader_num_workers": job.workers,
        "stop_at": stop,
        "seed": 11,
        "use_cpu": True,
        **arguments,
    }
    trainer = Trainer(
        args=TrainingArguments(**settings),
        model_init=job.make_model,
        train_dataset=tiny_dataset(NUM_SAMPLES, sequence_length=12),
        callbacks=[record, *(make() for make in job.callbacks)],
        default_callbacks=False,
        **job.optimizer_options(),
    )
    trainer.train()
    return Outcome(record.steps(), tensors_of(trainer), generators(), counters_of(trainer), trainer)


def tensors_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    tensors = {f"model.{k}": v.clone() for k, v in trainer.model.state_dict().items()}
    for index, state in trainer.optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{index}.{key}"] = value.clone()
    return tensors


def generators() -> list[Any]:
    name, keys, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), (name, keys.tolist(), *rest)]


def counters_of(trainer: Trainer) -> dict[str, Any]:
    state = trainer.state
    names = ("global_step", "epoch", "raw_epoch", "epoch_start_step", "num_input_tokens_seen")
    counters = {name: getattr(state, name) for name in names}
    counters["total_flos"] = state.total_flos
    return counters


def run_uninterrupted(folder: Path, job: Job) -> Outcome:
    """The whole job in one go, without a single save."""
    return run(folder, job, save_strategy="no")


def run_in_parts(folder: Path, job: Job, stops: list[int], **last: Any) -> Outcome:
    """The job with a stop at each of `stops`; `last` are arguments of the last part only."""
    steps = []
    for stop in stops:
        steps += run(folder, job, stop).steps
    outcome = run(folder, job, **last)
    outcome.steps = steps + outcome.steps
    return outcome


def find_differences(left: Outcome, right: Outcome) -> list[str]:
    """Names of everything in which two outcomes are not equal to the last bit."""
    found = []
    if left.steps != right.steps:
        first = next(
            (n for n, (a, b) in enumerate(zip(left.steps, right.steps)) if a != b),
            min(len(left.steps), len(right.steps)),
        )
        found.append(f"step {first}")
    if left.tensors.keys() != right.tensors.keys():
        found.append("names of tensors")
    found += [
        name
        for name in left.tensors.keys() & right.tensors.keys()
        if not torch.equal(left.tensors[name], right.tensors[name])
    ]
    for name, a, b in zip(("torch", "python", "numpy"), left.generators, right.generators):
        if a != b:
            found.append(f"{name} generator")
    found += [
        f"counter {name}" for name in left.counters if left.counters[name] != right.counters[name]
    ]
    return found
