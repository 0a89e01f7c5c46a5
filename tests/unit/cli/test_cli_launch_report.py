"""What the launcher adds to the post-mortem of a run, or makes of it alone."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import pytest

from headway.cli.launch_report import Launched
from headway.config.load import load_run
from headway.dist.exits import Death, RankEnd, note_deaths, read_deaths
from headway.engine.post_mortem import make_report, read_report, write_report
from headway.testing import assert_no_import

SINCE = 1_000.0
RUN = """\
model: {vocab_size: 258, hidden_size: 16, num_layers: 1, num_heads: 2, max_seq_len: 32}
trainer: ddp
data:
  train:
    class_path: SyntheticDataset
    init_args: {num_samples: 9, sequence_length: 8, vocab_size: 258}
args: {output_dir: out, use_cpu: true}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWAY_LAUNCH_DIR", str(tmp_path))
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "out/run").mkdir(parents=True)
    return tmp_path


def launched():
    command = ["headway", "train", "run.yaml", "--nproc", "2", "--no-resume"]
    return Launched(load_run("run.yaml", []), command, 2, SINCE)


def begin(folder, **records):
    """What a run leaves that has taken steps."""
    (folder / "out/run/environment.json").write_text("{}")
    record = {"type": "train", "timestamp": SINCE + 5, "global_step": 4, "loss": 2.0}
    (folder / "out/trainer_logs.jsonl").write_text(json.dumps(record) + "\n")


def told_by_another(folder, **more):
    report = make_report(
        culprit_rank=1, world_size=2, error_type="lost", error="gone", reported_by="rank 0", **more
    )
    assert write_report(folder / "out", report, since=SINCE)


@pytest.mark.parametrize(
    ("code", "signal", "exit_code", "error"),
    [
        (-9, "SIGKILL", None, "its process was ended by SIGKILL (process 5)"),
        (-64, "SIGRTMAX", None, "its process was ended by SIGRTMAX (process 5)"),
        (7, None, 7, "its process ended with exit code 7 (process 5)"),
    ],
)
def test_how_a_lost_rank_ended_is_added(folder, code, signal, exit_code, error):
    told_by_another(folder, step=6)
    note_deaths([Death(0, 4, 1), Death(1, 5, code)])
    assert launched().report_failure(folder, set()).name == "post_mortem.txt"
    report = read_report(folder / "out")
    assert (report["signal"], report["exit_code"], report["error"]) == (signal, exit_code, error)
    assert report["step"] == 6 and report["reported_by"] == "rank 0 and the launcher"


def test_a_process_that_the_launcher_itself_killed_does_not_count(folder):
    told_by_another(folder)
    note_deaths([Death(1, 5, -9)])
    launched().report_failure(folder, {5})
    assert read_report(folder / "out")["signal"] is None


def test_a_traceback_is_worth_more(folder):
    report = make_report(culprit_rank=1, error_type="ValueError", error="x", traceback="T")
    write_report(folder / "out", report, since=SINCE)
    note_deaths([Death(1, 5, 1)])
    assert launched().report_failure(folder, set()) is not None
    assert read_report(folder / "out") == report


def test_where_no_rank_is_left_the_launcher_tells_what_the_log_says(folder):
    begin(folder)
    (folder / "0-0.end").write_text(json.dumps(asdict(RankEnd(0, 0, 1, "x", victim=True))))
    note_deaths([Death(0, 4, 1), Death(1, 5, -9)])
    assert launched().report_failure(folder, set()) is not None
    report = read_report(folder / "out")
    assert (report["culprit_rank"], report["signal"], report["step"]) == (1, "SIGKILL", 4)
    assert report["last_steps"] == [{"step": 4, "loss": 2.0}]
    assert report["resume_command"] == "headway train run.yaml --nproc 2"
    assert report["directory"] == str(folder) and report["checkpoint"] is None


@pytest.mark.parametrize("case", ["never began", "began earlier", "nobody died"])
def test_a_run_that_did_not_begin_or_lost_nobody_leaves_nothing(folder, case):
    if case != "never began":
        begin(folder)
    if case == "began earlier":
        os.utime(folder / "out/run/environment.json", (SINCE - 9, SINCE - 9))
    if case != "nobody died":
        note_deaths([Death(1, 5, -9)])
    assert launched().report_failure(folder, set()) is None
    assert not list((folder / "out").glob("post_mortem*"))


def test_notes_of_deaths_that_cannot_be_read_are_none(folder):
    assert read_deaths(folder) == []
    (folder / "deaths.json").write_text("{")
    assert read_deaths(folder) == []


def test_the_launcher_does_not_import_torch_for_it():
    assert_no_import("import headway.cli.launch, headway.cli.launch_report, headway.cli.torchrun")
