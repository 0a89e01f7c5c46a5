"""`save_on_error`: the last completed step is saved when it is sound, and the error goes on."""

import logging

import pytest
import torch

from headway import TrainerCallback
from headway.checkpoint import CheckpointManager
from headway.engine.delivery import NonFiniteError
from headway.testing import tiny_decoder
from headway.testing.trainer import tiny_trainer


class Broken(RuntimeError):
    pass


class Fails(TrainerCallback):
    """Raises in one event of one step."""

    def __init__(self, event, step):
        self.step = step
        self.armed = event

    def _at(self, event, state):
        if event == self.armed and state.global_step == self.step:
            raise Broken(event)

    def on_step_begin(self, state):
        self._at("on_step_begin", state)

    def on_gradients(self, state):
        self._at("on_gradients", state)

    def on_optimizer_step(self, state):
        self._at("on_optimizer_step", state)

    def on_step_end(self, state):
        self._at("on_step_end", state)

    def on_evaluate(self, state):
        self._at("on_evaluate", state)


class Counts(TrainerCallback):
    """A stateful callback that counts begun steps, and the losses of the finished ones."""

    def __init__(self):
        self.begun, self.losses = 0, []

    def on_step_begin(self):
        self.begun += 1

    def on_train_metrics(self, loss):
        self.losses.append(loss.item())

    def state_dict(self):
        return {"begun": self.begun}

    def load_state_dict(self, state):
        self.begun = state["begun"]


def run(folder, fails=None, **changes):
    counts = Counts()
    arguments = {"save_on_error": True, "max_steps": 6, "num_samples": 6, "save_strategy": "steps",
                 "save_steps": 100, **changes}  # fmt: skip
    trainer = tiny_trainer(folder, [counts, *([fails] if fails else [])], **arguments)
    trainer.model_init = lambda: tiny_decoder(dropout=0.2)
    error = None
    try:
        trainer.train()
    except (Broken, NonFiniteError) as caught:
        error = caught
    return trainer, counts, error


def saved(folder):
    return [c.step for c in CheckpointManager(folder / "out").list()]


@pytest.mark.parametrize(
    ("event", "at", "expected"),
    [
        ("on_step_begin", 4, 4),
        ("on_gradients", 4, 4),
        ("on_gradients", 3, 3),
        ("on_step_end", 4, 4),
    ],
)
def test_the_last_completed_step_is_saved_and_goes_on_exactly(tmp_path, event, at, expected):
    whole, all_counts, _ = run(tmp_path / "whole", save_on_error=False)
    _, before, error = run(tmp_path, Fails(event, at))
    assert isinstance(error, Broken) and saved(tmp_path) == [expected]
    manifest = CheckpointManager(tmp_path / "out").list()[0].manifest
    assert manifest.kind == "training"
    again, after, error = run(tmp_path)
    assert error is None and before.losses[:expected] + after.losses == all_counts.losses
    assert after.begun == all_counts.begun, "the callback's state is that of the completed step"
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name])


def test_inside_the_update_there_is_nothing_to_save(tmp_path, caplog):
    _, _, error = run(tmp_path, Fails("on_optimizer_step", 4))
    assert isinstance(error, Broken) and saved(tmp_path) == []
    assert "the update was under way" in caplog.text


def test_it_is_off_by_default(tmp_path):
    run(tmp_path, Fails("on_gradients", 4), save_on_error=False)
    assert saved(tmp_path) == []
    assert tiny_trainer(tmp_path).args.save_on_error is False


def test_a_good_checkpoint_of_the_same_step_is_not_replaced(tmp_path):
    run(tmp_path, Fails("on_gradients", 4), save_steps=2)
    path = tmp_path / "out" / "checkpoint-4"
    before = (path / "checkpoint_manifest.json").read_bytes()
    assert saved(tmp_path) == [2, 4]
    run(tmp_path, Fails("on_step_begin", 4))
    assert saved(tmp_path) == [2, 4]
    assert (path / "checkpoint_manifest.json").read_bytes() == before


