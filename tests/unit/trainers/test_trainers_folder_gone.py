"""The output folder is moved or deleted while the run goes on."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headway import TrainerCallback
from headway.callbacks import JsonLogger
from headway.callbacks.log.json_lines import JsonLogWriter
from headway.callbacks.log.json_reader import read_json_log
from headway.testing import tiny_trainer
from headway.trainers.folder_lock import LOCK_NAME, FolderLock

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


def begin(folder: Path, form: str = "lines") -> JsonLogWriter:
    writer = JsonLogWriter("log.json", form)
    writer.open(folder)
    writer.write_record(0, 0.0, {}, "start")
    writer.write_record(5, 0.0, {})
    return writer


def steps_in(path: Path) -> list[int]:
    return [record["global_step"] for record in read_json_log(path)]


@pytest.mark.parametrize("form", ["lines", "array"])
def test_the_log_of_another_run_in_the_new_folder_is_left_alone(tmp_path: Path, form: str) -> None:
    writer = begin(tmp_path / "out", form)
    os.rename(tmp_path / "out", tmp_path / "moved")
    command = (
        "from headway.callbacks.log.json_lines import JsonLogWriter\n"
        f"writer = JsonLogWriter('log.json', {form!r})\n"
        f"writer.open({str(tmp_path / 'out')!r})\n"
        "for step in (0, 90):\n    writer.write_record(step, 0.0, {})"
    )
    subprocess.run([sys.executable, "-c", command], check=True, timeout=60)
    assert not writer.reopen_if_gone()
    writer.write_record(6, 0.0, {})
    assert steps_in(tmp_path / "out" / "log.json") == [0, 90]
    assert steps_in(tmp_path / "moved" / "log.json") == [0, 5, 6]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["log.json"]


def test_a_log_whose_folder_is_gone_for_a_while_goes_on_when_it_is_back(tmp_path: Path) -> None:
    writer, logger = begin(tmp_path / "out"), JsonLogger()
    logger.writer, logger._active = writer, True
    os.rename(tmp_path / "out", tmp_path / "away")
    (tmp_path / "out").symlink_to("nowhere")  # no folder can be made there
    trainer = tiny_trainer(tmp_path / "other")
    for step in range(6, 9):
        trainer.state.global_step = step
        logger.on_log(trainer.args, trainer.state, trainer.bus.control, {"loss": 1.0}, trainer)
        if step == 7:
            (tmp_path / "out").unlink()
            os.rename(tmp_path / "away", tmp_path / "out")
    assert steps_in(tmp_path / "out" / "log.json") == [0, 5, 8]
    assert logger._num_lost == 2


def test_a_record_is_written_where_nobody_can_look_at_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, look = begin(tmp_path / "out"), os.stat

    def refuse(path, **more):
        if path == writer.path:
            raise PermissionError(errno.EACCES, "no ticket")
        return look(path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        assert not writer.reopen_if_gone()
        writer.write_record(6, 0.0, {})
    assert steps_in(tmp_path / "out" / "log.json") == [0, 5, 6]


@pytest.mark.parametrize("kind", ["log", "lock"])
def test_log_and_lock_begin_anew_where_another_machine_deleted_an_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A network file system has an error for its descriptor then."""
    writer, lock = begin(tmp_path / "out"), FolderLock(tmp_path / "out")
    lock.take()
    shutil.rmtree(tmp_path / "out")
    looks, asked = {"stat": os.stat, "fstat": os.fstat}, []

    def refuse(name, path, **more):
        if isinstance(path, int) and not asked:
            asked.append(path)
            raise OSError(errno.ESTALE, "stale file handle")
        return looks[name](path, **more)

    if kind == "log":
        writer.path.parent.mkdir()
        writer.path.touch()
    for name in looks:
        monkeypatch.setattr(os, name, functools.partial(refuse, name))
    if kind == "lock":
        (tmp_path / "out" / LOCK_NAME).parent.mkdir(parents=True)
        (tmp_path / "out" / LOCK_NAME).touch()
        lock.renew()
    else:
        assert writer.reopen_if_gone()
        writer.write_record(6, 0.0, {})
    assert asked
    monkeypatch.undo()
    if kind == "log":
        assert steps_in(tmp_path / "out" / "log.json") == [6]
    else:
        assert (tmp_path / "out" / LOCK_NAME).read_text().startswith("process")


def test_a_lock_is_taken_again_when_the_folder_is_back(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "out")
    lock.take()
    os.rename(tmp_path / "out", tmp_path / "away")
    (tmp_path / "out").symlink_to("nowhere")  # no folder can be made there
    lock.renew()
    (tmp_path / "out").unlink()
    os.rename(tmp_path / "away", tmp_path / "out")
    lock.renew()
    command = [sys.executable, "-c", LOOK, str(tmp_path / "out")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
    assert "is in use by another run" in said
    lock.release()
    lock.renew()  # as a save after the end of the run does
    subprocess.run(command, check=True, timeout=60)
