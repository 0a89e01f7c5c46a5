"""`headway batch-find`: real processes, a real limit on memory, real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headway.cli import batch_trial
from headway.cli.batch_trial import TrialPlan
from headway.cli.main import main
from headway.cli.messages import spell_bytes
from headway.trainers.batch_find import Trial

MIB = 2**20
RUN = """\
# a hungry run
model: {class_path: batch_parts.Hungry}
data:
  train:
    class_path: batch_parts.Data
args:
  output_dir: out  # never made
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 6  # 12 samples a step
  max_steps: 10
  seed: 3
  use_cpu: true
"""
# Of every sample four tensors of 64 MiB are held at the peak, in the backward: two results of the
# forward, which it needs, and two gradients; and a fifth while one of them is made.
PARTS = """\
import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader


class Hungry(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, input_ids, labels=None):
        big = torch.ones(input_ids.shape[0], 16 * 2**20) * self.scale
        return {"loss": (big * big).mean() + 1.0}


class Dying(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, input_ids, labels=None):
        if input_ids.shape[0] > 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"loss": self.scale.square().sum()}


class Broken(Dying):
    def forward(self, input_ids, labels=None):
        raise ArithmeticError("not about memory")


class Data:
    # Longer ones are rare: the third of ten is the only one of 8 tokens.
    def __len__(self):
        return 10

    def __getitem__(self, number):
        ids = list(range(8 if number == 2 else 1))
        return {"input_ids": ids, "labels": ids}


def Batches():
    return DataLoader(Data(), batch_size=2)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "batch_parts", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "batch_parts.py").write_text(PARTS)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def find(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "headway", "batch-find", "run.yaml", *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=400)


@pytest.mark.timeout(420)
def test_the_largest_that_a_limit_allows_is_found_and_applied(folder: Path) -> None:
    done = find(folder, "--memory-limit", "1500MiB", "--json", "--apply")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    tried = {trial["size"]: trial for trial in facts["trials"]}
    assert [size for size, trial in tried.items() if trial["fits"]] == [2, 3]
    assert tried[4]["reason"] == "out of memory" and facts["largest"] == 3
    # Each sample takes so much: known from the model.
    grown = tried[3]["peak_bytes"] - tried[2]["peak_bytes"]
    assert 4 * 64 * MIB * 0.9 < grown < 5 * 64 * MIB * 1.1
    # The longest samples are tried, and two micro-batches of each step.
    assert facts["per_device_train_batch_size"] == 3 and facts["gradient_accumulation_steps"] == 4
    assert all(tried[size]["tokens_per_s"] > 0 for size in (2, 3))
    edited = RUN.replace("train_batch_size: 2", "train_batch_size: 3")
    assert (folder / "run.yaml").read_text() == edited.replace("steps: 6", "steps: 4")
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == [
        "batch_parts.py",
        "run.yaml",
    ]


@pytest.mark.timeout(420)
@pytest.mark.slow
def test_a_trial_that_is_killed_does_not_kill_the_search(folder: Path) -> None:
    """Also: what does not divide a step is said."""
    done = find(folder, "--model=batch_parts.Dying", "--max-batch", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.split() == ["3", "per", "device", "ended", "by", "SIGKILL"] for line in lines)
    assert any("largest" in line and line.endswith(" 2") for line in lines)
    assert "per_device_train_batch_size=2, gradient_accumulation_steps=6" in done.stdout
    assert "a step stays at 12 samples" in done.stdout
    assert (folder / "run.yaml").read_text() == RUN and not (folder / "out").exists()


@pytest.mark.timeout(420)
def test_an_error_that_is_not_about_memory_is_shown(folder: Path) -> None:
    done = find(folder, "--model=batch_parts.Broken")
    assert done.returncode == 1
    assert "ArithmeticError: not about memory" in done.stderr
    assert "error: a trial with 2 samples per device failed" in done.stderr


@pytest.mark.timeout(420)
def test_not_even_one_sample(folder: Path) -> None:
    words = ["--args.per_device_train_batch_size=1", "--memory-limit", "500MiB", "--json"]
    done = find(folder, *words)
    assert done.returncode == 1
    assert json.loads(done.stdout)["largest"] is None
    told = "not even 1 sample per device can train with 500.0 MiB a rank (--memory-limit)"
    assert f"error: {told}: out of memory" in done.stderr


