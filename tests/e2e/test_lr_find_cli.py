"""`headway lr-find`: what it prints, writes, applies and refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main

RUN = """\
# a small run
model: {vocab_size: 64, hidden_size: 16, num_layers: 1, num_heads: 2}
data:
  train:
    class_path: lrfind_parts.Cycle
args:
  output_dir: out        # never made
  learning_rate: 1.0e-5  # far too low
  per_device_train_batch_size: 4
  max_steps: 10
  seed: 3
  use_cpu: true
"""
PARTS = """\
import torch
from torch import nn

from headway.testing import tiny_dataset


def Cycle():
    return tiny_dataset(64, sequence_length=8, vocab_size=64)


class Stubborn(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, input_ids, labels):
        return {"loss": 3.0 + 0 * self.weight.sum()}


def Loader():
    return iter(Cycle())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "lrfind_parts", raising=False)
    (tmp_path / "lrfind_parts.py").write_text(PARTS)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def find(*words: str) -> int:
    return main(["lr-find", "run.yaml", "--num-iterations", "40", *words])


def test_it_prints_the_suggestions_and_applies_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find("--seeds", "2", "--apply", "--output", "deep/found.json") == 0
    told = capsys.readouterr().out
    facts = json.loads((folder / "deep/found.json").read_text())
    assert f"suggestion  {facts['suggested_lr']:.2e}" in told
    for name, (low, high) in facts["spread"].items():
        assert f"{name}" in told and f"({low:.2e} to {high:.2e} over 2 seeds)" in told
    applied = float(f"{facts['suggested_lr']:.2e}")
    assert 1e-4 < applied < 1
    assert (folder / "run.yaml").read_text() == RUN.replace("1.0e-5", repr(applied))
    assert f"applied: args.learning_rate = {applied:.2e} in run.yaml" in told
    assert not (folder / "out").exists()
    assert main(["check", "run.yaml", "--json"]) == 0


def test_json_and_pictures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find("--seeds", "1", "--json", "--output", "found.html") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["applied"] is None and len(facts["lrs"]) == len(facts["losses"])
    assert "suggested learning rate" in (folder / "found.html").read_text()
    assert (folder / "run.yaml").read_text() == RUN


def test_the_rate_of_another_optimizer_is_applied_where_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    added = "optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.001, momentum: 0.9}}\n"
    (folder / "run.yaml").write_text(RUN + added)
    assert find("--seeds", "1", "--apply", "--end-lr", "100", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["applied"] == "optimizer.init_args.lr"
    rate = float(f"{facts['suggested_lr']:.2e}")
    assert facts["applied_values"] == {"optimizer.init_args.lr": rate}
    assert (folder / "run.yaml").read_text() == RUN + added.replace("0.001", repr(rate))


def test_both_rates_of_muon_are_applied_in_their_proportion(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    added = "  optim: muon\n  optim_args: {adamw_lr: 2.0e-6}  # a fifth\n"
    (folder / "run.yaml").write_text(RUN + added)
    assert find("--seeds", "1", "--apply", "--output", "found.json") == 0
    told = capsys.readouterr().out
    rate = json.loads((folder / "found.json").read_text())["suggested_lr"]
    both = [float(f"{rate:.2e}"), float(f"{rate * 0.2:.2e}")]
    changed = added.replace("2.0e-6", repr(both[1]))
    assert (folder / "run.yaml").read_text() == RUN.replace("1.0e-5", repr(both[0])) + changed
    assert f"applied: args.learning_rate = {both[0]:.2e} in run.yaml" in told
    assert f"applied: args.optim_args.adamw_lr = {both[1]:.2e} in run.yaml" in told
    assert f"{both[1]:.2e} (args.optim_args.adamw_lr, in the proportion that it has now)" in told


def test_a_range_that_begins_too_high_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find("--seeds", "1", "--start-lr", "0.03", "--end-lr", "0.3") == 0
    assert (
        "the loss falls from the lowest rate on: try a lower --start-lr" in capsys.readouterr().out
    )


def test_no_suggestion_is_told_and_nothing_applied(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find("--seeds", "1", "--apply", "--model=lrfind_parts.Stubborn") == 1
    told = capsys.readouterr().out
    assert "suggestion  none: the loss never fell" in told and "applied" not in told
    assert (folder / "run.yaml").read_text() == RUN


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--start-lr", "1", "--end-lr", "0.1"], "--end-lr: 0.1 given; allowed: a number above"),
        (["--num-iterations", "2"], "--num-iterations: 2 given; allowed: 3 and up"),
        (["--smoothing-factor", "2"], "--smoothing-factor: 2.0 given"),
        (["--seeds", "0"], "--seeds: 0 given; allowed: 1 and up"),
        (["--output", "found.jpg"], "--output: unknown ending '.jpg'; did you mean '.png'?"),
        (["--start-lr", "low"], "argument --start-lr: invalid float value: 'low'"),
        (["--strat-lr", "1"], "did you mean --start-lr?"),
        (["--nnodes", "2"], "--nnodes: '2' given without --nproc"),
        (["--nproc", "2"], "trainer is 'single'"),
        (["--data.train=lrfind_parts.Loader"], "data.train: a list_iterator can be read only"),
        (
            ["--apply", '--optimizer_groups={slow: {regex: embed, config: {lr: 0.1}}}'],
            "--apply: optimizer_groups.slow has a rate of its own",
        ),
        (["--apply", "--optimizer=torch.optim.SGD"], "give it optimizer.init_args.lr"),
    ],
)  # fmt: skip
def test_mistakes(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lr-find", "run.yaml", *words]) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told
    assert (folder / "run.yaml").read_text() == RUN
    assert not (folder / "out").exists()


def test_a_file_that_cannot_be_edited_line_by_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, _, args = RUN.partition("args:\n")
    inline = ", ".join(
        line.split("#")[0].strip() for line in args.splitlines() if "rate" not in line
    )
    text = f"{head}args: {{{inline}}}\n"
    (folder / "run.yaml").write_text(text)
    assert find("--seeds", "1", "--apply") == 2
    told = capsys.readouterr().err
    assert "cannot be changed without touching other lines; set by hand: args.learning_rate" in told
    assert (folder / "run.yaml").read_text() == text


@pytest.mark.timeout(240)
def test_several_ranks(folder: Path) -> None:
    words: list[Any] = [sys.executable, "-m", "headway", "lr-find", "run.yaml", "--trainer=ddp"]
    words += ["--nproc", "2", "--num-iterations", "20", "--seeds", "1", "--json", "--apply"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    done = subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)  # told once
    assert len(facts["lrs"]) == 20
    rate = float(f"{facts['suggested_lr']:.2e}")
    assert (folder / "run.yaml").read_text() == RUN.replace("1.0e-5", repr(rate))
