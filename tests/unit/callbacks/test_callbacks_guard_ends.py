"""Guards at the end of a run, and where there are no records: nothing bad is passed over."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from headway import ConfigError, TrainerCallback
from headway.callbacks import DivergenceDetector, EarlyStoppingCallback, NaNGuardCallback
from headway.callbacks.control.acts import Acts
from headway.checkpoint import committed
from headway.control.schema import Command
from headway.testing import tiny_trainer

LAST = 7
"""One step past the last but one record, so that the last record has two."""
OPTIONS = {
    "max_steps": LAST, "num_samples": 64, "logging_steps": 5, "save_strategy": "steps",
    "save_steps": 5, "save_async": False,
}  # fmt: skip


class Worse(TrainerCallback):
    """The loss of one step, or of an evaluation, is bad, once."""

    priority = 100

    def __init__(self, step: int, key: str) -> None:
        self.step, self.key, self.done = step, key, False

    def on_log_step(self, state: Any, logs: dict[str, Any]) -> None:
        self.spoil(state, logs)

    def on_evaluate(self, state: Any, metrics: dict[str, Any]) -> None:
        self.spoil(state, metrics)

    def spoil(self, state: Any, figures: dict[str, Any]) -> None:
        if state.global_step == self.step and self.key in figures and not self.done:
            self.done = True
            figures[self.key] = 90.0


class BadStep(TrainerCallback):
    """The gradient of one step is not finite, once."""

    def __init__(self, step: int) -> None:
        self.step, self.done = step, False

    def on_gradients(self, state: Any, model: Any) -> None:
        if state.global_step + 1 == self.step and not self.done:
            self.done = True
            next(model.parameters()).grad.fill_(math.nan)


def steps_on_disk(folder: Path) -> list[int]:
    return sorted(found.step for found in committed(folder / "out"))


def strict(action: str, **more: Any) -> DivergenceDetector:
    return DivergenceDetector(
        smoothing=1.0, threshold=1.0, patience=1, warmup=0, action=action, **more
    )


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_divergence_in_the_last_record_or_evaluation_is_acted_on(
    tmp_path: Path, evaluates: bool
) -> None:
    key = "eval_loss" if evaluates else "loss"
    more = {"eval_strategy": "steps", "eval_steps": 5} if evaluates else {}
    detector = strict("abort", use_eval_loss=evaluates)
    trainer = tiny_trainer(tmp_path / "a", [Worse(LAST, key), detector], **OPTIONS, **more)
    trainer.train()
    assert trainer.state.outcome == "aborted" and steps_on_disk(tmp_path / "a") == [5]

    detector = strict("rollback", use_eval_loss=evaluates)
    trainer = tiny_trainer(tmp_path / "b", [Worse(LAST, key), detector], **OPTIONS, **more)
    output = trainer.train()
    assert detector.recovery.num_rollbacks == 1
    assert output.global_step == LAST and trainer.state.outcome == "completed"
    assert steps_on_disk(tmp_path / "b") == [5, LAST]
    assert trainer.state.num_input_tokens_skipped > 0, "the offending steps are left out"


def test_a_bad_last_step_is_acted_on(tmp_path: Path) -> None:
    guard = NaNGuardCallback("rollback")
    trainer = tiny_trainer(tmp_path, [BadStep(LAST), guard], **OPTIONS)
    trainer.train()
    assert guard.recovery.num_rollbacks == 1 and guard.recovery.skip_steps == [(LAST, LAST + 1)]
    assert trainer.state.global_step == LAST and trainer.state.outcome == "completed"


def test_rollbacks_at_the_end_have_their_limit(tmp_path: Path) -> None:
    class Always(TrainerCallback):
        def on_log_step(self, state: Any, logs: dict[str, Any]) -> None:
            if state.global_step == LAST and "loss" in logs:
                logs["loss"] = 90.0

    Always.priority = 100
    detector = strict("rollback", cooldown=0, max_rollbacks=2, skip_batches="none")
    trainer = tiny_trainer(tmp_path, [Always(), detector], **OPTIONS)
    trainer.train()
    assert detector.recovery.num_rollbacks == 2 and trainer.state.outcome == "aborted"


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
def test_without_records_it_says_that_it_would_see_nothing(tmp_path: Path, key: str) -> None:
    options = {**OPTIONS, "logging_strategy": "no"}
    options.pop("logging_steps")
    detector = DivergenceDetector(metric_key=key)
    with pytest.raises(ConfigError, match=r"logging_strategy='no' makes none; set every_step"):
        tiny_trainer(tmp_path, [detector], **options).train()
    detector = DivergenceDetector(action="rollback", metric_key=key, every_step=True)
    tiny_trainer(tmp_path, [BadStep(LAST), detector], **options).train()
    assert detector.recovery.num_rollbacks == (key == "grad_norm")


def test_a_bad_step_does_not_wait_for_its_record(tmp_path: Path) -> None:
    options = {**OPTIONS, "max_steps": 60, "logging_steps": 50, "save_steps": 4}
    detector = DivergenceDetector(action="rollback", metric_key="grad_norm")
    went_back_at = []

    class Note(TrainerCallback):
        def on_step_end(self, state: Any) -> None:
            self.step = state.global_step

        def on_load(self) -> None:
            went_back_at.append(self.step)

    tiny_trainer(tmp_path, [BadStep(9), Note(), detector], **options).train()
    assert detector.recovery.num_rollbacks == 1
    assert went_back_at and went_back_at[0] <= 9 + 6, "metrics come every five steps"


class Scores(TrainerCallback):
    """Evaluations get better but for one, which is bad the first time."""

    priority = 100

    def __init__(self, bad_step: int) -> None:
        self.bad_step: int | None = bad_step

    def on_evaluate(self, state: Any, metrics: dict[str, float]) -> None:
        metrics["eval_loss"] = 10.0 / state.global_step
        if state.global_step == self.bad_step:
            metrics["eval_loss"], self.bad_step = 99.0, None


@pytest.mark.parametrize("bad_step", [6, 8])
def test_a_stop_is_not_of_the_run_that_goes_back_from_its_step(
    tmp_path: Path, bad_step: int
) -> None:
    early = EarlyStoppingCallback(1)
    guard = DivergenceDetector(
        use_eval_loss=True, smoothing=1.0, patience=1, warmup=0, action="rollback"
    )
    schedule = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
    trainer = tiny_trainer(
        tmp_path, [Scores(bad_step), early, guard], 64, max_steps=8, save_steps=2, **schedule
    )
    trainer.train()
    assert guard.recovery.num_rollbacks == 1
    assert (trainer.state.global_step, trainer.state.outcome) == (8, "completed")
    assert trainer.bus.stopped_by is None


def test_a_commanded_stop_holds_where_the_run_goes_back(tmp_path: Path) -> None:
    class Asks(TrainerCallback):
        def on_step_end(self, state: Any, control: Any, trainer: Any) -> None:
            if state.global_step == 3:
                control.rollback = control.should_training_stop = True
                Acts(trainer, "console").act(Command("1", "graceful_stop"))

    trainer = tiny_trainer(tmp_path, [Asks()], max_steps=4, save_strategy="steps", save_steps=2)
    trainer.train()
    assert (trainer.state.global_step, trainer.state.outcome) == (2, "stopped")
    assert trainer.bus.stopped_by == ("console", "a command", "stop")
