"""A stop is noticed in every phase of a run, and a cut evaluation counts for nothing."""

import os
import signal

import pytest

from headway import TrainerCallback
from headway.checkpoint import CheckpointManager
from headway.engine.signals import SignalRequests
from headway.testing import tiny_dataset
from headway.testing.trainer import tiny_trainer


class Sends(TrainerCallback):
    """Sends a signal to this process in one event (the n-th time it comes)."""

    def __init__(self, event, number=signal.SIGTERM, nth=1):
        self.event, self.number, self.left = event, number, nth
        self.seen = []

    def _at(self, event):
        self.seen.append(event)
        if event == self.event:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), self.number)

    def on_init_end(self):
        self._at("on_init_end")

    def on_train_begin(self):
        self._at("on_train_begin")

    def on_epoch_begin(self):
        self._at("on_epoch_begin")

    def on_window(self):
        self._at("on_window")

    def on_optimizer_step(self):
        self._at("on_optimizer_step")

    def on_prediction_step(self):
        self._at("on_prediction_step")

    def on_evaluate(self):
        self._at("on_evaluate")

    def on_save(self):
        self._at("on_save")

    def on_epoch_end(self):
        self._at("on_epoch_end")


def run(folder, sender, **changes):
    arguments = {"max_steps": 8, "num_samples": 8, "save_strategy": "steps", "save_steps": 100,
                 **changes}  # fmt: skip
    trainer = tiny_trainer(folder, [sender], **arguments)
    trainer.eval_dataset = tiny_dataset(16, sequence_length=8, seed=1)
    return trainer, trainer.train()


def saved(folder):
    return [c.step for c in CheckpointManager(folder / "out").list()]


@pytest.mark.parametrize(
    ("event", "nth", "step"),
    [
        ("on_init_end", 1, 0),
        ("on_train_begin", 1, 0),
        ("on_epoch_begin", 1, 0),
        ("on_window", 1, 1),
        ("on_window", 3, 3),
        ("on_optimizer_step", 3, 3),
        ("on_epoch_end", 1, 4),
        ("on_epoch_begin", 2, 4),
        ("on_window", 8, 8),
    ],
)
def test_a_stop_is_noticed_at_the_next_step_boundary(tmp_path, event, nth, step):
    _, output = run(tmp_path, Sends(event, nth=nth))
    assert (output.global_step, output.interrupted_by) == (step, "SIGTERM")
    # A run without a step has nothing to keep.
    assert saved(tmp_path) == ([step] if step else [])


def test_a_run_that_is_stopped_before_its_first_step_keeps_its_checkpoint(tmp_path):
    run(tmp_path, Sends("on_window", nth=3))
    before = (tmp_path / "out" / "checkpoint-3" / "checkpoint_manifest.json").read_bytes()
    _, output = run(tmp_path, Sends("on_train_begin"))
    assert output.global_step == 3 and output.interrupted_by == "SIGTERM"
    manifest = tmp_path / "out" / "checkpoint-3" / "checkpoint_manifest.json"
    assert manifest.read_bytes() == before


@pytest.mark.parametrize("on_save", [False, True])
def test_an_evaluation_ends_early_and_its_part_is_not_used(tmp_path, on_save):
    sender = Sends("on_prediction_step", nth=2)
    when = {"eval_on_save": True, "save_steps": 2} if on_save else {"eval_strategy": "steps"}
    trainer, output = run(tmp_path, sender, eval_steps=2, preserve_best_model=True, **when)
    assert (output.global_step, output.interrupted_by) == (2, "SIGTERM")
    assert sender.seen.count("on_prediction_step") == 2, "of 8 batches"
    assert "on_evaluate" not in sender.seen
    assert trainer.state.best_metric is None
    assert not any("eval_loss" in record for record in trainer.state.log_history)
    (checkpoint,) = CheckpointManager(tmp_path / "out").list()
    assert checkpoint.step == 2 and checkpoint.manifest.metric is None


def test_a_stop_in_the_last_evaluation_saves_and_the_next_start_makes_up_for_it(tmp_path):
    sender = Sends("on_prediction_step", nth=3)
    arguments = {"eval_strategy": "steps", "eval_steps": 100}
    _, output = run(tmp_path, sender, **arguments)
    assert (output.global_step, output.interrupted_by) == (8, "SIGTERM")
    assert saved(tmp_path) == [8]
    again, output = run(tmp_path, Sends("never"), **arguments)
    assert output.interrupted_by is None and again.state.best_global_step == 8


def test_a_stop_during_a_save_is_noticed_after_it(tmp_path):
    _, output = run(tmp_path, Sends("on_save"), save_steps=2, save_async=False)
    assert output.interrupted_by == "SIGTERM" and output.global_step == 3
    assert saved(tmp_path) == [2, 3]


@pytest.mark.parametrize("event", ["on_train_begin", "on_window", "on_prediction_step"])
def test_a_save_request_is_served_at_the_next_boundary(tmp_path, event):
    sender = Sends(event, signal.SIGUSR1)
    _, output = run(tmp_path, sender, eval_strategy="steps", eval_steps=2, save_total_limit=None)
    assert output.interrupted_by is None and output.global_step == 8
    assert saved(tmp_path) == [{"on_prediction_step": 3}.get(event, 1), 8]


def test_a_late_save_request_is_served_even_without_a_save_strategy(tmp_path):
    sender = Sends("on_epoch_end", signal.SIGUSR1, nth=2)
    run(tmp_path, sender, save_strategy="no")
    assert saved(tmp_path) == [8]


def test_wall_time_ends_an_evaluation_too(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("headway.engine.loop.time.monotonic", lambda: now[0])

    class Slow(Sends):
        def on_prediction_step(self):
            self._at("on_prediction_step")
            now[0] += 60

    sender = Slow("never")
    _, output = run(tmp_path, sender, eval_strategy="steps", eval_steps=2, stop_at="3min")
    assert (output.global_step, output.interrupted_by) == (2, "stop_at")
    assert sender.seen.count("on_prediction_step") == 3 and saved(tmp_path) == [2]


def test_saves_by_wall_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("headway.engine.loop.time.monotonic", lambda: now[0])

    class Slow(TrainerCallback):
        def on_window(self):
            now[0] += 7 * 60

    arguments = {"save_every": "20min", "save_total_limit": None, "stop_at": "50min"}
    trainer = tiny_trainer(tmp_path, [Slow()], num_samples=40, max_steps=20, **arguments,
                           save_strategy="steps")  # fmt: skip
    output = trainer.train()
    # Steps end at 7, 14, 21, ... minutes; 20 and 40 are passed at steps 3 and 6, 50 at step 8.
    assert output.interrupted_by == "stop_at" and saved(tmp_path) == [3, 6, 8]


def test_handlers_are_put_back():
    found = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    with SignalRequests() as requests:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requests.take_save_request() and not requests.take_save_request()
        assert requests.stop_signal is None
        os.kill(os.getpid(), signal.SIGINT)
        assert requests.stop_signal is signal.SIGINT
    assert found == {n: signal.getsignal(n) for n in found}
