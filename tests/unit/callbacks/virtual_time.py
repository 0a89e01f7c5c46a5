"""Runs on a clock that only the work in them moves. Not a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.data.collate import PadCollator
from headway.engine import timing
from headway.testing import tiny_dataset, tiny_decoder

TOKENS_PER_STEP = 16
FETCH_S, STEP_S, EVAL_S, SAVE_S, GENERATE_S = 0.5, 1.5, 100.0, 50.0, 30.0
ASIDE_S = 20.0


class VirtualTime:
    """Seconds that pass when somebody lets them."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def use(self, monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
        monkeypatch.setattr(timing, "clock", self)
        return self


class Work(TrainerCallback):
    """Makes steps, evaluations, generations and saves take their time."""

    def __init__(self, time: VirtualTime, step_s: dict[int, float] | None = None) -> None:
        self.time, self.step_s = time, step_s or {}

    def on_optimizer_step(self, state: Any) -> None:
        self.time.now_s += self.step_s.get(state.global_step + 1, STEP_S)

    def on_prediction_step(self) -> None:
        self.time.now_s += EVAL_S

    def on_evaluate(self) -> None:
        self.time.now_s += GENERATE_S

    def state_dict(self) -> dict[str, Any]:
        self.time.now_s += SAVE_S
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Only so that the state is asked for."""


class Aside(TrainerCallback):
    """Writes a trace, say, after some steps: none of it is training."""

    priority = -10

    def __init__(self, time: VirtualTime, steps: list[int]) -> None:
        self.time, self.steps = time, steps

    def on_step_end(self, state: Any, trainer: Any) -> None:
        if state.global_step in self.steps:
            with trainer.timing.aside(), trainer.timing.aside():
                self.time.now_s += ASIDE_S


class Seen(TrainerCallback):
    """Keeps what sinks get."""

    priority = -100

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.metrics: dict[int, dict[str, float]] = {}

    def on_log(self, logs: dict[str, Any]) -> None:
        self.logs.append(dict(logs))

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics[step] = dict(metrics)


class SlowCollator:
    """Fetching a batch takes its time."""

    def __init__(self, time: VirtualTime) -> None:
        self.time, self.pad = time, PadCollator(pad_token_id=0)

    def __call__(self, samples: list[Any]) -> Any:
        self.time.now_s += FETCH_S
        return self.pad(samples)


def make_trainer(
    folder: Path, time: VirtualTime, callbacks: list[Any], num_samples: int = 64, **arguments: Any
) -> Trainer:
    return Trainer(
        args=TrainingArguments(
            **{
                "output_dir": str(folder / "out"),
                "per_device_train_batch_size": 2,
                "per_device_eval_batch_size": 2,
                "logging_steps": 1,
                "save_strategy": "no",
                "seed": 0,
                "use_cpu": True,
                **arguments,
            }
        ),
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(num_samples, sequence_length=8),
        eval_dataset=tiny_dataset(4, sequence_length=8, seed=1),
        data_collator=SlowCollator(time),
        callbacks=callbacks,
        default_callbacks=False,
    )
