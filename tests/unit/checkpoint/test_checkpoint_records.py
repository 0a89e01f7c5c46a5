"""A history that grows from save to save: every save has all of it and encodes what is new."""

import cProfile
import json
import math
import pstats
from typing import Any

import pytest
import torch
from checkpoint_faults import make_contents

from headway.checkpoint import CheckpointContents, CheckpointManager
from headway.checkpoint.ranks import SoloRanks
from headway.checkpoint.staging import Stager
from headway.errors import ConfigError


def record(step: int) -> dict[str, Any]:
    return {"loss": 1 / (step + 1), "step": step, "name": f"s{step}", "by_group": [0.5, step]}


def contents_with(history: list[Any]) -> CheckpointContents:
    contents = make_contents(3)
    contents.trainer_state = {"global_step": 3, "log_history": history, "epoch": 1.5}
    return contents


class Run:
    """Saves one history again and again."""

    def __init__(self, folder: Any) -> None:
        self.history: list[Any] = []
        self.manager = CheckpointManager(folder, save_total_limit=None)
        self.step = 0

    def save(self) -> tuple[str, Any]:
        self.step += 1
        contents = contents_with(self.history)
        path = self.manager.save(contents, self.step)
        loaded = self.manager.load(contents, path)
        return (path / "trainer_state.json").read_text(), loaded.trainer_state["log_history"]


def test_every_save_has_the_history_as_it_is_then(tmp_path):
    run = Run(tmp_path)
    for length in (99, 101, 150, 151, 400):
        run.history += [record(step) for step in range(len(run.history), length)]
        assert run.save()[1] == run.history
    # Callbacks may change any record, at any depth.
    run.history[0]["loss"] = 7.0
    run.history[5]["by_group"][1] = -1
    run.history[-1]["weight_norm"] = 3.0
    del run.history[17]["name"]
    assert run.save()[1] == run.history
    run.history[3]["loss"] = math.nan  # has no text of its own in JSON
    text, loaded = run.save()
    assert math.isnan(loaded[3]["loss"]) and json.loads(text)["epoch"] == 1.5
    run.history[3]["loss"] = 0.25
    run.history[4] = ("not", "a", "dict")
    assert run.save()[1] == run.history
    # A rollback leaves an earlier part of it, which then goes on in another way.
    del run.history[200:]
    run.history += [{"loss": 9.0, "step": step} for step in range(200, 230)]
    assert run.save()[1] == run.history
    run.history.clear()
    assert run.save()[1] == []


def test_a_save_does_not_see_what_happens_to_the_history_after_it():
    history = [record(step) for step in range(200)]
    stager = Stager(SoloRanks())
    staged = stager.stage(contents_with(history))
    texts = staged.trees[0].encoded["log_history"].texts
    before = list(texts)
    history[7]["loss"] = 100.0
    history.append(record(200))
    stager.stage(contents_with(history))
    assert texts == before


@pytest.mark.parametrize("value", [torch.zeros(2), torch.zeros(()), object()])
def test_what_cannot_be_stored_in_a_record_is_named(value):
    history = [record(step) for step in range(200)]
    stager = Stager(SoloRanks())
    stager.stage(contents_with(history))
    history[150]["loss"] = value
    with pytest.raises(ConfigError, match=r"trainer state: .*log_history.150.loss"):
        stager.stage(contents_with(history))


def count_calls(num_records: int) -> int:
    """Python's calls in a save with 20 records more than the one before."""
    history = [record(step) for step in range(num_records)]
    stager, calls = Stager(SoloRanks()), 0
    for _ in range(3):  # the first encodes everything, the second makes what is made once
        history += [record(step) for step in range(20)]
        contents = contents_with(history)
        profile = cProfile.Profile()
        profile.enable()
        stager.stage(contents)
        profile.disable()
        calls = pstats.Stats(profile).total_calls
    return calls


def test_what_a_save_encodes_does_not_grow_with_the_history():
    short, long = count_calls(200), count_calls(4000)
    assert long == pytest.approx(short, abs=50)
