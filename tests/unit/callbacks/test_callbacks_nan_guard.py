"""What follows a loss, gradient or weight that is not finite, when a guard decides."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import TrainerCallback
from headway.callbacks import DivergenceDetector, NaNGuardCallback
from headway.callbacks.guard.nan_guard import find_broken
from headway.checkpoint import committed
from headway.testing import tiny_decoder, tiny_trainer
from headway.testing.poisoned import Poison, final_loss, poisoned_trainer, sample_at


class BadLoss(TrainerCallback):
    """Gradients of chosen steps are not finite."""

    def __init__(self, *steps: int, value: float = math.nan) -> None:
        self.steps, self.value = steps, value

    def on_gradients(self, model: Any, state: Any) -> None:
        if state.global_step + 1 in self.steps:
            next(model.parameters()).grad.fill_(self.value)


class BreakWeights(TrainerCallback):
    """A weight becomes infinite in the update of a step, once."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_optimizer_step(self, model: Any, state: Any) -> None:
        if state.global_step + 1 == self.step:
            self.step = -1
            with torch.no_grad():
                next(model.parameters()).fill_(math.inf)


def run(folder: Path, callbacks: list[Any], **arguments: Any) -> Any:
    options = {
        "max_steps": 12,
        "num_samples": 64,
        "save_strategy": "steps",
        "save_steps": 3,
        "save_async": False,
        "save_total_limit": None,
        **arguments,
    }
    trainer = tiny_trainer(folder, callbacks, **options)
    trainer.train()
    return trainer


def steps_on_disk(folder: Path) -> list[int]:
    return sorted(c.step for c in committed(folder / "out"))


@pytest.mark.parametrize("action", ["stop", "abort"])
def test_it_ends_the_run_in_place_of_the_option(tmp_path: Path, action: str) -> None:
    trainer = run(tmp_path, [BadLoss(5), NaNGuardCallback(action)], nonfinite_action="raise")
    assert trainer.state.global_step == 5
    assert trainer.state.outcome == ("stopped" if action == "stop" else "aborted")
    # The update was withheld: what `stop` saves is good.
    assert steps_on_disk(tmp_path) == ([3, 5] if action == "stop" else [3])


def test_skip_goes_on_but_not_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    guard = NaNGuardCallback("skip", max_consecutive=3)
    trainer = run(tmp_path / "a", [BadLoss(2, 4, 5, 7, value=math.inf), guard])
    assert trainer.state.global_step == 12 and guard.num_bad_steps == 4
    assert "the gradient norm is inf at step 2" in caplog.text
    trainer = run(
        tmp_path / "b", [BadLoss(4, 5, 6, 7), NaNGuardCallback("skip", max_consecutive=3)]
    )
    assert trainer.state.global_step == 6 and trainer.state.outcome == "stopped"
    assert "3 bad steps in a row (max_consecutive)" in caplog.text


def test_broken_weights_are_never_saved(tmp_path: Path) -> None:
    for action in ("stop", "skip"):
        folder = tmp_path / action
        guard = NaNGuardCallback(action, parameter_interval=1)
        trainer = run(folder, [BreakWeights(5), guard], save_steps=2)
        assert trainer.state.outcome == "aborted" and trainer.state.global_step == 5
        assert steps_on_disk(folder) == [2, 4]


def test_weights_are_looked_at_when_the_loss_is_bad(tmp_path: Path) -> None:
    trainer = run(tmp_path, [BreakWeights(5), NaNGuardCallback("stop")])
    assert trainer.state.outcome == "aborted" and steps_on_disk(tmp_path) == [3]


def test_a_rollback_passes_over_a_checkpoint_with_broken_weights(tmp_path: Path) -> None:
    guard, loads = NaNGuardCallback("rollback"), []

    class Loads(TrainerCallback):
        def on_load(self, path: str) -> None:
            loads.append(Path(path).name)

    trainer = run(tmp_path, [BreakWeights(6), guard, Loads()])
    assert loads == ["checkpoint-3"], "checkpoint-6 was saved before a loss showed it"
    assert trainer.state.outcome == "completed" and not float(find_broken(trainer.model))
    assert guard.recovery.skip_steps == [(6, 8)]


def test_a_rollback_leaves_out_the_bad_batch_alone(tmp_path: Path) -> None:
    clean = poisoned_trainer(tmp_path / "clean", [])
    clean.train()
    poison, guard = Poison(sample_at(25), value=math.nan), NaNGuardCallback("rollback")
    trainer = poisoned_trainer(tmp_path / "bad", [poison, guard])
    trainer.train()
    assert poison.hits == [25] and guard.recovery.skip_steps == [(25, 26)]
    assert abs(final_loss(trainer) / final_loss(clean) - 1) < 0.01


def test_rollbacks_have_a_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    guard = NaNGuardCallback("rollback", max_rollbacks=2, skip_batches="none")
    trainer = run(tmp_path, [BadLoss(5), guard])
    assert trainer.state.outcome == "aborted"
    assert "max_rollbacks=2 is used up" in caplog.text


def test_of_two_guards_the_more_careful_one_counts(tmp_path: Path) -> None:
    class Listen(TrainerCallback):
        priority = -1

        def __init__(self) -> None:
            self.asked: list[Any] = []

        def on_log(self, control: Any) -> None:
            if control.rollback:
                self.asked.append((control.rollback_before_step, control.rollback_rate_factor))

    listen = Listen()
    guards = [
        NaNGuardCallback("rollback"),
        DivergenceDetector(
            metric_key="grad_norm", threshold=1e3, action="rollback", learning_rate_factor=0.5
        ),
    ]
    trainer = run(tmp_path, [BadLoss(7), *guards, listen])
    assert listen.asked == [(5, 0.5)], "what came of step 6 speaks for the state after step 5"
    assert trainer.state.outcome == "completed" and trainer.state.rate_factor == 0.5


def test_its_state_is_plain_json(tmp_path: Path) -> None:
    guard = NaNGuardCallback("skip")
    run(tmp_path, [BadLoss(2), guard], max_steps=4)
    state = json.loads(json.dumps(guard.state_dict(), allow_nan=False))
    fresh = NaNGuardCallback("skip")
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state and fresh.num_bad_steps == 1


def test_large_weights_are_finite() -> None:
    model = tiny_decoder()
    assert float(find_broken(model)) == 0
    with torch.no_grad():
        next(model.parameters()).fill_(3e38)  # their norm would not be
    assert float(find_broken(model)) == 0
    with torch.no_grad():
        next(model.parameters())[0, 0] = math.nan
    assert float(find_broken(model)) == 1
