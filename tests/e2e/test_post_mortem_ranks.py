"""What a run leaves that failed, as real ranks under the launcher fail."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import TRAIN, errors, started

from headway.checkpoint.manifest import committed
from headway.cli.main import main
from headway.control.dashboard.run import Run
from headway.control.lost_run import examine
from headway.engine.process_note import look_at_process, read_note

RUN = """\
model: {vocab_size: 258, hidden_size: 16, num_layers: 1, num_heads: 2, max_seq_len: 32}
trainer: ddp
data:
  train:
    class_path: SyntheticDataset
    init_args: {num_samples: 100000, sequence_length: 16, vocab_size: 258}
args: {output_dir: out, seed: 1, use_cpu: true, max_steps: 8, logging_steps: 1,
       lr_scheduler_type: constant, save_steps: 3, per_device_train_batch_size: 2}
"""

DEEDS = """\
import os, signal, time
from headway import TrainerCallback

RANK = os.environ.get("RANK", "0")

class _Deed(TrainerCallback):
    rank, step = "1", 5
    def on_step_end(self, state):
        if state.global_step == self.step and RANK == self.rank and not os.path.exists("mended"):
            while not os.path.exists("out/checkpoint-3/checkpoint_manifest.json"):
                time.sleep(0.01)  # it is written in the background
            self.act()

class Break(_Deed):
    def act(self):
        secrets = "https://ada:geheim@host/ " + os.environ["MY_API_KEY"]
        raise ValueError("the fifth step is wrong: " + secrets)

class Kill(_Deed):
    def act(self):
        os.kill(os.getpid(), signal.SIGKILL)

class KillFirst(Kill):
    rank = "0"

