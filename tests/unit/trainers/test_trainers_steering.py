"""Other learning rates and another length in the middle of a run, and what a resume makes of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from torch.optim import lr_scheduler as torch_schedulers

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.testing import tiny_dataset, tiny_decoder

LR = 1e-2


class Changes(TrainerCallback):
    """Calls something after a step; knows the rate of every update."""

    def __init__(self, after: int = 0, act: Any = None) -> None:
        self.after, self.act = after, act
        self.rates: dict[int, float] = {}
        self.said: list[Any] = []

    def on_pre_optimizer_step(self, state: Any, optimizer: Any) -> None:
        self.rates[state.global_step + 1] = float(optimizer.param_groups[0]["lr"])

    def on_step_end(self, state: Any, trainer: Any) -> None:
        if state.global_step == self.after:
            self.said.append(self.act(trainer))


def run(
    folder: Path,
    act: Any = None,
    after: int = 0,
    factory: Any = None,
    resume: Any = None,
    **args: Any,
) -> tuple[Trainer, Changes]:
    changes = Changes(after, act)
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "use_cpu": True, "seed": 0,
        "learning_rate": LR, "max_steps": 8, "logging_strategy": "no", "save_strategy": "no",
        "lr_scheduler_type": "cosine", **args,
    }  # fmt: skip
    trainer = Trainer(
        args=TrainingArguments(**settings),
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(8, sequence_length=8),
        lr_scheduler_factory=factory,
        callbacks=[changes],
        default_callbacks=False,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, changes


def halve(trainer: Any) -> str:
    return trainer.change_learning_rate(scale=0.5)


def one_cycle(optimizer: Any) -> Any:
    return torch_schedulers.OneCycleLR(optimizer, max_lr=LR, total_steps=9)


def two_pieces(optimizer: Any) -> Any:
    first = torch_schedulers.LinearLR(optimizer, 0.5, total_iters=2)
    second = torch_schedulers.CosineAnnealingLR(optimizer, T_max=6)
    return torch_schedulers.SequentialLR(optimizer, [first, second], milestones=[2])


SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    "linear": {"lr_scheduler_type": "linear"},
    "constant": {"lr_scheduler_type": "constant"},
    "wsd": {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 2,
            "lr_scheduler_kwargs": {"num_decay_steps": 3}},
    "inverse": {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
    "step": {"factory": lambda optimizer: torch_schedulers.StepLR(optimizer, 2)},
    "torch cosine": {"factory": lambda optimizer: torch_schedulers.CosineAnnealingLR(optimizer, 8)},
    "one cycle": {"factory": one_cycle},
    "two pieces": {"factory": two_pieces},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_factor_holds_for_the_rest_of_any_schedule(name: str, tmp_path: Path) -> None:
    _, plain = run(tmp_path / "plain", **SCHEDULES[name])
    trainer, halved = run(tmp_path / "halved", halve, 3, **SCHEDULES[name])
    for step, rate in plain.rates.items():
        assert halved.rates[step] == pytest.approx(rate * (0.5 if step > 3 else 1.0)), step
    assert trainer.state.rate_factor == 0.5
    record = next(r for r in trainer.state.log_history if "learning_rate_factor" in r)
    assert record["step"] == 3 and record["learning_rate_factor"] == 0.5
    assert record["learning_rate"] == pytest.approx(halved.rates[4])


def test_a_value_is_the_rate_of_the_next_update(tmp_path: Path) -> None:
    def act(trainer: Any) -> Any:
        trainer.optimizer.param_groups.append(
            {**trainer.optimizer.param_groups[0], "params": [], "lr": 4e-3, "initial_lr": 4e-3}
        )
        before = trainer.learning_rate
        trainer.change_learning_rate(value=1e-3)
        return trainer.optimizer.param_groups.pop()["lr"] / 4e-3, 1e-3 / before

    _, changed = run(tmp_path, act, 3, lr_scheduler_type="constant")
    assert changed.rates[3] == LR and changed.rates[4] == pytest.approx(1e-3)
    scaled, factor = changed.said[0]
    assert scaled == pytest.approx(factor), "other groups keep their ratio"


def test_rates_that_nothing_can_be_scaled_to_are_refused(tmp_path: Path) -> None:
    def act(trainer: Any) -> Any:
        find = trainer.find_rate_obstacle
        said = [find(scale=None, value=0.0), find(scale=0.5, value=None)]
        said.append(find(scale=1e-300, value=None))
        trainer.optimizer.param_groups[0]["lr"] = 0.0
        return [*said, find(scale=None, value=1e-3)]

    _, changed = run(tmp_path, act, 1, max_steps=1)
    zero, half, tiny, from_zero = changed.said[0]
    assert "could not be scaled up again" in zero and half is None
    assert "1e-300 times those of the schedule; allowed: 1e-12 to 1e+12" in tiny
    assert "a rate of 0 now" in from_zero


def resumed(tmp_path: Path, act: Any, **args: Any) -> tuple[Changes, Trainer]:
    """A run changed after step 2 and saved at step 4, gone on with from there."""
    saves = {"save_strategy": "steps", "save_steps": 4}
    run(tmp_path, act, 2, stop_at="4 steps", **saves)
    trainer, changed = run(tmp_path, resume=True, **{**saves, **args})
    return changed, trainer


def test_a_change_that_is_kept_holds_after_a_resume(tmp_path: Path) -> None:
    _, plain = run(tmp_path / "plain")
    changed, trainer = resumed(tmp_path / "a", halve)
    assert sorted(changed.rates) == [5, 6, 7, 8]
    for step, rate in changed.rates.items():
        assert rate == pytest.approx(plain.rates[step] / 2)
    assert trainer.state.rate_factor == 0.5


def test_a_change_for_this_run_alone_is_undone_by_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def act(trainer: Any) -> None:
        trainer.change_learning_rate(scale=0.5, keep=True)
        trainer.change_learning_rate(scale=0.3, keep=False)

    _, plain = run(tmp_path / "plain")
    with caplog.at_level(logging.INFO):
        changed, trainer = resumed(tmp_path / "a", act)
    for step, rate in changed.rates.items():
        assert rate == pytest.approx(plain.rates[step] / 2), "what is kept is kept"
    assert trainer.state.rate_factor == pytest.approx(0.5)
    assert trainer.state.temporary_rate_factor == 1.0
    assert "that is undone" in caplog.text


def test_a_floor_is_scaled_with_the_rates_also_below_it(tmp_path: Path) -> None:
    floor = {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": LR / 2},
        "save_strategy": "steps",
        "save_steps": 4,
    }

    def act(trainer: Any) -> None:
        trainer.change_learning_rate(scale=0.1)

    _, plain = run(tmp_path / "plain", **floor)
    _, whole = run(tmp_path / "whole", act, 2, **floor)
    for step, rate in whole.rates.items():
        assert rate == pytest.approx(plain.rates[step] * (0.1 if step > 2 else 1.0))
    run(tmp_path / "parts", act, 2, stop_at="4 steps", **floor)
    _, rest = run(tmp_path / "parts", resume=True, **floor)
    assert rest.rates == {step: whole.rates[step] for step in (5, 6, 7, 8)}


def test_a_value_is_kept_as_a_whole(tmp_path: Path) -> None:
    def act(trainer: Any) -> None:
        trainer.change_learning_rate(scale=0.5, keep=False)
        trainer.change_learning_rate(value=LR / 10, keep=True)

    changed, _ = resumed(tmp_path, act, lr_scheduler_type="cosine")
    _, plain = run(tmp_path / "plain")
    ratio = (LR / 10) / plain.rates[3]
    assert changed.rates[5] == pytest.approx(plain.rates[5] * ratio)


# Length


def to(max_steps: int) -> Any:
    return lambda trainer: trainer.change_max_steps(max_steps)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_a_longer_run_has_the_schedule_of_one_planned_so(name: str, tmp_path: Path) -> None:
    _, planned = run(tmp_path / "planned", **SCHEDULES[name], max_steps=14)
    trainer, longer = run(tmp_path / "longer", to(14), 3, **SCHEDULES[name])
    assert trainer.state.global_step == trainer.state.max_steps == 14
    assert trainer.state.lengths == [8, 14] and trainer.state.num_train_epochs == 4
    assert {s: r for s, r in longer.rates.items() if s > 3} == {
        s: r for s, r in planned.rates.items() if s > 3
    }
    assert {"max_steps": 14, "epoch": 0.75, "step": 3} in trainer.state.log_history
    fits = "goes by no length" if name == "constant" else "drawn over the new length"
    assert fits in longer.said[0]


def test_a_run_can_be_made_shorter(tmp_path: Path) -> None:
    trainer, _ = run(tmp_path, to(5), 3)
    assert trainer.state.global_step == 5 and trainer.state.outcome == "completed"


def test_lengths_that_cannot_be_are_refused(tmp_path: Path) -> None:
    def ask(*lengths: int) -> Any:
        return lambda trainer: [trainer.find_length_obstacle(n) for n in lengths]

    _, asked = run(tmp_path / "a", ask(3, 4, 100), 3)
    behind, one_more, more = asked.said[0]
    assert "step 3 is done" in behind and one_more is None and more is None
    _, asked = run(tmp_path / "b", ask(100), 3, factory=one_cycle)
    assert "OneCycleLR was made for 9 steps" in asked.said[0][0]
    _, asked = run(
        tmp_path / "c",
        ask(100),
        1,
        max_steps=-1,
        train_for="64 tokens",
        lr_scheduler_type="constant",
    )
    assert "not counted in steps (train_for='64 tokens')" in asked.said[0][0]
    pieces = [{"type": "constant", "length": 6}, {"type": "linear"}]
    args = {"lr_scheduler_type": "sequential", "lr_scheduler_kwargs": {"schedules": pieces}}
    _, asked = run(tmp_path / "d", ask(5, 9), 3, **args)
    too_short, fits = asked.said[0]
    assert "longer than the training" in too_short and fits is None


def test_a_resume_goes_on_to_the_commanded_length(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, planned = run(tmp_path / "planned", max_steps=12)
    with caplog.at_level(logging.INFO):
        changed, trainer = resumed(tmp_path / "a", to(12))
    assert trainer.state.global_step == 12
    assert changed.rates == {s: r for s, r in planned.rates.items() if s > 4}
    assert "made to end after step 12 instead of 8" in caplog.text
    assert "schedule" not in "".join(r.message for r in caplog.records if r.levelno > logging.INFO)


def test_another_length_in_the_arguments_counts_more(tmp_path: Path) -> None:
    changed, trainer = resumed(tmp_path, to(12), max_steps=10)
    assert trainer.state.global_step == 10 and trainer.state.lengths is None
