"""CheckpointerCallback in real runs: what lies on the disk after kills, resumes and requests."""

from __future__ import annotations

import itertools
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from checkpointer_reference import Reference, Run, Settings
from hypothesis import given, settings
from hypothesis import strategies as st
from test_callbacks_checkpointer_rules import run_strategy

from headway import TrainerCallback
from headway.callbacks import CheckpointerCallback, ListCheckpointerCallback
from headway.checkpoint import CheckpointManager
from headway.errors import ConfigError
from headway.testing import tiny_trainer
from headway.testing.contents import make_contents


class Kill(TrainerCallback):
    """Ends a run at a step as a power cut does, for what is on the disk."""

    priority = 100

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, state: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


class Ask(TrainerCallback):
    """Asks for saves, and is against ephemeral ones at times."""

    def __init__(self, requests: Any = (), blocked: Any = ()) -> None:
        self.requests, self.blocked = requests, blocked

    def on_step_end(self, state: Any, control: Any) -> None:
        if state.global_step in self.requests:
            control.should_save = True
        if state.global_step in self.blocked:
            self.block_ephemeral_checkpoints()
        else:
            self.unblock_ephemeral_checkpoints()


class Saves(TrainerCallback):
    def __init__(self) -> None:
        self.announced: list[int] = []
        self.waits: list[float] = []

    def on_save(self, step: int) -> None:
        self.announced.append(step)

    def on_metrics(self, metrics: Any) -> None:
        self.waits += [v for k, v in metrics.items() if k == "checkpoint/save_wait_s"]


def listed(folder: Path) -> list[tuple[int, str]]:
    found = CheckpointManager(folder / "out").list()
    words = ("permanent", "ephemeral")
    return [
        (c.step, next((w for w in words if c.manifest.metadata.get(w)), "regular")) for c in found
    ]


def train(folder: Path, callbacks: list[Any], num_steps: int, **options: Any) -> Any:
    resume = options.pop("resume", True)
    args = {"max_steps": num_steps, "save_async": False, "logging_steps": 1000, **options}
    trainer = tiny_trainer(folder, callbacks, num_samples=64, **args)
    trainer.train(resume)
    return trainer


def make(s: Settings) -> CheckpointerCallback:
    return CheckpointerCallback(
        s.save,
        s.ephemeral,
        pre_train_checkpoint=s.pre_train,
        remove=s.remove,
        ephemeral_cooldown=s.cooldown,
        fixed_steps=s.fixed,
        max_checkpoints=s.most,
    )


def play(folder: Path, run: Run) -> None:
    """One process of the real thing."""
    there = CheckpointManager(folder / "out").list()
    resume: Any = True
    start = 0
    if there:
        chosen = there[-1 - min(run.from_older, len(there) - 1)]
        resume, start = str(chosen.path), chosen.step
    end = start + run.num_steps
    callbacks: list[Any] = [make(run.settings), Ask(run.requests, run.blocked)]
    if run.end == "killed":
        callbacks.append(Kill(end))
    options: dict[str, Any] = {} if run.end == "completed" else {"stop_at": f"{end} steps"}
    longer = 0 if run.end == "completed" else 100
    if run.end == "killed":
        options = {}
    try:
        train(folder, callbacks, end + longer, resume=resume, **options)
    except KeyboardInterrupt:
        assert run.end == "killed"


def compare(folder: Path, runs: list[Run]) -> None:
    reference = Reference()
    for run in runs:
        play(folder, run)
        reference.play(run)
        assert listed(folder) == [(one.step, one.lifetime) for one in reference.disk], run


def test_kills_and_resumes_with_changed_intervals(tmp_path: Path) -> None:
    compare(
        tmp_path,
        [
            Run(Settings(4, 1, cooldown=2, fixed=(3,)), 6, "killed", blocked=frozenset({1})),
            Run(Settings(5, 2, remove="all_non_permanent"), 3, "interrupted"),
            Run(Settings(3, 2, most=1, cooldown=2), 5, "killed", frozenset({11})),
            Run(Settings(3, 1, most=1), 5, "completed", from_older=1),
        ],
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(runs=st.lists(run_strategy, min_size=1, max_size=3))
def test_random_histories_of_real_runs(tmp_path_factory: Any, runs: list[Run]) -> None:
    compare(tmp_path_factory.mktemp("history"), runs)


def test_it_replaces_the_arguments_and_says_so(tmp_path: Path, caplog: Any) -> None:
    saves = Saves()
    with caplog.at_level(logging.WARNING):
        train(
            tmp_path,
            [CheckpointerCallback(3, pre_train_checkpoint=False), saves],
            4,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=1,
            resume=False,
        )
    assert saves.announced == [3, 4]
    assert listed(tmp_path) == [(3, "permanent"), (4, "permanent")]
    assert "save_steps=1 has no effect beside it; save_interval decides" in caplog.text
    assert "save_total_limit=1 has no effect beside it; max_checkpoints decides" in caplog.text


def test_a_disabled_one_is_as_none(tmp_path: Path) -> None:
    off = CheckpointerCallback(1, fixed_steps=[1], enabled=False)
    train(tmp_path, [off], 4, save_strategy="steps", save_steps=2, resume=False)
    assert listed(tmp_path) == [(2, "regular"), (4, "regular")]


def test_two_of_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="CheckpointerCallback and ListCheckpointerCallback"):
        train(tmp_path, [CheckpointerCallback(), ListCheckpointerCallback([1])], 1)
    train(tmp_path, [CheckpointerCallback(enabled=False), ListCheckpointerCallback([1])], 1)


