"""Saves in the background: one at a time, never torn, never lost, their failures raised."""

import subprocess
import sys
import threading

import pytest
import torch
from checkpoint_faults import make_contents, train

from headway import TrainerCallback
from headway.checkpoint import CheckpointContents, CheckpointManager, committed, verify
from headway.checkpoint.background import BackgroundSaver
from headway.checkpoint.jobs import Job, run_jobs
from headway.checkpoint.storage import Storage
from headway.testing import tiny_trainer


class GatedStorage(Storage):
    """Holds a save at its first file until the gate is opened; may then fail."""

    def __init__(self, root, error=None):
        super().__init__(root)
        self.reached, self.gate, self.error = threading.Event(), threading.Event(), error

    def create(self, path):
        self.reached.set()
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return super().create(path)


def test_training_goes_on_while_the_save_is_written_and_is_not_in_it(tmp_path):
    contents = make_contents()
    train(contents, 2)
    saved = {name: t.clone() for name, t in contents.model.state_dict().items()}
    storage = GatedStorage(tmp_path)
    saver = BackgroundSaver(manager := CheckpointManager(tmp_path, storage=storage))
    saver.start(manager.stage(contents, 2))
    assert storage.reached.wait(30)
    assert not saver.finished and saver.status == "writing the checkpoint of step 2"
    train(contents, 3)  # the writer holds at its first file all the while
    assert not torch.equal(saved["embed.weight"], contents.model.embed.weight)
    storage.gate.set()
    outcome = saver.collect()
    assert (outcome.step, outcome.path) == (2, tmp_path / "checkpoint-2")
    assert saver.collect() is None and not saver.finished and saver.status == "idle"
    again = make_contents(seed=5)
    manager.load(again, outcome.path)
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensor, saved[name]), name


def test_a_failed_write_is_raised_and_the_previous_checkpoint_is_untouched(tmp_path):
    CheckpointManager(tmp_path).save(make_contents(), 1)
    storage = GatedStorage(tmp_path, OSError(28, "No space left on device"))
    storage.gate.set()
    saver = BackgroundSaver(manager := CheckpointManager(tmp_path, storage=storage))
    saver.start(manager.stage(make_contents(), 2))
    with pytest.raises(OSError, match="No space left") as raised:
        saver.collect()
    assert "while saving the checkpoint of step 2" in raised.value.__notes__
    assert "headway checkpoint prune" in raised.value.__notes__[1]
    assert "step 2 failed" in saver.status
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    assert verify(tmp_path / "checkpoint-1") == []
    assert saver.collect() is None, "a failure is raised once"


def gate_trainers(monkeypatch, error=None):
    """Give every trainer's manager a gated storage; returns those made."""
    storages = []
    original = CheckpointManager.__init__

    def init(self, output_dir, **options):
        storages.append(GatedStorage(output_dir, error))
        original(self, output_dir, **{**options, "storage": storages[-1]})

    monkeypatch.setattr(CheckpointManager, "__init__", init)
    return storages


class AtStep(TrainerCallback):
    """Acts at steps and writes down what it sees."""

    def __init__(self, actions):
        self.actions, self.events = actions, []

    def on_step_end(self, args, state, control):
        self.events.append(state.global_step)
        if state.global_step in self.actions:
            self.actions[state.global_step](control)

    def on_save(self, step):
        self.events.append(f"saved {step}")

    def on_load(self, path):
        self.events.append(f"loaded {path.rpartition('-')[2]}")

    def on_error(self, exception):
        self.events.append("error")

    def on_train_end(self):
        self.events.append("end")


def ask_save(control):
    control.should_save = True


def run(tmp_path, callback, **arguments):
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 99, "logging_steps": 99}
    trainer = tiny_trainer(tmp_path, [callback], **{**given, **arguments})
    return trainer, trainer.train


def open_and_wait(storages, step):
    def act(control):
        assert storages[0].reached.wait(30)
        storages[0].gate.set()
        for thread in threading.enumerate():
            if thread.name == f"headway-save-{step}":
                thread.join(30)

    return act


def test_the_loop_steps_on_and_announces_at_the_next_boundary(tmp_path, monkeypatch):
    storages = gate_trainers(monkeypatch)
    callback = AtStep({1: ask_save, 3: open_and_wait(storages, 1)})
    run(tmp_path, callback)[1]()
    assert callback.events == [1, 2, 3, "saved 1", 4, "saved 4", "end"]


def test_a_failed_write_ends_the_run_at_the_next_boundary(tmp_path, monkeypatch):
    storages = gate_trainers(monkeypatch, OSError(5, "Input/output error"))
    callback = AtStep({1: ask_save, 3: open_and_wait(storages, 1)})
    with pytest.raises(OSError, match="Input/output error"):
        run(tmp_path, callback)[1]()
    assert callback.events == [1, 2, 3, "error"]
    assert committed(tmp_path / "out") == []


