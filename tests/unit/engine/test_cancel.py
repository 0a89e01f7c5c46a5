"""`cancel_run`: when it ends a run, what is still done then, and how the run is called."""

from __future__ import annotations

import threading

import pytest

from headway import TrainerCallback
from headway.engine.cancel import CancelRequests
from headway.engine.state import TrainerState
from headway.errors import ConfigError
from headway.testing import tiny_trainer


class Cancel(TrainerCallback):
    """Cancels in one event of one step; from another thread where that is asked for."""

    def __init__(self, event, step, *, thread=False, **options):
        self.at, self.thread, self.options = (event, step), thread, options
        self.seen = []

    def act(self, event, state, trainer):
        self.seen.append((event, state.cancel_reason))
        if (event, state.global_step) != self.at:
            return
        if self.thread:
            caller = threading.Thread(target=trainer.cancel_run, args=("enough",))
            caller.start()
            caller.join()
        else:
            trainer.cancel_run("enough", **self.options)

    def on_train_begin(self, state, trainer):
        self.act("begin", state, trainer)

    def on_gradients(self, state, trainer):
        self.act("gradients", state, trainer)

    def on_step_end(self, state, trainer):
        self.act("step", state, trainer)

    def on_log(self, state, trainer):
        self.act("log", state, trainer)

    def on_prediction_step(self, state, trainer):
        self.act("prediction", state, trainer)

    def on_save(self, state, trainer):
        self.act("save", state, trainer)

    def on_train_end(self, state):
        self.seen.append(("end", state.outcome))


def saved(folder):
    return sorted(int(path.name.split("-")[1]) for path in (folder / "out").glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("event", "step", "thread", "stops", "evaluated"),
    [
        ("step", 3, False, 3, [2]),
        ("step", 3, True, 3, [2]),
        ("gradients", 2, True, 3, [2]),
        ("log", 4, False, 4, [2]),
        ("save", 4, False, 4, [2, 4]),
        ("prediction", 2, True, 2, []),
    ],
)
def test_a_run_is_canceled_at_the_step_it_is_in(tmp_path, event, step, thread, stops, evaluated):
    cancel = Cancel(event, step, thread=thread)
    trainer = tiny_trainer(
        tmp_path,
        [cancel],
        max_steps=8,
        logging_steps=2,
        save_strategy="steps",
        save_steps=4,
        save_async=False,
        eval_strategy="steps",
        eval_steps=2,
    )
    output = trainer.train()
    assert output.global_step == stops
    assert (trainer.state.outcome, trainer.is_canceled) == ("canceled", True)
    assert (trainer.state.cancel_reason, trainer.state.cancel_step) == ("enough", stops)
    assert cancel.seen[-1] == ("end", "canceled")
    # The arguments ask for saves, so the state is kept; nobody waits for an evaluation.
    assert saved(tmp_path)[-1] == stops
    history = trainer.state.log_history
    assert [record["step"] for record in history if "eval_loss" in record] == evaluated


def test_without_saves_in_the_arguments_none_is_made(tmp_path):
    trainer = tiny_trainer(tmp_path, [Cancel("step", 2)], max_steps=8, save_strategy="no")
    assert trainer.train().global_step == 2
    assert saved(tmp_path) == []


def test_a_resume_of_a_canceled_run_goes_on_and_is_not_canceled(tmp_path):
    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 100}
    tiny_trainer(tmp_path, [Cancel("step", 2)], **options).train()
    trainer = tiny_trainer(tmp_path, **options)
    assert trainer.train().global_step == 5
    assert (trainer.state.outcome, trainer.state.cancel_reason) == ("completed", None)


@pytest.mark.parametrize("before", [True, False])
def test_canceled_before_the_first_step_nothing_is_trained_or_saved(tmp_path, before):
    callbacks = [] if before else [Cancel("begin", 0)]
    trainer = tiny_trainer(tmp_path, callbacks, max_steps=4, save_strategy="steps", save_steps=2)
    if before:
        trainer.cancel_run("not today")
    assert trainer.train().global_step == 0
    assert (trainer.state.outcome, trainer.state.cancel_step) == ("canceled", 0)
    assert saved(tmp_path) == []
    # It held for that run only.
    trainer.pop_callback(Cancel)
    assert trainer.train().global_step == 4
    assert (trainer.state.outcome, trainer.is_canceled) == ("completed", False)


def test_the_reason_is_known_at_once_where_all_ranks_give_it(tmp_path):
    seen = {}
    for no_sync in (False, True):
        trainer = tiny_trainer(tmp_path / str(no_sync), max_steps=3)
        trainer.cancel_run("a", no_sync=no_sync)
        trainer.cancel_run("b")
        seen[no_sync] = trainer.is_canceled
        trainer.train()
        assert trainer.state.cancel_reason == "a"
    assert seen == {False: False, True: True}


def test_a_run_canceled_in_its_last_step_is_completed(tmp_path):
    trainer = tiny_trainer(tmp_path, [Cancel("step", 3)], max_steps=3)
    trainer.train()
    assert trainer.state.outcome == "completed"


@pytest.mark.parametrize("reason", ["", "  ", None, 3])
def test_a_reason_is_needed(tmp_path, reason):
    with pytest.raises(ConfigError, match="reason must be a text"):
        tiny_trainer(tmp_path).cancel_run(reason)


def test_the_lowest_rank_that_asks_gives_the_reason_and_a_lonely_no_sync_is_told(caplog):
    state = TrainerState(global_step=7)
    requests = CancelRequests(state)
    requests.ask("mine")
    requests.agree(lambda own: [None, ["theirs", True], own])
    assert (state.cancel_reason, state.cancel_step) == ("theirs", 7)
    assert not requests.wanted
    assert "rank 0 made none" in caplog.text and "by rank 1: theirs" in caplog.text
