"""`headway train --nproc`: one command answers for its ranks, however they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import HOLD, PROGRAM, TRAIN, checkpoints, errors, losses, started, wait_for

from headway.cli.main import main
from headway.dist.processes import ProcessIdentity, identify, look_at

RUN = """\
model: {vocab_size: 258, hidden_size: 16, num_layers: 1, num_heads: 2, max_seq_len: 32}
trainer: ddp
data:
  train:
    class_path: SyntheticDataset
    init_args: {num_samples: 100000, sequence_length: 16, vocab_size: 258}
callbacks: [deeds.Note]
args: {output_dir: out, seed: 1, use_cpu: true, max_steps: 8, logging_steps: 1,
       lr_scheduler_type: constant, save_steps: 3, per_device_train_batch_size: 2}
"""

# What the promise is (10 s), and 5 s for a busy machine to schedule the processes at all.
LIMIT_S = 15.0

# Every rank notes its process; one of them does something at a step.
DEEDS = (
    HOLD
    + """
import signal, time
from headway import TrainerCallback
from headway.errors import ConfigError

RANK = os.environ.get("RANK")  # the launcher looks at this module as well
FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"

class Note(TrainerCallback):
    def on_train_begin(self):
        with open("pids", "a") as file:
            file.write(f"{os.getpid()}\\n")

class Hold(TrainerCallback):
    def on_step_end(self, state):
        if state.global_step == 2 and RANK == "0":
            hold()

class HoldTwice(TrainerCallback):
    def on_step_end(self, state):
        if state.global_step in (2, 4) and RANK == "0":
            hold()

class _Deed(TrainerCallback):
    def on_step_end(self, state):
        if state.global_step == 5 and RANK == "1" and FIRST:
            open("acted", "w").close()
            self.act()

class Kill(_Deed):
    def act(self):
        os.kill(os.getpid(), signal.SIGKILL)

class KillWhenSaved(_Deed):
    def act(self):
        while not os.path.exists("second/checkpoint-3"):
            time.sleep(0.01)  # it is written in the background
        os.kill(os.getpid(), signal.SIGKILL)

class Stop(_Deed):
    def act(self):
        os.kill(os.getpid(), signal.SIGSTOP)

class Break(_Deed):
    def act(self):
        raise ValueError("the fifth step is wrong")

class Mistake(_Deed):
    def act(self):
        raise ConfigError("my_option: bad on this rank")

class Linger(_Deed):
    def act(self):
        time.sleep(20)

class Misplace(_Deed):
    def act(self):
        open("only/elsewhere.bin")

class _Aborts:
    def __del__(self, abort=os.abort):
        abort()

# Something aborts when the interpreter is taken down, as libraries may; a thread has work left.
class EndBadly(TrainerCallback):
    def on_train_end(self):
        import atexit, threading
        global kept
        kept = _Aborts()
        def work():
            time.sleep(0.5)
            open(f"worked-{RANK}", "w").close()
        threading.Thread(target=work).start()
        atexit.register(lambda: open(f"ended-{RANK}", "w").close())