def test_an_error_in_an_evaluation_keeps_the_step(tmp_path):
    _, _, error = run(tmp_path, Fails("on_evaluate", 4), eval_strategy="steps", eval_steps=2)
    assert isinstance(error, Broken) and saved(tmp_path) == [4]


@pytest.mark.parametrize("at", [4, 6])
def test_a_save_that_is_due_is_made_though_the_evaluation_before_it_fails(tmp_path, at, caplog):
    """In the middle, and at the end of a run whose only evaluation that is."""
    options = {"save_on_error": False, "save_steps": 2, "eval_strategy": "steps", "eval_steps": at}
    whole, all_counts, _ = run(tmp_path / "whole", **options)
    _, before, error = run(tmp_path, Fails("on_evaluate", at), **options)
    assert isinstance(error, Broken) and saved(tmp_path) == [at - 2, at]
    assert f"the last completed step, {at}, is saved" in caplog.text
    again, after, error = run(tmp_path, **options)
    assert error is None and before.losses[:at] + after.losses == all_counts.losses
    assert saved(tmp_path)[-1] == 6
    if at == 6:
        assert "eval_loss" in again.state.log_history[-1], "the next start has it made again"
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name])


def test_a_save_that_nobody_asked_for_is_not_made(tmp_path):
    options = {"save_on_error": False, "eval_strategy": "steps", "eval_steps": 2}
    _, _, error = run(tmp_path, Fails("on_evaluate", 4), **options)
    assert isinstance(error, Broken) and saved(tmp_path) == []
    _, _, error = run(tmp_path, Fails("on_evaluate", 6), save_strategy="no", **options)
    assert isinstance(error, Broken) and saved(tmp_path) == []


def test_a_state_that_is_given_up_is_not_saved_as_it_fails(tmp_path):
    class GivesUp(TrainerCallback):
        def on_step_end(self, state, control):
            if state.global_step == 4:
                control.should_save = control.rollback = control.should_log = True

        def on_log(self, state):
            if state.global_step == 4:
                raise Broken

    options = {"save_on_error": False, "save_steps": 2, "logging_steps": 100}
    _, _, error = run(tmp_path, GivesUp(), **options)
    assert isinstance(error, Broken) and saved(tmp_path) == [2]


def test_a_run_that_raises_on_nan_keeps_the_sound_weights(tmp_path):
    class Spoil(TrainerCallback):
        def on_gradients(self, model, state):
            if state.global_step == 3:
                next(model.parameters()).grad.fill_(float("nan"))

    _, _, error = run(tmp_path, Spoil(), nonfinite_action="raise")
    assert isinstance(error, NonFiniteError) and saved(tmp_path) == [4]


def test_weights_that_are_not_finite_are_not_saved(tmp_path, caplog):
    class Spoil(TrainerCallback):
        def on_step_end(self, model, state):
            if state.global_step == 3:
                with torch.no_grad():
                    next(model.parameters()).fill_(float("inf"))
                raise Broken

    run(tmp_path, Spoil())
    assert saved(tmp_path) == [] and "is not finite" in caplog.text


def test_a_failing_rescue_does_not_hide_the_error(tmp_path, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CheckpointManager, "stage", full)
    with caplog.at_level(logging.ERROR):
        _, _, error = run(tmp_path, Fails("on_gradients", 4))
    assert isinstance(error, Broken) and "save_on_error: it failed" in caplog.text


def test_a_stop_without_save_is_obeyed(tmp_path):
    class Abort(TrainerCallback):
        def on_step_end(self, control, state):
            control.should_abort_without_save = state.global_step == 3

        def on_epoch_end(self, control):
            if control.should_abort_without_save:
                raise Broken

    run(tmp_path, Abort())
    assert saved(tmp_path) == []
