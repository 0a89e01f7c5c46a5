"""Early stopping: what an improvement is, under either spelling of its options."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from headway import ConfigError, TrainerCallback
from headway.args import TrainingArguments
from headway.callbacks import EarlyStoppingCallback
from headway.engine.best import update_best
from headway.engine.state import TrainerControl, TrainerState
from headway.testing import tiny_trainer


class Scripted(TrainerCallback):
    """Replaces a figure of each evaluation, before other callbacks see it."""

    priority = 100

    def __init__(self, values: list[float], name: str = "eval_loss") -> None:
        self.values, self.key = list(values), name

    def on_evaluate(self, metrics: dict[str, float]) -> None:
        metrics[self.key] = self.values.pop(0)


def run(
    folder: Path, values: list[float], early: Any, name: str = "eval_loss", **arguments: Any
) -> Any:
    options = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": len(values), **arguments}
    scripted = Scripted(values, name)
    trainer = tiny_trainer(folder, [scripted, early], num_samples=32, **options)
    trainer.train()
    return trainer


LOSSES = [3.0, 2.0, 1.0, 1.5, 1.2, 0.5, 0.4]


def test_it_stops_after_the_patience_and_not_before(tmp_path: Path) -> None:
    trainer = run(tmp_path, LOSSES, EarlyStoppingCallback(early_stopping_patience=2))
    assert trainer.state.global_step == 5 and trainer.state.outcome == "stopped"
    assert trainer.bus.stopped_by == ("EarlyStoppingCallback", "on_evaluate", "stop")


def end_of(early: Any, values: list[float], args: Any) -> int | None:
    """The evaluation that a callback stops after, in a run that keeps the best as ours does."""
    state = TrainerState()
    for number, value in enumerate(values):
        control = TrainerControl()
        early.on_evaluate(args=args, state=state, control=control, metrics={"eval_loss": value})
        if control.should_training_stop:
            return number
        update_best(state, args, {"eval_loss": value})
    return None


def test_it_does_what_the_one_of_transformers_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    dice = random.Random(0)
    for greater in (False, True):
        args = TrainingArguments(
            output_dir=str(tmp_path), metric_for_best_model="loss", greater_is_better=greater
        )
        for _ in range(200):
            values = [round(dice.uniform(0, 3), 2) for _ in range(12)]
            limits = (dice.randint(1, 4), dice.choice([0.0, 0.1, 0.5]))
            ends = [
                end_of(kind(*limits), values, args)
                for kind in (EarlyStoppingCallback, transformers.EarlyStoppingCallback)
            ]
            assert ends[0] == ends[1], (values, limits)


def test_both_spellings_are_one(tmp_path: Path) -> None:
    early = EarlyStoppingCallback(patience=2, metric="loss", min_delta=0.3)
    assert (early.early_stopping_patience, early.early_stopping_threshold) == (2, 0.3)
    assert run(tmp_path, [3.0, 2.8, 2.6, 1.0], early).state.global_step == 3


@pytest.mark.parametrize(
    ("name", "options", "end"),
    [
        ("eval_accuracy", {"metric": "accuracy"}, 4),  # 0.5 < 0.6 > 0.55 > 0.4
        ("eval_perplexity", {"metric": "eval_perplexity"}, 3),
        ("eval_score", {"metric": "score", "greater_is_better": False}, 3),
    ],
)
def test_the_direction_follows_from_the_name_unless_it_is_given(
    tmp_path: Path, name: str, options: dict[str, Any], end: int
) -> None:
    early = EarlyStoppingCallback(2, **options)
    assert run(tmp_path, [0.5, 0.6, 0.55, 0.4, 0.7], early, name).state.global_step == end


def test_the_options_of_the_best_model_are_the_default(tmp_path: Path) -> None:
    trainer = run(
        tmp_path, [1.0, 2.0, 1.5, 1.0, 9.0], EarlyStoppingCallback(2), "eval_reward",
        metric_for_best_model="reward", greater_is_better=True,
    )  # fmt: skip
    assert trainer.state.global_step == 4


def test_what_is_not_a_number_is_no_improvement(tmp_path: Path) -> None:
    early = EarlyStoppingCallback(2)
    assert run(tmp_path, [math.nan, 2.0, math.nan, math.nan, 1.0], early).state.global_step == 4
    assert early.best == 2.0
    json.dumps(early.state_dict(), allow_nan=False)


def test_its_count_survives_a_resume(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "max_steps": 9}
    run(tmp_path, [1.0, 2.0, 2.0], EarlyStoppingCallback(3), stop_at=3, **options)
    assert run(tmp_path, [2.0, 9.0], EarlyStoppingCallback(3), **options).state.global_step == 4


def test_a_run_that_it_stopped_stays_stopped(tmp_path: Path) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 1, "resume_from_checkpoint": True}

    def start(patience: int, values: list[float]) -> Any:
        return run(tmp_path, values, EarlyStoppingCallback(patience), max_steps=7, **arguments)

    first = start(2, LOSSES)
    assert first.state.global_step == 5
    again = start(2, [])
    assert again.state.global_step == 5 and again.state.outcome == "stopped"
    assert again.bus.stopped_by == ("EarlyStoppingCallback", "on_train_begin", "stop")
    more = start(3, LOSSES[5:])
    assert more.state.global_step == 7


def test_what_it_counted_of_one_metric_does_not_count_for_another(tmp_path: Path) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 1, "max_steps": 7}
    first = run(tmp_path, LOSSES, EarlyStoppingCallback(2), **arguments)
    assert first.state.global_step == 5
    other = {"name": "eval_accuracy", "metric_for_best_model": "accuracy", **arguments}
    second = run(tmp_path, [0.1, 0.2], EarlyStoppingCallback(2), **other)
    assert second.state.global_step == 7, "0.1 is less than the best loss was, and no worse"


def test_a_second_run_of_one_object_begins_anew(tmp_path: Path) -> None:
    early = EarlyStoppingCallback(2)
    assert run(tmp_path / "one", [1.0, 1.0, 1.0], early).state.global_step == 3
    assert run(tmp_path / "two", [9.0, 8.0, 7.0, 6.0], early).state.global_step == 4
    early = EarlyStoppingCallback(2)
    early.load_state_dict({"best": 5.0, "early_stopping_patience_counter": 1})
    assert run(tmp_path / "three", [9.0, 8.0], early).state.global_step == 1


def test_the_state_of_transformers_callback_is_understood() -> None:
    early = EarlyStoppingCallback(3)
    early.load_state_dict(
        {
            "args": {"early_stopping_patience": 3},
            "attributes": {"early_stopping_patience_counter": 2},
        }
    )
    assert early.early_stopping_patience_counter == 2


def test_a_metric_of_steps(tmp_path: Path) -> None:
    class Records(TrainerCallback):
        def on_step_end(self, trainer: Any, state: Any) -> None:
            trainer.record_metric("mine/error", 1.0 if state.global_step > 3 else 2.0, "max")

    early = EarlyStoppingCallback(3, metric="mine/error")
    trainer = tiny_trainer(tmp_path, [Records(), early], num_samples=64, max_steps=20)
    assert trainer.train().global_step == 7 and early.best == 1.0


def test_a_run_that_never_evaluates_is_refused(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, [EarlyStoppingCallback()], max_steps=3)
    with pytest.raises(ConfigError, match="needs evaluations, and eval_strategy='no' plans none"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_metric_that_is_not_there_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metric.*'eval_los'; did you mean 'eval_loss'"):
        run(tmp_path, [1.0, 1.0], EarlyStoppingCallback(metric="eval_los"))


def test_a_metric_of_steps_that_never_comes_is_told_with_the_nearest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, told in (("train/CE los", True), ("train/CE loss", False)):
        caplog.clear()
        early = EarlyStoppingCallback(9, metric=name)
        tiny_trainer(tmp_path, [early], max_steps=2).train()
        assert ("'train/CE los' never came; did you mean 'train/CE loss'" in caplog.text) is told


class MeasureOther(TrainerCallback):
    def on_step_end(self, trainer: Any) -> None:
        trainer.evaluate(trainer.train_dataset, metric_key_prefix="other")


def test_evaluations_of_other_data_are_none_of_its_business(tmp_path: Path) -> None:
    early = EarlyStoppingCallback(early_stopping_patience=5)
    trainer = tiny_trainer(
        tmp_path, [MeasureOther(), early], eval_strategy="steps", eval_steps=2, max_steps=4
    )
    trainer.train()
    assert trainer.state.global_step == 4 and early.best == trainer.state.best_metric
