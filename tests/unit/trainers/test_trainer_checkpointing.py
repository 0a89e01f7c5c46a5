"""Saving and loading a trainer on request, from callbacks and from outside."""

import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headway.checkpoint import (
    CheckpointError,
    CheckpointInterface,
    StatefulProvider,
    is_pinned,
    pin,
    read_manifest,
    staging,
    verify,
)
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError
from headway.testing import tiny_llama, tiny_trainer
from headway.trainers.saving import Saver


class At(TrainerCallback):
    """Calls a function after one step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, trainer=None, **kwargs):
        if state.global_step == self.step:
            self.action(trainer)


class Saved(TrainerCallback):
    def __init__(self):
        self.paths = []

    def on_save(self, args, state, control, checkpoint_path=None, **kwargs):
        self.paths.append(Path(checkpoint_path).name)


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_the_trainer_meets_both_protocols(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    assert isinstance(trainer, CheckpointInterface) and isinstance(trainer, StatefulProvider)
    assert trainer.get_process_groups() == {} and trainer.get_state_components() == []
    trainer.train()
    keys = [component.key for component in trainer.get_state_components()]
    assert keys[:2] == ["model", "optimizer"]
    assert {"scheduler", "dataset", "callbacks", "rng"} <= set(keys)


def test_a_save_on_request_is_committed_when_it_returns_and_resumes(tmp_path):
    found = {}

    def save(trainer):
        found["own"] = trainer.save_checkpoint()
        found["id"] = trainer.save_checkpoint(checkpoint_id=77)
        found["path"] = trainer.save_checkpoint(str(tmp_path / "mine"), checkpoint_id=5)
        assert all(not verify(path) for path in found.values())

    saved = Saved()
    straight = tiny_trainer(tmp_path, [At(2, save), saved], max_steps=4)
    straight.train()
    assert saved.paths == ["checkpoint-2", "checkpoint-77", "mine"]
    assert found["path"] == str(tmp_path / "mine")
    assert found["id"] == str(tmp_path / "out" / "checkpoint-77")
    assert read_manifest(found["id"]).step == 2
    for path in found.values():
        shutil.copytree(path, tmp_path / "again" / "checkpoint-2", dirs_exist_ok=False)
        other = tiny_trainer(tmp_path / "x", max_steps=4)
        other.train(resume_from_checkpoint=str(tmp_path / "again" / "checkpoint-2"))
        assert other.state.global_step == 4 and same(weights(straight), weights(other))
        shutil.rmtree(tmp_path / "again")
        shutil.rmtree(tmp_path / "x")


def test_loading_in_a_run_rewinds_it_and_before_a_run_gives_weights(tmp_path):
    at_two = {}

    def save(trainer):
        trainer.save_checkpoint()
        at_two.update(weights(trainer))

    trainer = tiny_trainer(tmp_path, [At(2, save)], max_steps=4)
    trainer.train()
    assert not same(weights(trainer), at_two)
    trainer.load_checkpoint()
    assert trainer.state.global_step == 2 and same(weights(trainer), at_two)

    fresh = tiny_trainer(tmp_path, max_steps=4)
    fresh.load_checkpoint(str(tmp_path / "out" / "checkpoint-2"))
    assert same(weights(fresh), at_two) and fresh.state.global_step == 0
    with pytest.raises(CheckpointError, match="nowhere"):
        fresh.load_checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="empty"):
        tiny_trainer(tmp_path / "empty").load_checkpoint()
    with pytest.raises(ConfigError, match="needs a run"):
        fresh.save_checkpoint()


def test_a_path_is_resolved_to_a_good_checkpoint_or_none(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    assert trainer.resolve_checkpoint_path(None) is None
    trainer.train()
    newest = tmp_path / "out" / "checkpoint-2"
    assert trainer.resolve_checkpoint_path(None) == str(newest)
    assert trainer.resolve_checkpoint_path(str(newest)) == str(newest)
    assert trainer.resolve_checkpoint_path(str(tmp_path)) is None
    (newest / "trainer_state.json").write_text("{}")
    assert trainer.resolve_checkpoint_path(None) == str(tmp_path / "out" / "checkpoint-1")
    assert trainer.resolve_checkpoint_path(str(newest)) is None


def test_the_best_checkpoint_is_kept(tmp_path):
    def mark(trainer):
        trainer.set_best_checkpoint(str(tmp_path / "out" / "checkpoint-1"))

    trainer = tiny_trainer(
        tmp_path,
        [At(2, mark)],
        max_steps=4,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        save_async=False,
    )
    trainer.train()
    assert {p.name for p in (tmp_path / "out").glob("checkpoint-*")} == {
        "checkpoint-1",
        "checkpoint-4",
    }
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    with pytest.raises(CheckpointError, match="checkpoint-9"):
        trainer.set_best_checkpoint(str(tmp_path / "out" / "checkpoint-9"))


def test_the_best_checkpoint_is_kept_by_the_run_that_goes_on_too(tmp_path):
    def mark(trainer):
        trainer.set_best_checkpoint(str(tmp_path / "out" / "checkpoint-1"))

    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "save_async": False}
    tiny_trainer(tmp_path, [At(2, mark)], max_steps=2, **saving).train()
    trainer = tiny_trainer(tmp_path, max_steps=4, **saving)
    trainer.train(resume_from_checkpoint=True)
    assert {p.name for p in (tmp_path / "out").glob("checkpoint-*")} == {
        "checkpoint-1",
        "checkpoint-4",
    }
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")


@pytest.mark.parametrize("chosen", [None, 2])
def test_what_evaluations_found_is_kept_by_a_resumed_run_only_if_it_was_chosen(tmp_path, chosen):
    """Step 2 is the best that was saved, and 3, where nothing is, better."""

    def mark(trainer):
        if chosen:
            trainer.set_best_checkpoint(str(tmp_path / "out" / f"checkpoint-{chosen}"))

    scores = iter([1.0, 2.0, 3.0, 1.0])
    settings = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2,
                "save_async": False, "eval_strategy": "steps", "eval_steps": 1,
                "metric_for_best_model": "score", "greater_is_better": True}  # fmt: skip
    first = tiny_trainer(tmp_path, [At(3, mark)], max_steps=4, **settings)
    first.compute_metrics = lambda found: {"score": next(scores)}
    first.train()
    state = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_global_step"] == 3 and state["best_model_checkpoint"].endswith("-2")
    second = tiny_trainer(tmp_path, max_steps=8, **settings)
    second.compute_metrics = lambda found: {"score": 0.0}
    second.train(resume_from_checkpoint=True)
    there = {path.name for path in (tmp_path / "out").glob("checkpoint-*")}
    assert there == {"checkpoint-6", "checkpoint-8"} | ({"checkpoint-2"} if chosen else set())


def test_a_chosen_checkpoint_that_is_also_the_best_stays_when_a_better_one_comes(tmp_path):
    def mark(trainer):
        trainer.set_best_checkpoint(str(tmp_path / "out" / "checkpoint-1"))

    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1,
                "save_async": False, "eval_strategy": "steps", "eval_steps": 1,
                "metric_for_best_model": "score", "greater_is_better": True}  # fmt: skip
    for steps in (2, 4, 6):
        trainer = tiny_trainer(tmp_path, [At(2, mark)], max_steps=steps, **settings)
        trainer.compute_metrics = lambda found, t=trainer: {"score": abs(t.state.global_step - 1.9)}
        trainer.train(resume_from_checkpoint=True)
        there = {path.name for path in (tmp_path / "out").glob("checkpoint-*")}
        assert there == {"checkpoint-1", f"checkpoint-{steps}"}


def test_the_first_save_finds_its_memory_allocated(tmp_path):
    held = {}

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, trainer=None, **kwargs):
            held["before"] = trainer._saver.manager.stager.host_bytes

        def on_save(self, args, state, control, trainer=None, **kwargs):
            held[state.global_step] = trainer._saver.manager.stager.host_bytes

    tiny_trainer(tmp_path, [Watch()], max_steps=4, save_strategy="steps", save_steps=2).train()
    assert held["before"] > 0 and set(held.values()) == {held["before"]}


def memory_threads():
    return [t for t in threading.enumerate() if t.name == "headway-save-memory"]


def test_memory_for_saves_is_brought_in_after_the_first_step_and_no_thread_stays(
    tmp_path, monkeypatch
):
    seen = []
    trainer = tiny_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)

    def fill(address, value, size):
        seen.append((trainer.state.global_step, threading.current_thread().name))
        return memset(address, value, size)

    memset = staging.ctypes.memset
    monkeypatch.setattr(staging, "ctypes", SimpleNamespace(memset=fill))
    trainer.train()
    assert seen and {name for _, name in seen} == {"headway-save-memory"}
    assert all(step >= 1 for step, _ in seen)
    assert (tmp_path / "out" / "checkpoint-2" / "checkpoint_manifest.json").is_file()
    assert memory_threads() == []


def test_a_run_that_fails_leaves_no_memory_half_brought_in(tmp_path, monkeypatch):
    calls, entered = [], threading.Event()

    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, trainer=None, **kwargs):
            if state.global_step == 2:
                assert entered.wait(60)
                raise RuntimeError("in the second step")

    trainer = tiny_trainer(tmp_path, [Fails()], max_steps=4, save_strategy="steps", save_steps=4)

    def fill(address, value, size):
        calls.append(size)
        entered.set()
        assert trainer._saver.manager.stager._buffers._given_up.wait(60)

    monkeypatch.setattr(staging, "ctypes", SimpleNamespace(memset=fill))
    monkeypatch.setattr(staging, "_CHUNK_BYTES", 256)
    with pytest.raises(RuntimeError, match="in the second step"):
        trainer.train()
    assert len(calls) == 1 and memory_threads() == []


def test_a_models_generation_config_goes_along(tmp_path):
    transformers = pytest.importorskip("transformers")

    def make():
        model = tiny_llama()
        model.generation_config.max_new_tokens = 7
        model.generation_config.eos_token_id = [1, 2]
        return model

    trainer = tiny_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.model_init = make
    trainer.train()
    named = trainer.save_checkpoint(str(tmp_path / "named"))
    trainer.save_model(str(tmp_path / "model"))
    for folder in (tmp_path / "out" / "checkpoint-1", named, tmp_path / "model"):
        found = transformers.AutoModelForCausalLM.from_pretrained(folder).generation_config
        assert found.max_new_tokens == 7 and found.eos_token_id == [1, 2]
    assert not verify(tmp_path / "out" / "checkpoint-1")


def test_a_model_that_cannot_generate_has_no_generation_config(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = tiny_llama().config
    config.pad_token_id = 0
    trainer = tiny_trainer(tmp_path, max_steps=1)
    trainer.model, trainer.model_init = transformers.LlamaForSequenceClassification(config), None
    trainer.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "config.json").is_file()
    assert not (tmp_path / "model" / "generation_config.json").exists()


def test_a_save_under_another_name_is_not_subject_to_retention(tmp_path):
    def save(trainer):
        trainer.save_checkpoint(checkpoint_id=999)

    tiny_trainer(
        tmp_path,
        [At(1, save)],
        max_steps=4,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
    ).train()
    assert sorted(p.name for p in (tmp_path / "out").glob("checkpoint-*")) == [
        "checkpoint-4",
        "checkpoint-999",
    ]
    assert not verify(tmp_path / "out" / "checkpoint-999")


@pytest.mark.parametrize("path_given", [False, True])
def test_a_save_onto_a_pinned_checkpoint_moves_it_aside(path_given, tmp_path):
    pinned = tmp_path / "out" / "checkpoint-2"

    def save(trainer):
        pin(pinned)
        given = {"checkpoint_path": str(pinned)} if path_given else {"checkpoint_id": 2}
        assert trainer.save_checkpoint(**given) == str(pinned)

    tiny_trainer(
        tmp_path, [At(3, save)], max_steps=3, save_strategy="steps", save_steps=2, save_async=False
    ).train()
    [aside] = (tmp_path / "out").glob("checkpoint-2.old-*")
    assert read_manifest(aside).step == 2 and is_pinned(aside) and not verify(aside)
    assert read_manifest(pinned).step == 3 and not is_pinned(pinned) and not verify(pinned)


@pytest.mark.parametrize("place", ["file", "file/below", "closed/below"])
def test_a_place_that_cannot_be_written_is_refused_by_its_option(place, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "closed").mkdir()
    may = os.access
    closed = tmp_path / "closed"  # root may write everywhere, so the answer is given here
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and may(path, mode))
    trainer = tiny_trainer(tmp_path, max_steps=1, output_dir=str(tmp_path / place))
    trainer.model_init = lambda: pytest.fail("the model was built first")
    with pytest.raises(ConfigError, match=rf"^output_dir: {tmp_path / place}"):
        trainer.train()
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["closed", "file"]


def test_an_output_dir_that_turns_out_closed_is_refused_by_its_option(tmp_path, monkeypatch):
    def refuse(path, *args, **options):
        raise PermissionError(13, "Permission denied", str(path))

    trainer = tiny_trainer(tmp_path, max_steps=1)
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"output_dir: .*denied"):
        patch.setattr(os, "mkdir", refuse)
        trainer.train()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_steps_on_a_gpu_wait_for_a_copy_under_way(device, tmp_path):
    """Whether saves are expected or not: a signal or a callback may ask for one."""
    trainer = tiny_trainer(tmp_path, save_strategy="no")
    saver = Saver(trainer, {})
    trainer.strategy = SimpleNamespace(device=torch.device(device), before_apply=None)
    saver.prepare(expects_saves=False)
    waits = saver.manager.wait_before_update if device == "cuda" else None
    assert trainer.strategy.before_apply == waits
