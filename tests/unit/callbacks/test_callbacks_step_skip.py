"""Steps that are left out: counted, passed over, not computed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import ConfigError, TrainerCallback
from headway.callbacks import (
    DivergenceDetector,
    EarlyStoppingCallback,
    NaNGuardCallback,
    StepSkipRange,
)
from headway.engine.events import EVENTS
from headway.testing import tiny_trainer


class Ledger(TrainerCallback):
    """What came in each step."""

    def __init__(self) -> None:
        self.events: dict[int, Counter[str]] = {}
        self.samples: dict[int, list[int]] = {}
        self.weights: dict[int, torch.Tensor] = {}
        self.rates: dict[int, float] = {}
        self.metrics: dict[int, dict[str, float]] = {}

    def on_window(self, window: Any, state: Any) -> None:
        self.samples[state.global_step + 1] = window.sample_ids.tolist()

    def on_train_metrics(self, state: Any) -> None:
        self.events.setdefault(state.global_step + 1, Counter())["on_train_metrics"] += 1

    def on_optimizer_step(self, state: Any) -> None:
        self.events.setdefault(state.global_step + 1, Counter())["on_optimizer_step"] += 1

    def on_step_end(self, state: Any, model: Any, lr_scheduler: Any) -> None:
        step = state.global_step
        self.events.setdefault(step, Counter())["on_step_end"] += 1
        self.weights[step] = next(model.parameters()).detach().clone()
        self.rates[step] = lr_scheduler.get_last_lr()[0]

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics.setdefault(step, {}).update(metrics)


def run(folder: Path, callbacks: list[Any], **arguments: Any) -> tuple[Any, Ledger]:
    ledger = Ledger()
    options = {"max_steps": 8, "num_samples": 64, "learning_rate": 1e-2, **arguments}
    trainer = tiny_trainer(folder, [*callbacks, ledger], **options)
    trainer.train()
    return trainer, ledger


def test_its_steps_are_counted_and_not_taken(tmp_path: Path, recwarn: Any) -> None:
    trainer, skipped = run(tmp_path / "a", [StepSkipRange(3, 5), StepSkipRange(7, 8)])
    plain_trainer, plain = run(tmp_path / "b", [])
    gone = {3, 4, 7}
    assert skipped.samples == plain.samples, "their data are passed over"
    assert skipped.rates == plain.rates, "the schedule goes by steps"
    for step in range(1, 9):
        assert skipped.events[step]["on_step_end"] == 1
        assert skipped.events[step]["on_optimizer_step"] == (step not in gone)
        assert skipped.events[step]["on_train_metrics"] == (step not in gone)
        assert ("train/CE loss" in skipped.metrics[step]) == (step not in gone)
        assert skipped.metrics[step]["optim/step skipped"] == (step in gone)
    assert torch.equal(skipped.weights[2], plain.weights[2])
    assert torch.equal(skipped.weights[2], skipped.weights[4])
    assert not torch.equal(skipped.weights[4], skipped.weights[5])
    state, whole = trainer.state, plain_trainer.state
    assert state.global_step == 8 and state.num_input_tokens_seen == whole.num_input_tokens_seen
    assert state.num_input_tokens_skipped == 3 * whole.num_input_tokens_seen // 8
    assert whole.num_input_tokens_skipped == 0
    assert state.total_flos == pytest.approx(whole.total_flos * 5 / 8)
    assert [r["step"] for r in state.log_history if "loss" in r] == [1, 2, 5, 6, 8]


def test_the_first_step_can_be_left_out(tmp_path: Path, recwarn: Any) -> None:
    _, ledger = run(tmp_path, [StepSkipRange(1, 3)], logging_steps=4)
    assert [w for w in recwarn if "lr_scheduler" in str(w.message)] == []
    assert "train/CE loss" in ledger.metrics[3]


def test_records_tell_how_many_steps_were_left_out(tmp_path: Path) -> None:
    trainer, _ = run(tmp_path, [StepSkipRange(2, 4)], logging_steps=4)
    records = [r for r in trainer.state.log_history if "loss" in r]
    assert [r.get("skipped_steps", 0) for r in records] == [2, 0]


def test_a_resume_inside_the_range_leaves_out_the_rest(tmp_path: Path) -> None:
    _, whole = run(tmp_path / "a", [StepSkipRange(3, 6)])
    options = {"save_strategy": "steps", "save_steps": 100}
    run(tmp_path / "b", [StepSkipRange(3, 6)], stop_at=4, **options)
    trainer, rest = run(tmp_path / "b", [StepSkipRange(3, 6)], **options)
    assert rest.events[5]["on_optimizer_step"] == 0
    assert torch.equal(rest.weights[8], whole.weights[8])
    assert trainer.state.num_input_tokens_skipped == 3 * trainer.state.num_input_tokens_seen // 8


def test_a_handler_of_the_window_can_ask_for_it(tmp_path: Path) -> None:
    class SkipShort(TrainerCallback):
        def on_window(self, window: Any, state: Any, control: Any) -> None:
            control.should_skip_step = state.global_step == 1

    _, ledger = run(tmp_path, [SkipShort()])
    taken = [step for step, events in ledger.events.items() if events["on_optimizer_step"]]
    assert taken == [1, 3, 4, 5, 6, 7, 8]
    assert "on_window" in EVENTS


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StepSkipRange(0, 2), "StepSkipRange: start: 0 given"),
        (lambda: StepSkipRange(3, 3), "StepSkipRange: stop: 3 given"),
        (lambda: DivergenceDetector(patience=0), "DivergenceDetector: patience: 0 given"),
        (lambda: DivergenceDetector(smoothing=2.0), "DivergenceDetector: smoothing: 2.0 given"),
        (lambda: DivergenceDetector(threshold=None), "DivergenceDetector: threshold and"),
        (lambda: NaNGuardCallback(max_consecutive=0), "NaNGuardCallback: max_consecutive: 0 given"),
        (lambda: EarlyStoppingCallback(0), "EarlyStoppingCallback: early_stopping_patience: 0"),
        (lambda: EarlyStoppingCallback(min_delta=-1), "EarlyStoppingCallback: min_delta: -1 given"),
        (lambda: EarlyStoppingCallback(2, patience=3), "EarlyStoppingCallback: patience: 3 given"),
    ],
)
def test_mistakes_in_options_of_guards_name_the_guard(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match="^" + words):
        make()


def test_a_second_run_of_one_object_tells_of_its_steps_as_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: Any
) -> None:
    skips = StepSkipRange(2, 4)
    for name in ("one", "two"):
        caplog.clear()
        run(tmp_path / name, [skips], max_steps=4)
        assert caplog.text.count("steps 2 to 3 are left out") == 1
