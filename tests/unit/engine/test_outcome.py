"""How a run ended, as its callbacks see it, and what identifies it over resumes."""

from __future__ import annotations

import os
import signal

import pytest

from headway import TrainerCallback
from headway.testing import tiny_trainer


class Watcher(TrainerCallback):
    def __init__(self):
        self.seen = {}

    def on_step_end(self, state):
        self.seen["during"] = state.outcome

    def on_log(self, state, logs):
        if "train_runtime" in logs:
            self.seen["summary"] = state.outcome

    def on_train_end(self, state):
        self.seen["end"] = state.outcome

    def on_error(self, state):
        self.seen["error"] = state.outcome

    def on_close(self, state):
        self.seen["close"] = state.outcome


class Act(TrainerCallback):
    def __init__(self, act):
        self.act = act

    def on_step_end(self, state, control):
        if state.global_step == 2:
            self.act(control)


def stop(control):
    control.should_training_stop = True


def abort(control):
    control.should_abort_without_save = True


def send_signal(control):
    os.kill(os.getpid(), signal.SIGTERM)


def fail(control):
    raise RuntimeError("broken")


def press_ctrl_c(control):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("act", "options", "outcome"),
    [
        (lambda control: None, {}, "completed"),
        (stop, {}, "stopped"),
        (stop, {"max_steps": 2}, "completed"),  # asked for where it ends anyway
        (send_signal, {}, "interrupted"),
        (lambda control: None, {"stop_at": "2 steps"}, "interrupted"),
        (abort, {}, "aborted"),
    ],
)
def test_the_outcome_is_known_before_the_end_is_announced(tmp_path, act, options, outcome):
    watcher = Watcher()
    trainer = tiny_trainer(tmp_path, [watcher, Act(act)], **{"max_steps": 4, **options})
    trainer.train()
    assert watcher.seen == {"during": None} | dict.fromkeys(["summary", "end", "close"], outcome)
    assert trainer.state.outcome == outcome


@pytest.mark.parametrize(
    ("act", "error", "outcome"),
    [(fail, RuntimeError, "failed"), (press_ctrl_c, KeyboardInterrupt, "interrupted")],
)
def test_the_outcome_of_an_error(tmp_path, act, error, outcome):
    watcher = Watcher()
    with pytest.raises(error):
        tiny_trainer(tmp_path, [watcher, Act(act)], max_steps=4).train()
    assert watcher.seen == {"during": None, "error": outcome, "close": outcome}


def test_a_run_keeps_its_id_over_resumes_and_another_run_has_another(tmp_path):
    class Ids(TrainerCallback):
        found = None

        def on_load(self, trainer):
            self.found = trainer.run_id

    options = {"save_strategy": "steps", "save_steps": 2}
    first = tiny_trainer(tmp_path / "a", max_steps=2, **options)
    assert first.run_id is None
    first.train()
    ids = Ids()
    resumed = tiny_trainer(tmp_path / "a", [ids], max_steps=3, **options)
    resumed.train()
    other = tiny_trainer(tmp_path / "b", max_steps=1)
    other.train()
    assert len(first.run_id) == 12
    assert first.run_id == resumed.run_id == ids.found != other.run_id
    # Neither the process's outcome nor the lack of an id in an old checkpoint is taken over.
    assert "outcome" not in first.state.to_dict()
    other.state.restore({"global_step": 1})
    assert other.run_id is not None
