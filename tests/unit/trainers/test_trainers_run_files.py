"""Files that callbacks bring into a checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint import read_manifest
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError
from headway.testing import tiny_trainer
from headway.trainers.run_files import collect_run_files


class Notes(TrainerCallback):
    def __init__(self, files: Any = None) -> None:
        self.files = files

    def checkpoint_files(self, args: Any, state: Any) -> Any:
        if isinstance(self.files, Exception):
            raise self.files
        return self.files or {"notes/step.txt": f"step {state.global_step}", "raw.bin": b"\x00\x01"}


def test_files_of_a_callback_are_under_the_manifest_of_the_checkpoint(tmp_path: Path) -> None:
    tiny_trainer(tmp_path, [Notes()], max_steps=2, save_strategy="steps", save_steps=2).train()
    checkpoint = tmp_path / "out/checkpoint-2"
    assert (checkpoint / "run/notes/step.txt").read_text() == "step 2"
    assert (checkpoint / "run/raw.bin").read_bytes() == b"\x00\x01"
    files = read_manifest(checkpoint).files
    assert {"run/notes/step.txt", "run/raw.bin", "run/config.json"} <= set(files)
    assert json.loads((checkpoint / "run/config.json").read_text())["args"]["max_steps"] == 2


def test_a_failing_callback_loses_its_files_and_not_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks = {"broken": Notes(RuntimeError("no disk")), "fine": Notes()}
    with caplog.at_level(logging.WARNING):
        files = collect_run_files(callbacks, None, type("State", (), {"global_step": 1}))
    assert set(files) == {"run/notes/step.txt", "run/raw.bin"}
    assert "'broken'" in caplog.text and "no disk" in caplog.text


@pytest.mark.parametrize(
    "name", ["../config.json", "/etc/x", "a/../../b", "", "config.json", "config.json/x", "a\\b"]
)
def test_a_name_outside_the_folder_or_taken_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="'notes' asks for the file"):
        collect_run_files({"notes": Notes({name: "x"})}, None, None)


def test_two_callbacks_cannot_give_one_file() -> None:
    same = {"one": Notes({"a.txt": "1"}), "two": Notes({"a.txt": "2"})}
    with pytest.raises(ConfigError, match=r"'two'.*run/a.txt is there already"):
        collect_run_files(same, None, None)


def test_a_callback_that_was_disabled_is_not_asked(tmp_path: Path) -> None:
    class Failing(Notes):
        failure_policy = "disable"

        def on_step_end(self) -> None:
            raise RuntimeError("on purpose")

    tiny_trainer(tmp_path, [Failing()], max_steps=1, save_strategy="steps", save_steps=1).train()
    assert not (tmp_path / "out/checkpoint-1/run/raw.bin").exists()
