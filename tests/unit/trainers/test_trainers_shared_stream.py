"""Evaluations of the very stream that training reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.engine.events import TrainerCallback
from headway.errors import ConfigError
from headway.testing.trainer import tiny_trainer


class Stream:
    """One place, which every reading of it moves."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.place < 24:
            self.place += 1
            yield {"input_ids": torch.tensor([self.place, 1, 2, 3])}
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Reading(Stream):
    """One that holds what no copy can have."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = (line for line in ["a"])


class Seen(TrainerCallback):
    def __init__(self) -> None:
        self.trained: list[int] = []
        self.evaluated: list[int] = []

    def on_window(self, window: Any) -> None:
        for batch in window.micro_batches:
            self.trained += batch["input_ids"][:, 0].tolist()

    def on_evaluate(self, metrics: dict[str, float]) -> None:
        self.evaluated.append(round(metrics["eval_runtime"] * metrics["eval_samples_per_second"]))


@pytest.mark.parametrize("max_eval_steps", [-1, 2])
def test_training_goes_on_and_resumes_where_it_was_and_passes_are_whole(
    tmp_path: Path, max_eval_steps: int
) -> None:
    seen = Seen()
    for max_steps in (4, 9):
        trainer = tiny_trainer(
            tmp_path, [seen], max_steps=max_steps, eval_strategy="steps", eval_steps=3,
            save_strategy="steps", save_steps=4, max_eval_steps=max_eval_steps,
        )  # fmt: skip
        trainer.train_dataset = trainer.eval_dataset = Stream()
        trainer.train(resume_from_checkpoint=max_steps == 9)
    assert seen.trained == list(range(1, 19))
    assert set(seen.evaluated) == {24 if max_eval_steps < 0 else 4}


def test_one_that_cannot_be_copied_is_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.train_dataset = trainer.eval_dataset = Reading()
    with pytest.raises(ConfigError, match="eval_dataset: it is the train_dataset too, a Reading"):
        trainer.train()
    assert trainer.state.global_step == 0