def test_a_limit_that_leaves_no_room_for_a_model(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = folder / "trial"
    trial.mkdir()
    words = ["--trial", str(trial), "--trial-size", "1", "--trial-accumulation", "1"]
    assert main(["batch-find", "run.yaml", "--memory-limit", "64MiB", *words]) == 1
    # It says so before anything is built, however little room there is.
    assert capsys.readouterr().err == "" and [p.name for p in trial.iterdir()] == ["no-room-0"]
    told = int((trial / "no-room-0").read_text())
    assert told > 64 * MIB

    def answer(command: list[str], output: Path) -> int:
        (output.parent / "no-room-0").write_text(str(told))
        return 1

    monkeypatch.setattr(batch_trial, "_run", answer)
    assert main(["batch-find", "run.yaml", "--memory-limit", "64MiB"]) == 1
    taken = f"and takes {spell_bytes(told)} before it builds the model"
    limit = "a rank may take 64.0 MiB (--memory-limit)"
    told_too = capsys.readouterr()
    assert told_too.err == f"error: not even 1 sample per device can train: {limit}, {taken}\n"


def test_what_must_not_be_accumulated_is_one_batch_or_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update in the backward needs the whole gradient: 2 per device do not make a step of 3."""
    accumulations = []

    def answer(plan: TrialPlan, size: int, *, must_work: bool) -> Trial:
        accumulations.append(plan.accumulation_of(size))
        return Trial(size, size <= most, 1.0, MIB, None if size <= most else "out of memory")

    monkeypatch.setattr(TrialPlan, "run", answer)
    words = ["--args.fuse_optim_with_backward=true", "--args.max_grad_norm=0", "--max-batch", "3"]
    words += ["--args.gradient_accumulation_steps=1", "--args.per_device_train_batch_size=3"]
    most = 3
    assert main(["batch-find", "run.yaml", *words]) == 0
    use = "per_device_train_batch_size=3, gradient_accumulation_steps=1 (a step stays at 3"
    assert use in capsys.readouterr().out
    most = 2
    assert main(["batch-find", "run.yaml", *words, "--apply"]) == 1
    told = capsys.readouterr()
    assert "only 3 per device keep the 3 samples of a step, and 2 is the most that" in told.out
    assert "but fuse_optim_with_backward cannot be used with gradient_accum" in told.out
    assert "error: --apply: nothing is written" in told.err
    assert set(accumulations) == {1} and (folder / "run.yaml").read_text() == RUN


@pytest.mark.timeout(420)
@pytest.mark.slow
def test_two_ranks_of_which_each_has_the_limit(folder: Path) -> None:
    words = ["--trainer=ddp", "--nproc", "2", "--memory-limit", "1200MiB", "--max-batch", "3"]
    done = find(folder, *words, "--args.gradient_accumulation_steps=4", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    tried = {trial["size"]: trial for trial in facts["trials"]}
    assert tried[2]["fits"] and not tried[3]["fits"]
    assert tried[3]["reason"] == "out of memory"
    assert facts["global_batch"] == 2 * 4 * 2
    assert facts["per_device_train_batch_size"] == 2
    assert facts["gradient_accumulation_steps"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory-limit", "plenty"], "--memory-limit: 'plenty' given; allowed: a size such as"),
        (["--memory-limit", "3MiB"], "--memory-limit: '3MiB' given (3,145,728 bytes); allowed"),
        (["--max-batch", "0"], "--max-batch: 0 given; allowed: 1 and up"),
        (["--steps", "1"], "--steps: 1 given; allowed: 2 and up"),
        (["--nproc", "2"], "trainer is 'single'"),
        (["--nproc", "0"], "--nproc: 0 given"),
        (["--nproc", "2", "--nnodes", "3"], "batch-find runs on one machine"),
        (["--stpes", "3"], "did you mean --steps?"),
        (["--data.train=batch_parts.Batches"], "makes its own batches"),
        (["--args.max_step=3"], "did you mean 'max_steps'?"),
    ],
)
def test_mistakes(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch-find", "run.yaml", *words]) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told
    assert (folder / "run.yaml").read_text() == RUN and not (folder / "out").exists()


@pytest.mark.slow
def test_a_mistake_that_only_a_trial_finds_is_told_like_any_other(folder: Path) -> None:
    given = "{num_samples: 8, sequence_length: 4, vocab_size: 8}"
    data = f"{{class_path: SyntheticDataset, init_args: {given}}}"
    model = "{vocab_size: 8, hidden_size: 8, num_layers: 1, num_heads: 1, max_seq_len: 2}"
    done = find(folder, f"--model={model}", f"--data.train={data}")
    assert done.returncode == 2
    assert "\nerror: data.train: the data has sequences of 4 tokens" in done.stderr
    assert "Traceback" not in done.stderr