def test_a_second_save_waits_for_the_first(tmp_path, monkeypatch):
    storages = gate_trainers(monkeypatch)

    def ask_and_open_later(control):
        ask_save(control)
        assert storages[0].reached.wait(30)
        threading.Timer(0.1, storages[0].gate.set).start()

    callback = AtStep({1: ask_save, 2: ask_and_open_later})
    run(tmp_path, callback, save_total_limit=None)[1]()
    events = [event for event in callback.events if event != "end"]
    assert events.index("saved 1") < events.index(3), "the second save began after the first"
    assert [c.step for c in committed(tmp_path / "out")] == [1, 2, 4]


def test_rollback_waits_for_the_save_under_way(tmp_path, monkeypatch):
    storages = gate_trainers(monkeypatch)

    def roll_back(control):
        if len(callback.events) < 4:
            control.rollback = True
            threading.Timer(0.1, storages[0].gate.set).start()

    callback = AtStep({1: ask_save, 3: roll_back})
    run(tmp_path, callback)[1]()
    assert callback.events[:7] == [1, 2, 3, "saved 1", "loaded 1", 2, 3]


def test_an_error_in_training_waits_for_the_commit(tmp_path, monkeypatch):
    storages = gate_trainers(monkeypatch)

    def fail(control):
        threading.Timer(0.1, storages[0].gate.set).start()
        raise ValueError("broken on purpose")

    callback = AtStep({1: ask_save, 2: fail})
    with pytest.raises(ValueError, match="broken on purpose"):
        run(tmp_path, callback)[1]()
    assert callback.events == [1, 2, "saved 1", "error"]
    assert verify(tmp_path / "out" / "checkpoint-1") == []


def test_an_error_of_the_last_save_does_not_hide_the_error_of_training(tmp_path, monkeypatch):
    storages = gate_trainers(monkeypatch, OSError(5, "Input/output error"))

    def fail(control):
        storages[0].gate.set()
        raise ValueError("broken on purpose")

    callback = AtStep({1: ask_save, 2: fail})
    with pytest.raises(ValueError, match="broken on purpose"):
        run(tmp_path, callback)[1]()
    assert callback.events == [1, 2, "error"]


def test_synchronous_saves_are_announced_at_once(tmp_path):
    callback = AtStep({1: ask_save})
    run(tmp_path, callback, save_async=False)[1]()
    assert callback.events == [1, "saved 1", 2, 3, 4, "saved 4", "end"]


def test_the_best_model_is_loaded_after_the_last_save(tmp_path):
    callback = AtStep({})
    trainer, train_ = run(
        tmp_path, callback, save_steps=1, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, learning_rate=1e-3,
    )  # fmt: skip
    train_()
    best = trainer.state.best_model_checkpoint
    assert best is not None and verify(best) == []


def test_the_process_does_not_exit_before_the_commit(tmp_path):
    script = """
import sys, time, torch
from headway.checkpoint import CheckpointContents, CheckpointManager
from headway.checkpoint.background import BackgroundSaver
from headway.checkpoint.storage import Storage

class Slow(Storage):
    def sync_file(self, path):
        time.sleep(0.05)
        super().sync_file(path)

manager = CheckpointManager(sys.argv[1], storage=Slow(sys.argv[1]), max_shard_bytes=8 * 2**20)
contents = CheckpointContents(torch.nn.Linear(3000, 3000))  # large enough for several threads
BackgroundSaver(manager).start(manager.stage(contents, 1))
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=120)
    assert done.returncode == 3
    assert [c.step for c in committed(tmp_path)] == [1] and verify(tmp_path / "checkpoint-1") == []


def test_several_files_are_written_at_once_and_the_first_error_is_raised(tmp_path):
    meet = threading.Barrier(3)
    large = 8 * 2**20
    run_jobs([Job(large, lambda: meet.wait(30) and None) for _ in range(3)], 3)

    def fail():
        raise OSError("no")

    later = []
    jobs = [Job(large * 9, fail), *(Job(large, lambda: later.append(1)) for _ in range(50))]
    with pytest.raises(OSError, match="no"):
        run_jobs(jobs, 2)
    assert len(later) < 50


def test_large_models_are_split_and_written_by_threads(tmp_path):
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(5)))
    manager = CheckpointManager(tmp_path, max_shard_bytes=5 * 2**20)
    path = manager.save(CheckpointContents(model), 1)
    assert verify(path) == [] and (path / "model-00005-of-00005.safetensors").exists()
    copy = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(5)))
    manager.load_model(copy, path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copy.parameters()))
