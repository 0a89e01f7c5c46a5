"""What a failed run leaves: which report stays, how large it may be, what is hidden in it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time

import pytest

import headway.engine.examination as examination_module
from headway import TrainerCallback
from headway.config.secrets import find_secrets, hide_secrets
from headway.control.dashboard.run import Run
from headway.dist.command import continue_command, find_command
from headway.dist.failure import PeerFailure
from headway.dist.watch import Failure
from headway.engine.post_mortem import (
    FIELDS,
    describe,
    make_report,
    read_report,
    remove_report,
    render_text,
    write_report,
)
from headway.engine.process_note import look_at_process, read_note, write_note
from headway.errors import ConfigError
from headway.testing import assert_no_import, tiny_trainer

NAMES = {"post_mortem.json", "post_mortem.txt"}


def own(**more):
    return make_report(
        culprit_rank=1, world_size=2, error_type="ValueError", error="wrong", traceback="T", **more
    )


def of_another(**more):
    return make_report(
        culprit_rank=1, world_size=2, error_type="lost", error="its process is gone", **more
    )


def by_launcher(**more):
    return {**of_another(**more), "signal": "SIGKILL"}


# What each of two reports of one failure knows, and whether the later one replaces the first.
@pytest.mark.parametrize(
    ("first", "second", "replaces"),
    [
        (of_another, own, True),
        (of_another, by_launcher, True),
        (by_launcher, own, True),
        (own, of_another, False),
        (own, by_launcher, False),
        (own, own, False),
        (of_another, of_another, False),
    ],
)
def test_of_one_failure_the_report_stays_that_knows_most(tmp_path, first, second, replaces):
    assert write_report(tmp_path, first(step=1), since=0)
    assert write_report(tmp_path, second(step=2), since=0) == replaces
    assert read_report(tmp_path)["step"] == (2 if replaces else 1)
    assert {path.name for path in tmp_path.iterdir()} == NAMES, "nothing else is left"
    assert stat.S_IMODE(os.stat(tmp_path / "post_mortem.json").st_mode) == 0o644


def test_a_new_failure_replaces_an_old_one_whatever_it_knows(tmp_path):
    write_report(tmp_path, own(step=1, time=100.0), since=50)
    assert write_report(tmp_path, of_another(step=2, time=300.0), since=200)
    assert read_report(tmp_path)["step"] == 2
    assert read_report(tmp_path, since=301) is None


def test_many_ranks_that_write_at_once_leave_the_one_that_knows_most(tmp_path):
    ready = threading.Barrier(8)

    def write(rank):
        ready.wait()
        report = own(reported_by="rank 1") if rank == 1 else of_another(reported_by=f"rank {rank}")
        write_report(tmp_path, report, since=0)

    for _ in range(10):
        remove_report(tmp_path)
        threads = [threading.Thread(target=write, args=(rank,)) for rank in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert read_report(tmp_path)["reported_by"] == "rank 1"
        assert "ValueError: wrong" in (tmp_path / "post_mortem.txt").read_text()


def test_a_report_has_every_field_and_stays_small(tmp_path):
    metrics = {f"metric {n}": float(n) for n in range(500)} | {"x" * 9000: float("nan")}
    report = make_report(
        error="e" * 10**6,
        traceback="begin" + "t" * 10**6 + "the end",
        last_steps=[{"step": step, **metrics} for step in range(5000)],
    )
    assert tuple(sorted(report)) == tuple(sorted(FIELDS))
    assert write_report(tmp_path, report, since=0)
    assert (tmp_path / "post_mortem.json").stat().st_size < 200_000
    assert (tmp_path / "post_mortem.txt").stat().st_size < 200_000
    found = read_report(tmp_path)
    assert found["traceback"].startswith("begin") and found["traceback"].endswith("the end")
    assert found["last_steps"][-1]["step"] == 4999
    odd = make_report(last_steps=[{"step": 1, "loss": float("nan"), "it": object()}])
    assert odd["last_steps"][0]["loss"] == "nan"
    json.dumps(odd, allow_nan=False)


def test_a_folder_that_cannot_be_written_is_told_and_no_more(tmp_path, caplog):
    assert not write_report(tmp_path / "absent", own(), since=0)
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("text", ["", "[]", "{", '{"time": "x"}', "[" * 100000])
def test_what_is_no_report_is_none(tmp_path, text):
    (tmp_path / "post_mortem.json").write_text(text)
    assert read_report(tmp_path) is None
    assert write_report(tmp_path, own(), since=0)


def test_the_text_says_who_and_what_to_do():
    report = by_launcher(
        step=7,
        memory={"host": {"rss_bytes": 2**30}, "device": None},
        last_steps=[{"step": 7, "loss": 1.25}],
        resume_command="headway train run.yaml",
        directory="/runs",
    )
    text = render_text(report)
    assert text.startswith("rank 1 of 2 was ended by SIGKILL")
    for part in ("7: loss 1.25", "rss 1.00 GiB", "headway train run.yaml", "none: it begins anew"):
        assert part in text
    assert describe(own(signal=None)) == "rank 1 of 2 failed: ValueError: wrong"
    assert describe({"world_size": 1, "culprit_rank": 0, "error": "a\nb"}) == "the run failed: a"


# -- a run of one process --------------------------------------------------------------------------


class FailAt(TrainerCallback):
    def __init__(self, step, error):
        self.step, self.error = step, error

    def on_step_end(self, state):
        if state.global_step == self.step:
            raise self.error


def left(tmp_path):
    folder = tmp_path / "out"
    return {path.name for path in folder.iterdir()} & NAMES if folder.is_dir() else set()


def fail(tmp_path, step, error, **options):
    trainer = tiny_trainer(tmp_path, callbacks=[FailAt(step, error)], max_steps=6, **options)
    with pytest.raises(type(error)):
        trainer.train()


def test_a_run_that_fails_leaves_it_and_one_that_completes_removes_it(tmp_path):
    fail(tmp_path, 3, RuntimeError("broken"), save_strategy="steps", save_steps=2)
    report = read_report(tmp_path / "out")
    assert (report["culprit_rank"], report["world_size"], report["step"]) == (0, 1, 3)
    assert report["error"] == "callback 'FailAt', on_step_end: broken"
    assert "in on_step_end" in report["traceback"]
    assert [step["step"] for step in report["last_steps"]] == [1, 2, 3]
    assert report["memory"]["host"]["peak_rss_bytes"] >= report["memory"]["host"]["rss_bytes"] > 0
    assert report["checkpoint"]["step"] == 2 and report["checkpoint"]["path"].endswith("-2")
    tiny_trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=2).train()
    assert left(tmp_path) == set()


def test_the_last_steps_have_all_that_came_for_each(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 2, "save_async": False}
    fail(tmp_path, 5, RuntimeError("broken"), **saves)
    steps = {step["step"]: step for step in read_report(tmp_path / "out")["last_steps"]}
    for saved in (2, 4):
        assert {"train/CE loss", "checkpoint/save_duration_s"} <= steps[saved].keys()


class ReturnAndFail(TrainerCallback):
    """Goes back from step 5 to step 2, and fails in the step after."""

    done = False

    def on_step_end(self, state, control):
        if state.global_step == 5:
            self.done = control.rollback = True
            control.rollback_before_step = 2
        elif self.done:
            raise RuntimeError("broken")


def test_steps_that_a_rollback_gave_up_are_not_among_the_last(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 2, "save_async": False}
    trainer = tiny_trainer(tmp_path, callbacks=[ReturnAndFail()], max_steps=6, **saves)
    with pytest.raises(RuntimeError):
        trainer.train()
    report = read_report(tmp_path / "out")
    assert report["step"] == 3
    assert [step["step"] for step in report["last_steps"]] == [1, 2, 3]


@pytest.mark.parametrize(
    ("error", "step", "leaves"),
    [
        (RuntimeError("broken"), 1, False),  # no step has worked: nothing is changed on disk
        (ConfigError("a mistake"), 1, False),
        (ConfigError("a mistake, late"), 2, True),
        (KeyboardInterrupt(), 2, False),
    ],
)
def test_what_is_a_failure(tmp_path, error, step, leaves):
    (tmp_path / "out").mkdir()  # as that of an earlier run
    fail(tmp_path, step, error)
    assert left(tmp_path) == (NAMES if leaves else set())


def test_a_stop_by_a_signal_keeps_the_report_of_the_failure_before(tmp_path):
    fail(tmp_path, 3, RuntimeError("broken"))
    tiny_trainer(tmp_path, max_steps=6, stop_at=2).train()
    assert left(tmp_path) == NAMES, "that run has not got past it"


def test_a_report_that_cannot_be_made_does_not_hide_the_error(tmp_path, monkeypatch, caplog):
    def break_down():
        raise RuntimeError("measuring fails, too")

    monkeypatch.setattr(examination_module, "_measure_memory", break_down)
    fail(tmp_path, 3, ZeroDivisionError("the real one"))
    assert left(tmp_path) == set() and "could not be made" in caplog.text


def meet(trainer, failure, recent):
    """The failure of another rank, as it comes out of a run."""
    examination = examination_module.Examination(trainer.args, trainer.state, None)
    with pytest.raises(PeerFailure), examination:
        examination.begin(recent)
        raise PeerFailure(failure, 3)


@pytest.mark.parametrize(
    ("rank", "culprit"), [(1, 0), (2, 0), (0, 1), (2, 1), (0, None), (1, None), (2, None)]
)
def test_which_rank_stands_in_for_one_that_says_nothing(tmp_path, monkeypatch, rank, culprit):
    trainer = tiny_trainer(tmp_path)
    trainer.args._process_index, trainer.args._world_size = rank, 3
    (tmp_path / "out").mkdir()
    failure = Failure(culprit, "its process is gone", "lost")
    meet(trainer, failure, {})
    stands_in = rank == (1 if culprit == 0 else 0)
    assert left(tmp_path) == (NAMES if stands_in else set())
    if stands_in:
        report = read_report(tmp_path / "out")
        assert report["culprit_rank"] == culprit and report["reported_by"] == f"rank {rank}"


def test_the_words_of_another_rank_s_error(tmp_path):
    trainer = tiny_trainer(tmp_path)
    (tmp_path / "out").mkdir()
    failure = Failure(1, "KeyError: 'labels': not there", "error")
    meet(trainer, failure, {4: {"loss": 1.0}})
    report = read_report(tmp_path / "out")
    assert (report["error_type"], report["error"]) == ("KeyError", "'labels': not there")
    assert report["last_steps"] == [{"step": 4, "loss": 1.0}] and report["traceback"] is None


# -- secrets and commands --------------------------------------------------------------------------


def test_secrets_are_found_by_their_names_and_hidden_wherever_they_stand(tmp_path, monkeypatch):
    config = {
        "callbacks": [{"api_key": "sk-123456"}],
        "webhooks": {"a": ["hook-123"]},
        "x": "yyyyyy",
    }
    assert set(find_secrets(config)) == {"sk-123456", "hook-123"}
    assert set(find_secrets({"api_key": "no", "pad_token": "[PADDING]"})) == set()
    assert hide_secrets("a sk-123456-7 b", ["sk-123456", "sk-123456-7"]) == "a <redacted> b"
    monkeypatch.setenv("SOME_TOKEN", "the-token-itself")
    fail(tmp_path, 3, RuntimeError("POST https://me:pw99@host/x with the-token-itself failed"))
    for name in NAMES:
        text = (tmp_path / "out" / name).read_text()
        assert "<redacted>" in text and "the-token-itself" not in text and "pw99" not in text


RUN = ["headway", "train", "run.yaml"]


@pytest.mark.parametrize(
    ("command", "by_itself", "expected"),
    [
        (RUN, True, RUN),
        ([*RUN, "--no-resume", "--args.seed=1"], True, [*RUN, "--args.seed=1"]),
        ([*RUN, "--resume", "old", "--json"], True, [*RUN, "--json"]),
        ([*RUN, "--resume=old"], True, RUN),
        (RUN, False, [*RUN, "--resume", "ckpt"]),
        (["torchrun", "-m", *RUN, "--no-resume"], True, ["torchrun", "-m", *RUN]),
        (["python", "train.py", "--resume", "x"], False, ["python", "train.py", "--resume", "x"]),
        (["headway", "demo", "--resume", "x"], False, ["headway", "demo", "--resume", "x"]),
    ],
)
def test_the_command_that_goes_on(command, by_itself, expected):
    assert continue_command(command, "ckpt", by_itself=by_itself) == expected


def test_the_command_is_that_of_the_user(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr("sys.argv", ["/venv/bin/headway", "train", "run.yaml"])
    assert find_command() == RUN
    monkeypatch.setattr("sys.argv", ["train.py", "--x"])
    monkeypatch.setattr("sys.orig_argv", ["/usr/bin/python3", "-X", "dev", "train.py", "--x"])
    assert find_command() == ["python3", "-X", "dev", "train.py", "--x"]
    monkeypatch.setattr("sys.orig_argv", ["/usr/bin/python3", "-c", "..."])
    assert find_command() is None
    monkeypatch.setenv("HEADWAY_LAUNCH_DIR", str(tmp_path))
    (tmp_path / "command.json").write_text(json.dumps([*RUN, "--nproc", "2"]))
    assert find_command() == [*RUN, "--nproc", "2"]


def test_reading_one_needs_no_torch():
    assert_no_import("import headway.engine.post_mortem, headway.dist.command")


# A run that dies without a word


def test_a_run_notes_its_process_and_takes_the_note_away(tmp_path):
    seen = []

    class Looks(TrainerCallback):
        def on_step_end(self):
            seen.append(read_note(tmp_path / "out"))

    tiny_trainer(tmp_path, [Looks()], max_steps=2).train()
    assert seen[0] is None, "a run that has not worked yet changes nothing on disk"
    note = seen[1]
    assert note["pid"] == os.getpid() and look_at_process(note) == "running"
    assert note["directory"] == os.getcwd() and note["world_size"] == 1
    assert read_note(tmp_path / "out") is None


def test_the_note_goes_also_when_the_run_fails(tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, state):
            if state.global_step == 2:
                assert read_note(tmp_path / "out") is not None
                raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        tiny_trainer(tmp_path, [Fails()], max_steps=3).train()
    assert read_note(tmp_path / "out") is None


def leave_note(folder):
    """That of a run that was killed, and of whose death nobody took note; returns its process."""
    text = (
        "import os, sys; from headway.engine.process_note import write_note;"
        "write_note(sys.argv[1], command=None, resumes=False); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.Popen([sys.executable, "-c", text, str(folder)])
    assert killed.wait(60) == -9
    return killed.pid


@pytest.mark.parametrize("told", [False, True])
def test_the_next_run_says_that_the_one_before_died_without_a_word(tmp_path, caplog, told):
    leave_note(tmp_path / "out")
    if told:  # by another rank, or the launcher
        write_report(tmp_path / "out", by_launcher(), since=0)
    tiny_trainer(tmp_path, max_steps=2).train()
    assert ("the run that was here before died without a word" in caplog.text) == (not told)
    assert read_note(tmp_path / "out") is None


def shown_state(folder):
    """What the dashboard says of a run once it has read the log."""
    run = Run("a", "a", folder)
    run.catch_up(time.monotonic() + 60)
    return run.state(time.time())


class LooksEarly(TrainerCallback):
    """What the dashboard shows of a run from its first moment on."""

    def __init__(self, folder, error=None):
        self.folder, self.error, self.seen = folder, error, []

    def on_init_end(self):
        self.seen.append((read_note(self.folder), shown_state(self.folder)))
        if self.error is not None:
            raise self.error


def test_a_run_in_the_place_of_a_killed_one_is_not_lost_while_it_starts(tmp_path):
    leave_note(tmp_path / "out")
    assert shown_state(tmp_path / "out") == "lost"
    looks = LooksEarly(tmp_path / "out")
    tiny_trainer(tmp_path, [looks], max_steps=2).train()
    ((note, state),) = looks.seen
    assert note["pid"] == os.getpid() and state == "running"
    assert read_note(tmp_path / "out") is None


def test_a_run_that_cannot_start_leaves_the_note_of_the_one_before(tmp_path):
    leave_note(tmp_path / "out")
    path = tmp_path / "out" / "run" / "process.json"
    before = path.read_bytes()
    with pytest.raises(ValueError, match="no"):
        tiny_trainer(tmp_path, [LooksEarly(tmp_path / "out", ValueError("no"))]).train()
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_a_run_that_fails_has_a_note_until_it_has_a_report(tmp_path, monkeypatch):
    """Killed at any moment of its end it leaves one of them."""
    noted = []

    def write(*given, **more):
        noted.append(read_note(tmp_path / "out"))
        return write_report(*given, **more)

    monkeypatch.setattr(examination_module, "write_report", write)
    fail(tmp_path, 3, RuntimeError("broken"))
    assert noted[0]["pid"] == os.getpid()
    assert left(tmp_path) == NAMES and read_note(tmp_path / "out") is None


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o027, 0o640), (0o022, 0o644)])
def test_a_note_is_as_private_as_the_user_s_other_files(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_note(tmp_path, command=["headway", "train"], resumes=False)
    finally:
        os.umask(before)
    (path,) = (tmp_path / "run").iterdir()
    assert path.name == "process.json" and stat.S_IMODE(path.stat().st_mode) == mode