"""
SECRET = "a-very-secret-key"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "late_deeds.py").write_text(DEEDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*words: str) -> tuple[int, str]:
    with started(*TRAIN, *words, environ={"MY_API_KEY": SECRET}) as process:
        _, err = process.communicate(timeout=240)
    return process.returncode, err


def post_mortem(folder: Path) -> tuple[dict, str]:
    report = json.loads((folder / "out/post_mortem.json").read_text())
    assert not [path for path in (folder / "out").iterdir() if path.name.startswith(".post")]
    return report, (folder / "out/post_mortem.txt").read_text()


def test_a_rank_that_raises_and_how_the_run_is_mended(folder: Path, capsys) -> None:
    code, err = train("--nproc", "2", "--callbacks=[late_deeds.Break]", "--no-resume")
    assert code == 1, err
    report, text = post_mortem(folder)
    assert (report["culprit_rank"], report["world_size"], report["step"]) == (1, 2, 5)
    assert report["error_type"] == "ValueError" and "the fifth step is wrong" in report["error"]
    assert 'in act\n    raise ValueError("the fifth' in report["traceback"]
    assert report["reported_by"] == "rank 1" and report["signal"] is None
    assert [step["step"] for step in report["last_steps"]][-1] == 5
    assert report["last_steps"][-1]["train/CE loss"] > 0
    assert report["memory"]["host"]["rss_bytes"] > 2**20
    assert report["checkpoint"]["step"] == 3
    assert Path(report["checkpoint"]["path"]).resolve() == folder / "out/checkpoint-3"
    assert report["version"] and report["versions"]["torch"]
    for secret in (SECRET, "geheim"):
        assert secret not in text and secret not in json.dumps(report)
    assert text.startswith("rank 1 of 2 failed: ValueError:") and report["resume_command"] in text
    assert f"what is known of the failure is in {Path('out/post_mortem.txt')}" in err

    assert main(["report", "out"]) == 0
    capsys.readouterr()
    page = (folder / "out/report.html").read_text()
    assert "Post-mortem" in page and "the fifth step is wrong" in page and "--nproc 2" in page

    # What it says goes on from the checkpoint; a run that completes has nothing to explain.
    words = shlex.split(report["resume_command"])
    assert words[:5] == ["headway", "train", "run.yaml", "--nproc", "2"]
    assert "--no-resume" not in words
    (folder / "mended").touch()
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", report["resume_command"]],
        cwd=report["directory"],
        env={**os.environ, "PATH": programs},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0 and "out/checkpoint-3" in done.stderr, done.stderr
    assert not list((folder / "out").glob("post_mortem*"))


@pytest.mark.parametrize(
    ("deed", "culprit"), [("Kill", 1), pytest.param("KillFirst", 0, marks=pytest.mark.slow)]
)
def test_a_rank_that_is_killed(folder: Path, deed: str, culprit: int) -> None:
    code, err = train("--nproc", "2", f"--callbacks=[late_deeds.{deed}]")
    assert code == 1, err
    report, text = post_mortem(folder)
    assert (report["culprit_rank"], report["signal"]) == (culprit, "SIGKILL"), report
    assert report["reported_by"] == f"rank {1 - culprit} and the launcher"
    assert report["error_type"] == "lost" and report["traceback"] is None
    assert report["step"] in (4, 5) and report["last_steps"]
    assert report["checkpoint"]["step"] == 3
    assert text.startswith(f"rank {culprit} of 2 was ended by SIGKILL: somebody killed it")
    # The last line still says which rank it was.
    assert errors(err)[-1] == err.splitlines()[-1]


@pytest.mark.slow
def test_a_lone_rank_that_is_killed_is_reported_by_the_launcher(folder: Path) -> None:
    code, err = train("--nproc", "1", "--callbacks=[late_deeds.KillFirst]")
    assert code == 1, err
    report, _ = post_mortem(folder)
    assert (report["culprit_rank"], report["signal"]) == (0, "SIGKILL")
    assert report["reported_by"] == "the launcher" and report["world_size"] == 1
    # From the log: a step is logged once the next one is computed.
    assert report["step"] in (3, 4, 5) and report["last_steps"][-1]["loss"] > 0
    assert (
        report["resume_command"]
        == "headway train run.yaml --nproc 1 '--callbacks=[late_deeds.KillFirst]'"
    )


def descendants(pid: int) -> list[int]:
    """The processes below one, the nearest first."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    found, level = [], {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        found += sorted(level)
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("everything", [False, True])
def test_a_launcher_that_is_killed(folder: Path, everything: bool) -> None:
    long = ("--args.max_steps=1000000", "--args.save_steps=50", "--args.logging_steps=10")
    with started(*TRAIN, "--nproc", "2", *long, ask=False) as launcher:
        while not list(folder.glob("out/checkpoint-*/checkpoint_manifest.json")):
            assert launcher.poll() is None
            time.sleep(0.1)
        note = read_note(folder / "out")
        below = descendants(launcher.pid)
        assert note is not None and note["pid"] in below
        if everything:
            launcher.send_signal(signal.SIGSTOP)
            for pid in below:
                os.kill(pid, signal.SIGKILL)
        launcher.kill()
        launcher.wait(60)
        deadline = time.monotonic() + 100
        while look_at_process(note) != "gone":
            assert time.monotonic() < deadline
            time.sleep(0.1)
    run = Run("one", "one", folder / "out")
    run.catch_up(time.monotonic() + 60)
    if not everything:  # the ranks heard of it, saved and stopped
        assert run.state(time.time()) == "stopped" and read_note(folder / "out") is None
        steps = [c.step for c in committed(folder / "out")]
        assert steps[-1] == run.last["global_step"]
        return
    assert run.state(time.time()) == "lost"
    report = examine(run)
    assert report["checkpoint"]["step"] >= 50 and report["last_steps"][-1]["loss"] > 0
    assert report["resume_command"] == shlex.join(["headway", *TRAIN[1:], "--nproc", "2", *long])
    assert not list(folder.glob("out/post_mortem*"))