"""
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "deeds.py").write_text(DEEDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*words: str, environ: dict[str, str] | None = None) -> tuple[int, str, str]:
    with started(*TRAIN, *words, environ=environ) as process:
        out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def ranks_of(folder: Path) -> list[ProcessIdentity]:
    return [identify(int(pid)) for pid in (folder / "pids").read_text().split()]


def wait_until_gone(ranks: list[ProcessIdentity], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while left := [rank for rank in ranks if rank.started and look_at(rank) != "gone"]:
        if time.monotonic() > deadline:
            for rank in left:
                os.kill(rank.pid, signal.SIGKILL)
            raise AssertionError(f"ranks were left behind: {left}")
        time.sleep(0.05)


def test_ranks_train_together_and_one_of_them_reports(folder: Path) -> None:
    code, out, err = train("--nproc", "2", "--json")
    assert code == 0, err
    assert json.loads(out)["steps"] == 8, "one report"
    assert f"running: {sys.executable} -m headway.cli.torchrun --nproc-per-node 2" in err
    assert "-m headway train run.yaml --json" in err
    assert err.count("step 8/8") == 1
    assert len(ranks_of(folder)) == 2
    assert "Traceback" not in err


def test_ranks_wait_for_each_other_as_long_as_ddp_timeout_says(folder: Path) -> None:
    words = ("--callbacks=[deeds.Note,deeds.Linger]", "--args.ddp_timeout=2")
    code, _, err = train("--nproc=2", *words)
    assert code == 1
    assert "(ranks wait 2 s for each other; ddp_timeout sets it)" in err, err


def test_a_killed_rank_is_started_again_and_the_losses_are_those_of_an_undisturbed_run(
    folder: Path,
) -> None:
    code, _, err = train("--nproc", "2")
    assert code == 0, err
    undisturbed = losses(folder / "out")
    assert sorted(undisturbed) == list(range(1, 9))
    words = ("--nproc", "2", "--max-restarts", "1", "--callbacks=[deeds.KillWhenSaved]")
    # Afresh the first time; a restart goes on all the same.
    code, out, err = train(*words, "--no-resume", "--args.output_dir=second")
    assert code == 0, err
    assert "was lost: its process is gone: killed" in err, err
    assert "resuming from" in err and "second/checkpoint-3" in err, err
    assert losses(folder / "second") == undisturbed
    assert "trained 8 steps" in out


@pytest.mark.parametrize(
    ("deed", "told"),
    [
        (
            "Break",
            "rank 1 of 2 failed: ValueError: callback 'Break', on_step_end: the fifth step is",
        ),
        ("Kill", "rank 1 of 2 was lost: its process is gone: killed"),
        ("Stop", "rank 1 of 2 was lost: it is stopped (SIGSTOP)"),
    ],
)
def test_a_rank_that_fails_is_named_first_and_last_and_nothing_is_left(
    deed: str, told: str, folder: Path
) -> None:
    words = ("--nproc=2", f"--callbacks=[deeds.Note,deeds.{deed}]", "--args.save_strategy=no")
    code, _, err = train(*words, environ={"HEADWAY_FROZEN_AFTER_S": "3"})
    took_s = time.time() - (folder / "acted").stat().st_mtime
    assert code == 1, err
    assert [line.startswith(f"error: {told}") for line in errors(err)] == [True, True], err
    assert err.splitlines()[-1].startswith(f"error: {told}")
    # torchrun by itself would wait half a minute for a rank that does not react.
    assert took_s < LIMIT_S + (3 if deed == "Stop" else 0), err
    assert err.count("in act\n") == (1 if deed == "Break" else 0), "one traceback of a rank"
    wait_until_gone(ranks_of(folder), 5)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_stops_and_is_no_reason_to_restart(
    number: signal.Signals, code: int, folder: Path
) -> None:
    os.mkfifo(folder / "gate")
    words = ("--nproc", "2", "--max-restarts", "2", "--callbacks=[deeds.Note,deeds.HoldTwice]")
    with started(*TRAIN, *words) as process:
        wait_for(process, "holding")
        process.send_signal(signal.SIGUSR1)
        wait_for(process, "SIGUSR1: saving")
        (folder / "gate").write_text("open")
        wait_for(process, "holding")
        process.send_signal(number)
        wait_for(process, "Once more stops at once")
        (folder / "gate").write_text("open")
        out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    saved = checkpoints(folder)
    assert saved[-1] < 8, "it did not run to its end"
    assert f"stopped at step {saved[-1]} by {number.name}" in out
    assert "go on with: headway train run.yaml --nproc 2 --max-restarts 2" in out
    assert "Traceback" not in err and len(ranks_of(folder)) == 2


def test_sigusr1_saves_and_goes_on(folder: Path) -> None:
    os.mkfifo(folder / "gate")
    words = ("--nproc", "2", "--callbacks=[deeds.Note,deeds.Hold]", "--args.save_steps=100")
    with started(*TRAIN, *words, "--args.save_total_limit=null") as process:
        wait_for(process, "holding")
        process.send_signal(signal.SIGUSR1)
        wait_for(process, "SIGUSR1: saving")
        (folder / "gate").write_text("open")
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    first, last = checkpoints(folder)
    assert first in (2, 3) and last == 8


def test_under_nohup_a_terminal_that_is_closed_ends_nothing(folder: Path) -> None:
    os.mkfifo(folder / "gate")
    words = ("--nproc", "2", "--callbacks=[deeds.Note,deeds.Hold]", "--args.save_steps=100")
    with started("nohup", *TRAIN, *words) as process:
        wait_for(process, "holding")
        process.send_signal(signal.SIGHUP)
        (folder / "gate").write_text("open")
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "stopped" not in out and checkpoints(folder) == [8]


def test_the_second_signal_ends_everything_at_once(folder: Path) -> None:
    os.mkfifo(folder / "gate")
    with started(*TRAIN, "--nproc", "2", "--callbacks=[deeds.Note,deeds.Hold]") as process:
        wait_for(process, "holding")
        ranks = ranks_of(folder)
        process.send_signal(signal.SIGINT)
        wait_for(process, "Once more stops at once")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    wait_until_gone(ranks, 5)
    assert checkpoints(folder) == []


def test_ranks_do_not_outlive_their_launcher(folder: Path) -> None:
    os.mkfifo(folder / "gate")
    endless = ("--args.max_steps=1000000", "--args.save_steps=1000000", "--args.logging_steps=9999")
    with started(*TRAIN, "--nproc=2", "--callbacks=[deeds.Note,deeds.Hold]", *endless) as process:
        wait_for(process, "holding")
        ranks = ranks_of(folder)
        process.kill()
        (folder / "gate").write_text("open")
        wait_until_gone(ranks, 60)
    assert checkpoints(folder), "torchrun passed the end on as SIGTERM, and they saved"


MISTAKES = {
    # what is given in addition: what is said, once
    "--args.learning_rat=1": "args.learning_rat",
    "--trainer=single": "--nproc: 2 given (2 ranks), but trainer is 'single'",
}


@pytest.mark.parametrize("word", MISTAKES)
def test_a_mistake_is_found_before_anything_is_started(
    word: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "run.yaml", "--nproc", "2", word]) == 2
    err = capsys.readouterr().err
    assert len(errors(err)) == 1 and MISTAKES[word] in err
    assert "running:" not in err


def test_a_mistake_that_only_ranks_find_is_told_once(folder: Path) -> None:
    code, _, err = train(
        "--nproc", "2", "--max-restarts", "2", "--data.train.init_args.vocab_size=999"
    )
    assert code == 2, err
    assert len(errors(err)) == 1 and "Traceback" not in err, err


@pytest.mark.parametrize(
    ("deed", "told"),
    [
        ("Mistake", "callback 'Mistake', on_step_end: my_option: bad on this rank"),
        (
            "Misplace",
            "only/elsewhere.bin: callback 'Misplace', on_step_end: No such file or directory",
        ),
    ],
)
def test_a_mistake_of_one_rank_is_told_once_and_ends_all_without_a_restart(
    deed: str, told: str, folder: Path
) -> None:
    code, _, err = train("--nproc=2", "--max-restarts=2", f"--callbacks=[deeds.{deed}]")
    assert code == 2, err
    (line,) = errors(err)
    assert line.startswith(f"error: {told}")
    assert "Traceback" not in err, err
    assert err.count("step 1/8") == 1, "nothing was started again"


def under_torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "headway", "train", "run.yaml", *words],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def test_torchrun_itself_works_and_a_mistake_is_told_once(folder: Path) -> None:
    done = under_torchrun("--args.max_steps=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained 2 steps") == 1 and checkpoints(folder) == [2]
    refused = under_torchrun("--args.learning_rat=1")
    assert refused.returncode == 1
    assert len(errors(refused.stderr)) == 1, refused.stderr
    assert "args.learning_rat" in errors(refused.stderr)[0]


def test_doctor_measures_the_way_between_ranks(folder: Path) -> None:
    done = subprocess.run(
        [PROGRAM, "doctor", "--nproc", "2", "--cpu", "--json"],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)["ranks"]
    assert facts["backend"] == "gloo" and facts["nproc"] == 2
    assert [member["device"] for member in facts["members"]] == ["cpu", "cpu"]
    assert 0 < facts["rendezvous_s"] < facts["start_s"]
    assert facts["bandwidth_bytes_per_s"] > 1e6 and 0 < facts["latency_s"] < 1


def test_doctor_says_why_ranks_do_not_come_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADWAY_FROZEN_AFTER_S", "soon")
    assert main(["doctor", "--nproc", "2", "--cpu"]) == 1
    out = capfd.readouterr().out
    assert "problem: 2 ranks did not come together: HEADWAY_FROZEN_AFTER_S: 'soon'" in out
    assert "ready to train" not in out


def test_a_run_that_is_done_ends_well_whatever_libraries_do_at_their_end(folder: Path) -> None:
    done = under_torchrun("--callbacks=[deeds.EndBadly]")
    assert done.returncode == 0, done.stderr
    assert 8 in checkpoints(folder)
    # What a program leaves for its end is done all the same.
    left = {path.name for path in folder.glob("*ed-*")}
    assert left == {"worked-0", "worked-1", "ended-0", "ended-1"}
