"""The output folder is moved or deleted while the run goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headway import TrainerCallback
from headway.callbacks import JsonLogger
from headway.callbacks.log.json_reader import read_json_log
from headway.testing import tiny_trainer

LOOK = """
import sys
from headway.trainers.folder_lock import FolderLock
FolderLock(sys.argv[1]).check()
"""


class Lose(TrainerCallback):
    """Moves or deletes the folder after step 3, and asks at step 5 who may train there."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder, self.how, self.said = folder, how, ""

    def on_step_end(self, state):
        if state.global_step == 3 and self.how == "moved":
            os.rename(self.folder, self.folder.with_name("moved"))
        elif state.global_step == 3:
            shutil.rmtree(self.folder)
        elif state.global_step == 5:
            command = [sys.executable, "-c", LOOK, str(self.folder)]
            self.said = subprocess.run(command, capture_output=True, text=True, timeout=60).stderr


@pytest.mark.parametrize("form", ["lines", "array"])
@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_logs_and_checkpoints_go_on_in_a_folder_that_is_this_runs_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, form: str
) -> None:
    lose = Lose(tmp_path / "out", how)
    trainer = tiny_trainer(
        tmp_path,
        [lose, JsonLogger(format=form)],
        max_steps=6,
        num_samples=32,
        save_strategy="steps",
        save_steps=2,
        save_async=False,
    )
    trainer.train()
    name = "trainer_logs.jsonl" if form == "lines" else "trainer_logs.json"
    records = read_json_log(tmp_path / "out" / name)
    assert [r["type"] for r in records] == ["start", "train", "train", "train", "train", "summary"]
    assert [r["global_step"] for r in records] == [0, 3, 4, 5, 6, 6]
    assert records[0]["run_id"] == trainer.run_id
    assert "is in use by another run" in lose.said
    told = "\n".join(r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert told.count("moved or deleted while the run went on") == 1
    assert told.count(f"{name} was moved or deleted; a new one begins") == 1
    assert (tmp_path / "out" / "checkpoint-6").is_dir()
    if how == "moved":
        old = read_json_log(tmp_path / "moved" / name)
        assert [r["global_step"] for r in old] == [0, 1, 2]


def test_a_log_that_is_put_back_goes_on(tmp_path: Path) -> None:
    class Copy(TrainerCallback):
        def on_step_end(self, state):
            if state.global_step == 3:
                os.rename(tmp_path / "out", tmp_path / "old")
                shutil.copytree(tmp_path / "old", tmp_path / "out")

    tiny_trainer(tmp_path, [Copy(), JsonLogger()], max_steps=5).train()
    records = read_json_log(tmp_path / "out/trainer_logs.jsonl")
    assert [r["global_step"] for r in records] == [0, 1, 2, 3, 4, 5, 5]