def test_the_list_form_has_all_that_it_inherits(tmp_path: Path) -> None:
    def made() -> ListCheckpointerCallback:
        return ListCheckpointerCallback(
            [2, 4, 6], ephemeral_save_interval=1, max_checkpoints=1, fixed_steps=[3]
        )

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, [made(), Kill(5)], 9)
    kept = [(0, "permanent"), (3, "permanent")]
    assert listed(tmp_path) == [*kept, (4, "regular"), (5, "ephemeral")]
    train(tmp_path, [made()], 8)
    assert listed(tmp_path) == [*kept, (6, "regular"), (8, "permanent")]


# The state before the first step


class Look(TrainerCallback):
    """What lies on the disk when the second step begins."""

    def on_step_begin(self, args: Any, state: Any) -> None:
        if state.global_step == 1:
            self.found = [c.step for c in CheckpointManager(args.output_dir).list()]


class Fail(TrainerCallback):
    def on_step_end(self) -> None:
        raise RuntimeError("the first step")


def test_step_0_is_written_once_a_step_went_well(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the first step"):
        train(tmp_path, [CheckpointerCallback(), Fail()], 2)
    assert listed(tmp_path) == [], "a run that cannot start changed something"
    import torch

    from headway.models.hf import load_pretrained

    trainer = train(tmp_path, [CheckpointerCallback(save_async=True)], 2)
    assert listed(tmp_path) == [(0, "permanent"), (2, "permanent")]
    fresh = tiny_trainer(tmp_path / "other")
    fresh._prepare_model()
    saved = load_pretrained(tmp_path / "out/checkpoint-0").state_dict()
    for name, value in fresh.model.state_dict().items():
        assert torch.equal(saved[name], value), "not the weights before the first update"
    assert any(not torch.equal(saved[n], v) for n, v in trainer.model.state_dict().items())
    # A fresh run in the same folder leaves those of the first one aside, its own step 0 not.
    look = Look()
    train(tmp_path, [CheckpointerCallback(), look], 2, resume=False, overwrite_output_dir=True)
    assert look.found == [0]
    assert listed(tmp_path) == [(0, "permanent"), (2, "permanent")]
    assert (tmp_path / "out/replaced-1/checkpoint-2").is_dir()


def test_what_takes_the_place_of_a_permanent_checkpoint_is_permanent(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "out")
    manager.save(make_contents(), 3, permanent=True)
    manager.save(make_contents(), 3, ephemeral=True)
    manager.save(make_contents(), 4, ephemeral=True)
    assert listed(tmp_path) == [(3, "permanent"), (4, "ephemeral")]


# Saves that are slower than their interval


def test_saves_slower_than_the_interval_are_in_a_metric(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    times, write, saves = itertools.count(1), CheckpointManager.write, Saves()
    slow = threading.Event()

    def write_slowly(manager: Any, pending: Any) -> Path:
        if next(times) == 1:
            slow.wait(0.3)
        return write(manager, pending)

    monkeypatch.setattr(CheckpointManager, "write", write_slowly)
    monkeypatch.setattr("headway.trainers.saving._LONG_WAIT_S", 0.05)
    callback = CheckpointerCallback(1, pre_train_checkpoint=False, save_async=True)
    with caplog.at_level(logging.WARNING):
        train(tmp_path, [callback, saves], 3, resume=False)
    assert len(saves.waits) == 3 and saves.waits[0] == 0.0
    assert max(saves.waits) > 0.05
    assert "was still being written when that of step 2 was due" in caplog.text


def test_an_ephemeral_save_is_not_evaluated(tmp_path: Path) -> None:
    evaluated = []

    class Note(TrainerCallback):
        def on_evaluate(self, state: Any) -> None:
            evaluated.append(state.global_step)

    callbacks = [CheckpointerCallback(2, 1, pre_train_checkpoint=False), Note()]
    train(tmp_path, callbacks, 3, eval_on_save=True)
    assert evaluated == [2, 3]


def test_blocks_of_others_hold(tmp_path: Path) -> None:
    class Block(TrainerCallback):
        def on_train_begin(self, trainer: Any) -> None:
            trainer.block_ephemeral_saves("mine")

        def on_step_begin(self, state: Any, trainer: Any) -> None:
            if state.global_step == 2:
                trainer.unblock_ephemeral_saves("mine")

    saves = Saves()
    callback = CheckpointerCallback(None, 1, pre_train_checkpoint=False)
    train(tmp_path, [callback, Block(), saves], 4)
    assert saves.announced == [3, 4]
    with pytest.raises(RuntimeError, match="registered with no trainer"):
        CheckpointerCallback().block_ephemeral_checkpoints()


def test_a_second_run_of_one_object_is_saved_from_its_start(tmp_path: Path) -> None:
    class ReturnOnce(TrainerCallback):
        done = False

        def on_step_end(self, state: Any, control: Any) -> None:
            if state.global_step == 3 and not self.done:
                self.done = control.rollback = True

    callback = CheckpointerCallback(save_interval=2)
    tiny_trainer(tmp_path / "one", [callback, ReturnOnce()], max_steps=4).train()
    tiny_trainer(tmp_path / "two", [callback], max_steps=2).train()
    assert listed(tmp_path / "one")[0] == listed(tmp_path / "two")[0] == (0, "permanent")
