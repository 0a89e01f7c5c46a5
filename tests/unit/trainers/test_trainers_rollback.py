"""Returning to a chosen checkpoint: which one, with what rate, and what a resume makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway import TrainerCallback
from headway.callbacks import DivergenceDetector
from headway.checkpoint import committed, read_manifest
from headway.engine.rollback import RollbackRequest
from headway.testing import tiny_trainer
from headway.trainers.rollback import _require_same_steps


class Ask(TrainerCallback):
    """Asks for a rollback once, at a step."""

    def __init__(self, at: int, **request: Any) -> None:
        self.at, self.request = at, request
        self.loaded: list[int] = []
        self.rates: list[float] = []

    def on_load(self, state: Any) -> None:
        self.loaded.append(state.global_step)

    def on_step_end(self, state: Any, control: Any) -> None:
        if state.global_step == self.at:
            self.at, control.rollback = -1, True
            for name, value in self.request.items():
                setattr(control, f"rollback_{name}", value)

    def on_metrics(self, metrics: dict[str, float]) -> None:
        if "train/CE loss" in metrics:
            self.rates.append(metrics["optim/LR (group 0)"])


def make(folder: Path, callbacks: list[Any], **arguments: Any) -> Any:
    options = {
        "max_steps": 12,
        "num_samples": 64,
        "save_strategy": "steps",
        "save_steps": 3,
        "save_total_limit": None,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        **arguments,
    }
    return tiny_trainer(folder, callbacks, **options)


def test_it_goes_to_the_newest_of_a_step_that_is_not_too_late(tmp_path: Path) -> None:
    for before, expected in ((8, 6), (6, 6), (5, 3)):
        ask = Ask(11, before_step=before)
        make(tmp_path / str(before), [ask]).train()
        assert ask.loaded == [expected]


def test_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    class Damage(TrainerCallback):
        priority = 10

        def on_step_end(self, state: Any, args: Any) -> None:
            if state.global_step == 11:
                (weights,) = Path(args.output_dir, "checkpoint-6").glob("model*.safetensors")
                weights.write_bytes(weights.read_bytes()[:-1] + b"!")

    ask = Ask(11, before_step=8)
    make(tmp_path, [Damage(), ask], save_async=False).train()
    assert ask.loaded == [3]


def test_without_one_it_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"step 2 or an earlier.*checkpoint-3, checkpoint-6"):
        make(tmp_path, [Ask(8, before_step=2)]).train()


def test_what_it_returned_to_is_the_newest_save_and_keeps_its_figures(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_load(self, control: Any) -> None:
            control.should_abort_without_save = True

    ask = Ask(11, before_step=7)
    make(tmp_path, [ask, Stop()], eval_strategy="steps", eval_steps=3).train()
    folder = tmp_path / "out"
    assert [c.step for c in committed(folder)] == [3, 9, 6], "by save, not by step"
    assert read_manifest(folder / "checkpoint-6").metrics["eval_loss"] > 0
    again = Ask(0)
    make(tmp_path, [again], eval_strategy="steps", eval_steps=3, stop_at=7).train()
    assert again.loaded == [6]


def test_the_rate_is_lower_from_then_on_and_after_a_resume(tmp_path: Path) -> None:
    ask = Ask(7, before_step=6, rate_factor=0.5)
    trainer = make(tmp_path, [ask], stop_at=9)
    trainer.train()
    assert ask.rates == [0.1] * 7 + [0.05] * 3
    assert trainer.state.rate_factor == 0.5
    again = Ask(11, before_step=10, rate_factor=0.5)
    trainer = make(tmp_path, [again])
    trainer.train()
    assert again.rates == pytest.approx([0.05] * 2 + [0.025] * 3)
    assert trainer.state.rate_factor == 0.25


def test_a_return_to_before_an_earlier_factor_keeps_it(tmp_path: Path) -> None:
    first, second = Ask(7, before_step=6, rate_factor=0.5), Ask(8, before_step=3, rate_factor=0.5)
    make(tmp_path, [first, second], max_steps=9).train()
    assert first.loaded == [6, 3]
    assert first.rates == pytest.approx([0.1] * 7 + [0.05] * 2 + [0.025] * 6)


def test_a_schedule_keeps_its_shape_and_its_floor_is_scaled_too(tmp_path: Path) -> None:
    curve = {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 0.01},
    }
    plain, ask = Ask(0), Ask(7, before_step=6, rate_factor=0.5)
    make(tmp_path / "a", [plain], **curve).train()
    make(tmp_path / "b", [ask], **curve).train()
    assert ask.rates[7:] == pytest.approx([rate / 2 for rate in plain.rates[6:]])


def test_epochs_go_on_with_the_data_that_are_kept(tmp_path: Path) -> None:
    class Epochs(TrainerCallback):
        def __init__(self) -> None:
            self.told: list[tuple[int, float]] = []

        def on_step_end(self, state: Any) -> None:
            self.told.append((state.global_step, state.epoch))

    epochs, ask = Epochs(), Ask(5, before_step=3, skip_data=True)
    make(tmp_path / "a", [epochs, ask], num_samples=8, max_steps=8).train()  # 4 steps an epoch
    assert epochs.told[3:] == [
        (4, 1.0),
        (5, 1.25),
        (4, 1.5),
        (5, 1.75),
        (6, 2.0),
        (7, 2.25),
        (8, 2.5),
    ]

    make(tmp_path / "b", [Ask(5, before_step=3, skip_data=True)], stop_at=6).train()
    again = Epochs()
    make(tmp_path / "b", [again], max_steps=7).train()
    assert again.told == [(7, 9 / 32)], "two steps' data more than steps"


def test_wishes_of_several_ranks_come_to_the_most_careful() -> None:
    requests = [
        RollbackRequest(),
        RollbackRequest(before_step=9, rate_factor=0.5),
        RollbackRequest(skip_data=True, before_step=7, rate_factor=0.9),
    ]
    joined = RollbackRequest.join(one.to_dict() for one in requests)
    assert joined == RollbackRequest(True, 7, 0.5)
    assert not RollbackRequest.join([RollbackRequest().to_dict()]).changes_the_run


def test_ranks_that_would_leave_out_different_steps_are_told_apart() -> None:
    _require_same_steps([{"guard": [[8, 10]]}] * 2)
    with pytest.raises(RuntimeError, match=r"guard would.*\[\[8, 10\]\] on rank 0 and"):
        _require_same_steps([{"guard": [[8, 10]]}, {"guard": [[9, 10]]}])


def test_kept_data_end_what_a_guard_wanted_left_out(tmp_path: Path) -> None:
    guard = DivergenceDetector(action="rollback")
    guard.recovery.skip_steps = [(4, 6)]
    make(tmp_path, [guard, Ask(5, before_step=3, skip_data=True)], max_steps=6).train()
    assert guard.recovery.skip_steps == []
