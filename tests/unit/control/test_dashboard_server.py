"""The dashboard over real HTTP: what it answers about runs, to whom, and what it refuses."""

from __future__ import annotations

import http.client
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headway.checkpoint import CheckpointManager
from headway.control.client import ControlError
from headway.control.discovery import Registration
from headway.control.inbox import Inbox
from headway.control.schema import COMMANDS
from headway.control.status import StatusBoard

pytest.importorskip("aiohttp")
from headway.control.dashboard.answers import Answers
from headway.control.dashboard.checkpoints import Checkpoints
from headway.control.dashboard.mounted import mount
from headway.control.dashboard.shelf import Place, Shelf
from headway.control.dashboard.standalone import DashboardServer
from headway.control.server import ControlServer
from headway.engine.post_mortem import render_text
from headway.engine.process_note import write_note
from headway.testing.contents import make_contents

CONTROL, READ = "c" * 64, "r" * 64
NOW = time.time()
ODD_NAMES = ["..", "%2e%2e", "..%2f..", "%2e%2e%2f%2e%2e%2fetc", "..%5c..", "a%00b", "%252e%252e"]


def ask(server, method, path, token, body=None, **headers):
    """(status, answer, headers) of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    if body is not None:
        headers["Content-Type"] = "application/json"
        body = json.dumps(body)
    try:
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.getheader("Content-Type", "").startswith("application/json"):
            content = json.loads(content, parse_constant=pytest.fail)
        return answer.status, content, dict(answer.getheaders())
    finally:
        connection.close()


def write_run(folder, records, config=None):
    (folder / "run").mkdir(parents=True, exist_ok=True)
    (folder / "run" / "config.json").write_text(json.dumps(config or {"args": {}}))
    log = folder / "trainer_logs.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    return log


def records_of(num_steps, end=True, start=NOW - 1000.0, **more):
    yield {"type": "start", "global_step": 0, "timestamp": start, "max_steps": num_steps}
    for step in range(1, num_steps + 1):
        yield {
            "type": "train",
            "global_step": step,
            "timestamp": start + step * 1e-3,
            "epoch": step / num_steps,
            "loss": 1.0 / step,
            "total_tokens": step * 8,
            **more,
        }
    if end:
        yield {"type": "summary", "global_step": num_steps, "timestamp": start, "train_runtime": 1}


class Board:
    """A dashboard in a process's thread, and requests to it."""

    def __init__(self, *folders, **options):
        self.server = DashboardServer(folders, **options)
        self.server.start()

    def get(self, path, expect=200):
        status, answer, _ = ask(self.server, "GET", path, self.server.token)
        assert status == expect, (path, status, answer)
        return answer

    def post(self, path, body, expect=200):
        status, answer, _ = ask(self.server, "POST", path, self.server.token, body)
        assert status == expect, (path, status, answer)
        return answer

    def ids(self):
        return {run["name"]: run["id"] for run in self.get("/api/runs")["runs"]}


@pytest.fixture
def open_board(tmp_path):
    opened = []

    def make(*folders, **options):
        opened.append(Board(*folders, **{"jobs_folder": tmp_path / "jobs", **options}))
        return opened[-1]

    yield make
    for board in opened:
        assert board.server.stop()


# -- runs and curves --------------------------------------------------------------------------


def test_a_hundred_thousand_points_come_as_what_a_screen_shows(tmp_path, open_board):
    records = list(records_of(100_000))
    records[40_000]["loss"], records[77_777]["loss"] = 99.0, -99.0
    records[50_000]["loss"] = "nan"
    write_run(tmp_path / "big", records)
    board = open_board(tmp_path)
    run = board.ids()["big"]
    keys = {}
    while keys.get("loss", {}).get("count") != 100_000:  # a slow machine reads it in several turns
        keys = {key["name"]: key for key in board.get(f"/api/runs/{run}/keys")["keys"]}
    assert keys["loss"] == {
        "name": "loss",
        "count": 100_000,
        "first_step": 1,
        "last_step": 100_000,
    }
    for axis, last in (("step", 100_000), ("tokens", 800_000), ("time", 100.0)):
        answer = board.get(f"/api/runs/{run}/series?keys=loss,none&x={axis}&points=1500")
        curve = answer["series"]["loss"]
        assert answer["x"] == axis and answer["complete"]
        assert answer["until"] == curve["x"][-1] == pytest.approx(last)
        assert curve["total"] == 100_000 and curve["decimated"]
        assert 900 <= len(curve["x"]) == len(curve["y"]) <= 1500
        assert curve["y"][0] == 1.0 and "nan" in curve["y"]
        numbers = [y for y in curve["y"] if y != "nan"]
        assert max(numbers) == 99.0 and min(numbers) == -99.0
        assert answer["series"]["none"] == {"x": [], "y": [], "total": 0, "decimated": False}
    part = board.get(f"/api/runs/{run}/series?keys=loss&from=77700&to=77800")["series"]["loss"]
    assert (part["x"][0], part["x"][-1], part["decimated"]) == (77_699, 77_801, False)
    assert -99.0 in part["y"]


def test_means_are_of_all_points_and_not_of_those_that_are_sent(tmp_path, open_board):
    """Most losses are 1, one in a hundred is 10: their mean is 1.09, not the 5.5 in the middle."""
    records = [*records_of(10_000)]
    for record in records:
        if "loss" in record:
            record["loss"] = 10.0 if record["global_step"] % 100 == 0 else 1.0
    records[5_000]["loss"] = "nan"
    write_run(tmp_path / "spikes", records)
    board = open_board(tmp_path)
    asked = f"/api/runs/{board.ids()['spikes']}/series?keys=loss&points=150&smoothing=0.99"
    curve = board.get(asked)["series"]["loss"]
    assert curve["decimated"] and len(curve["smooth"]) == len(curve["x"])
    assert curve["smooth"][curve["y"].index("nan")] is None
    late = [y for x, y in zip(curve["x"], curve["smooth"]) if x > 1000 and y is not None]
    assert len(late) > 50 and all(1.04 < y < 1.16 for y in late)
    whole = dict(zip(curve["x"], curve["smooth"]))
    part = board.get(f"{asked}&from=7000&to=7200")["series"]["loss"]
    both = [(y, whole[x]) for x, y in zip(part["x"], part["smooth"]) if x in whole]
    assert both and all(y == expected for y, expected in both), "a part is a part of the whole"


def test_a_log_is_followed_torn_and_rewound(tmp_path, open_board):
    log = write_run(tmp_path / "run", records_of(10, end=False))
    board = open_board(tmp_path / "run")
    run = board.ids()["run"]

    def curve():
        found = board.get(f"/api/runs/{run}/series?keys=loss")["series"]["loss"]
        return dict(zip(found["x"], found["y"]))

    assert len(curve()) == 10
    with open(log, "a") as file:
        file.write('{"type": "train", "global_step": 11, "loss"')
        file.flush()
        assert max(curve()) == 10
        file.write(': 0.5, "timestamp": 1}\n')
        file.flush()
        assert curve()[11] == 0.5
        # Another process went on from step 6, and its writer has not cut the file.
        file.write(json.dumps({"type": "resume", "global_step": 6, "timestamp": NOW}) + "\n")
        file.write(json.dumps({"type": "train", "global_step": 7, "loss": 70.0}) + "\n")
        file.flush()
        assert list(curve()) == [1, 2, 3, 4, 5, 6, 7] and curve()[7] == 70.0
        # A later record of the same step wins, also without a word.
        file.write(json.dumps({"type": "train", "global_step": 5, "loss": 50.0}) + "\n")
        file.flush()
        assert curve()[5] == 50.0 and curve()[7] == 70.0
    log.write_text("".join(json.dumps(r) + "\n" for r in records_of(3)))
    assert curve() == {1: 1.0, 2: 0.5, 3: pytest.approx(1 / 3)}


def test_states_of_runs(tmp_path, open_board):
    write_run(tmp_path / "finished", records_of(3))
    write_run(tmp_path / "a" / "stopped", [*records_of(9)][:3] + [[*records_of(2)][-1]])
    write_run(tmp_path / "a" / "b" / "lost", records_of(3, end=False))
    write_run(tmp_path / "running", records_of(3, end=False, start=time.time()))
    write_run(tmp_path / "failed", records_of(3, end=False))
    (tmp_path / "failed" / "last_metrics-rank0.json").write_text(
        json.dumps({"timestamp": NOW, "global_step": 3, "error": "boom"})
    )
    write_run(tmp_path / "mended", [*records_of(3, end=False)])
    (tmp_path / "mended" / "post_mortem.json").write_text('{"error": "x", "value": NaN}')
    (tmp_path / "empty" / "run").mkdir(parents=True)
    board = open_board(tmp_path)
    states = {run["name"]: run["state"] for run in board.get("/api/runs")["runs"]}
    assert states == {
        "finished": "finished",
        "a/stopped": "stopped",
        "a/b/lost": "lost",
        "running": "running",
        "failed": "failed",
        "mended": "failed",
    }
    ids = board.ids()
    incident = board.get(f"/api/runs/{ids['failed']}/incidents")["incidents"][0]
    assert incident["step"] == 3 and incident["message"].endswith("boom")
    assert board.get(f"/api/runs/{ids['mended']}/post_mortem") == {"error": "x", "value": "nan"}
    assert "has not failed" in board.get(f"/api/runs/{ids['finished']}/post_mortem", 404)["error"]
    with open(tmp_path / "mended" / "trainer_logs.jsonl", "a") as file:
        resumed = {"type": "resume", "global_step": 3, "timestamp": time.time() + 5}
        file.write(json.dumps(resumed) + "\n")
    states = {run["name"]: run["state"] for run in board.get("/api/runs")["runs"]}
    assert states["mended"] == "running"


def test_a_failure_is_as_old_as_it_says_also_in_a_copy_of_the_run(tmp_path, open_board):
    mended = [*records_of(3, end=False), {"type": "resume", "global_step": 2, "timestamp": NOW}]
    for name, failed_at in (("went on", NOW - 50), ("failed again", NOW + 50)):
        write_run(tmp_path / name, [*mended, [*records_of(4)][-1]])
        report = tmp_path / name / "post_mortem.json"
        report.write_text(json.dumps({"time": failed_at, "error": "x"}))
        os.utime(report, (NOW + 100, NOW + 100))
    states = {run["name"]: run["state"] for run in open_board(tmp_path).get("/api/runs")["runs"]}
    assert states == {"went on": "finished", "failed again": "failed"}


def test_a_run_that_was_made_shorter_by_command_and_did_that_is_finished(tmp_path, open_board):
    started, *rest = records_of(9)
    shorter = {"type": "train", "global_step": 4, "timestamp": NOW, "max_steps": 5}
    end = {"type": "summary", "global_step": 5, "timestamp": NOW, "train_runtime": 1}
    write_run(tmp_path / "shorter", [started, *rest[:4], shorter, rest[4], end])
    (tmp_path / "longer").mkdir()
    longer = {**shorter, "max_steps": 12}
    write_run(tmp_path / "longer", [started, *rest[:4], longer, rest[4], {**end, "global_step": 9}])
    runs = {run["name"]: run for run in open_board(tmp_path).get("/api/runs")["runs"]}
    assert (runs["shorter"]["state"], runs["shorter"]["max_steps"]) == ("finished", 5)
    assert (runs["longer"]["state"], runs["longer"]["max_steps"]) == ("stopped", 12)


DEAD = """
import os, signal, sys
from headway.engine.process_note import write_note
from headway.testing.contents import make_contents
write_note(sys.argv[1], command=sys.argv[2:], resumes=False, directory="/somewhere", world_size=2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def leave_note(folder, *command):
    """What a run notes of its process, which is gone since."""
    words = [sys.executable, "-c", DEAD, str(folder), *command]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL


def test_a_run_that_died_without_a_word_is_examined_from_its_files(tmp_path, open_board):
    # Its last record is a moment old: that it is dead, its process tells.
    write_run(tmp_path / "run", records_of(30, end=False, start=time.time()))
    leave_note(tmp_path / "run", "headway", "train", "run.yaml", "--nproc", "2", "--no-resume")
    board = open_board(tmp_path)
    (run,) = board.get("/api/runs")["runs"]
    assert run["state"] == "lost" and run["post_mortem"] is True
    report = board.get(f"/api/runs/{run['id']}/post_mortem")
    assert (report["error_type"], report["step"], report["world_size"]) == ("lost", 30, 2)
    assert f"process {report['pid']} on {report['host']} is gone" in report["error"]
    assert report["resume_command"] == "headway train run.yaml --nproc 2"
    assert report["directory"] == "/somewhere" and report["checkpoint"] is None
    assert [step["step"] for step in report["last_steps"]] == list(range(11, 31))
    assert report["last_steps"][-1]["loss"] == 1.0 / 30


def test_of_a_lost_run_with_checkpoints_at_an_address_it_is_said_where_they_are(
    tmp_path, open_board, monkeypatch
):
    # Anybody may have written the file: it is no reason to ask a server on the network.
    monkeypatch.setattr("headway.checkpoint.remote._open_file_system", pytest.fail)
    write_run(
        tmp_path / "run", records_of(3, end=False), {"args": {"checkpoint_address": "s3://b/run"}}
    )
    leave_note(tmp_path / "run", "headway", "train", "run.yaml", "--no-resume")
    board = open_board(tmp_path)
    (run,) = board.get("/api/runs")["runs"]
    report = board.get(f"/api/runs/{run['id']}/post_mortem")
    assert report["checkpoint"] == {"path": "s3://b/run", "step": None}
    assert report["resume_command"] == "headway train run.yaml"
    assert "what is in s3://b/run was not looked at" in render_text(report)


def test_a_run_whose_process_lives_is_running_however_long_it_says_nothing(tmp_path, open_board):
    write_run(tmp_path / "run", records_of(3, end=False))
    write_note(tmp_path / "run", command=None, resumes=False)
    board = open_board(tmp_path)
    (run,) = board.get("/api/runs")["runs"]
    assert run["state"] == "running" and run["post_mortem"] is False
    # What somebody else may have written into the folder makes no difference.
    note = tmp_path / "run" / "run" / "process.json"
    for odd in ('{"pid": "1/../../etc"}', '{"pid": -1}', "[]", '{"pid": 1, "host": 3}', "{"):
        note.write_text(odd)
        (run,) = board.get("/api/runs")["runs"]
        assert run["state"] == "lost"
        assert board.get(f"/api/runs/{run['id']}/post_mortem")["resume_command"] is None


def test_a_run_whose_log_is_not_read_to_its_end_is_none_that_runs_or_was_lost(
    tmp_path, open_board, monkeypatch
):
    monkeypatch.setattr("headway.control.dashboard.answers._LIST_S", 0.0)
    write_run(tmp_path / "run", records_of(3))
    board = open_board(tmp_path)
    (run,) = board.get("/api/runs")["runs"]
    assert (run["state"], run["complete"], run["post_mortem"]) == ("reading", False, False)
    monkeypatch.setattr("headway.control.dashboard.answers._LIST_S", 60.0)
    (run,) = board.get("/api/runs")["runs"]
    assert (run["state"], run["complete"]) == ("finished", True)


def test_a_checkpoint_that_was_put_elsewhere_is_no_run(tmp_path, open_board):
    write_run(tmp_path / "run", records_of(3))
    kept = tmp_path / "archive" / "checkpoint-3"
    (kept / "run").mkdir(parents=True)
    for name in ("run/config.json", "checkpoint_manifest.json"):
        (kept / name).write_text("{}")
    assert list(open_board(tmp_path).ids()) == ["run"]


def test_short_logs_do_not_wait_for_a_long_one(tmp_path, open_board, monkeypatch):
    monkeypatch.setattr("headway.control.dashboard.tail._BLOCK_BYTES", 4096)
    monkeypatch.setattr("headway.control.dashboard.answers._LIST_S", 1.0)
    write_run(tmp_path / "a long one", records_of(200_000))
    write_run(tmp_path / "short", records_of(3))
    runs = {run["name"]: run for run in open_board(tmp_path).get("/api/runs")["runs"]}
    assert runs["short"]["state"] == "finished"


def test_metrics_whose_names_hold_commas(tmp_path, open_board):
    write_run(tmp_path / "run", records_of(3, **{"f1 (a,b)": 0.5}))
    board = open_board(tmp_path)
    (run,) = board.get("/api/runs")["runs"]
    query = "key=f1%20%28a%2Cb%29&key=loss&keys=epoch"
    series = board.get(f"/api/runs/{run['id']}/series?{query}")["series"]
    assert {name: len(one["y"]) for name, one in series.items()} == {
        "f1 (a,b)": 3,
        "loss": 3,
        "epoch": 3,
    }


def test_a_folder_that_vanishes_is_a_404_and_others_stay(tmp_path, open_board, monkeypatch):
    monkeypatch.setattr("headway.control.dashboard.shelf._LOOK_S", 0.0)
    for name in ("one", "two"):
        write_run(tmp_path / name, records_of(3))
    board = open_board(tmp_path)
    ids = board.ids()
    assert board.get(f"/api/runs/{ids['one']}/series?keys=loss")["series"]["loss"]["total"] == 3
    shutil.rmtree(tmp_path / "one")
    answer = board.get(f"/api/runs/{ids['one']}/keys", 404)
    assert answer["valid_runs"] == [ids["two"]]
    assert board.ids() == {"two": ids["two"]}
    shutil.rmtree(tmp_path / "two")
    assert board.get("/api/runs")["runs"] == []


def test_a_log_that_vanishes_under_a_known_run_leaves_what_was_read(tmp_path, open_board):
    log = write_run(tmp_path / "run", records_of(3))
    board = open_board(tmp_path)
    run = board.ids()["run"]
    assert board.get(f"/api/runs/{run}/series?keys=loss")["series"]["loss"]["total"] == 3
    log.unlink()
    (tmp_path / "run" / "run" / "config.json").write_text("{torn")
    assert board.get(f"/api/runs/{run}/series?keys=loss")["series"]["loss"]["total"] == 3
    assert board.get(f"/api/runs/{run}/config")["config"] == {}
    assert board.get(f"/api/runs/{run}/checkpoints")["checkpoints"] == []


def test_links_lead_to_no_other_run(tmp_path, open_board):
    write_run(tmp_path / "runs" / "mine", records_of(1))
    write_run(tmp_path / "outside" / "theirs", records_of(1))
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "given").symlink_to(tmp_path / "runs")
    assert set(open_board(tmp_path / "given").ids()) == {"mine"}


def test_curves_in_memory_are_few(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.control.dashboard.shelf._MOST_WITH_CURVES", 2)
    for number in range(4):
        write_run(tmp_path / f"run-{number}", records_of(5 + number))
    shelf = Shelf([tmp_path])
    answers = Answers(shelf)
    for _ in range(2):
        for run in shelf.runs():
            said = json.loads(answers.ask("series", run.id, [("keys", "loss")]))
            assert said["series"]["loss"]["total"] == 5 + int(run.name[-1])
            held = [one for one in shelf.runs() if one.columns is not None]
            assert run in held and len(held) <= 2


def test_of_too_many_runs_the_newest_and_those_of_live_jobs_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.control.dashboard.shelf._MOST_RUNS", 3)
    for number in range(6):
        log = write_run(tmp_path / "runs" / f"run-{number}", records_of(1))
        for path in (log, log.parent / "run" / "config.json"):
            os.utime(path, (NOW + number, NOW + number))
    live = write_run(tmp_path / "elsewhere" / "live", records_of(1)).parent
    os.utime(live / "trainer_logs.jsonl", (NOW - 9000, NOW - 9000))
    os.utime(live / "run" / "config.json", (NOW - 9000, NOW - 9000))
    said = json.loads(Answers(Shelf([tmp_path / "runs"], lambda: [Place(live)])).ask("runs"))
    assert {run["name"] for run in said["runs"]} == {"live", "run-4", "run-5"}
    assert said["left_out"] == 4


# -- other files ------------------------------------------------------------------------------


def test_of_many_checkpoints_the_newest_are_listed_and_the_best_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.control.dashboard.checkpoints._MOST_SHOWN", 2)
    manager = CheckpointManager(tmp_path, save_total_limit=None)
    for step, loss in ((1, 9.0), (2, 1.0), (3, 5.0), (4, 4.0), (5, 3.0)):
        manager.save(make_contents(), step, metric=loss)
    listed, num_left_out = Checkpoints(tmp_path).list({"metric_for_best_model": "loss"})
    assert [(one["step"], one["best"]) for one in listed] == [(5, False), (4, False), (2, True)]
    assert num_left_out == 2


def test_the_best_checkpoint_is_so_by_the_metric_that_the_run_keeps_checkpoints_by(tmp_path):
    manager = CheckpointManager(tmp_path, save_total_limit=None)
    for step, accuracy in ((1, 0.25), (2, 0.75), (3, 0.5)):
        manager.save(make_contents(), step, metric=accuracy)
    args = {"metric_for_best_model": "loss", "greater_is_better": False}
    kept_by = {"preserve_best_model": True, "best_model_metric": "eval_accuracy"}
    direction = {"best_model_greater_is_better": True}
    for given, best in ((args, 1), (args | kept_by | direction, 2), (args | kept_by, 2)):
        listed, _ = Checkpoints(tmp_path).list(given)
        assert [one["step"] for one in listed if one["best"]] == [best]


def test_configuration_and_differences(tmp_path, open_board):
    for name, rate in (("a", 1.0), ("b", 2.0), ("c", 2.0)):
        args = {"learning_rate": rate, "output_dir": name, "seed": 1, "hub_token": "hf_secret"}
        if name == "c":
            args["extra"] = None
        write_run(tmp_path / name, records_of(1), {"args": args})
    board = open_board(tmp_path)
    ids = board.ids()
    said = board.get(f"/api/runs/{ids['a']}/config")
    assert said["config"]["args.learning_rate"] == 1.0 and said["files"] == ["run/config.json"]
    assert "hf_secret" not in json.dumps(said)
    rows = board.get(f"/api/diff?runs={ids['a']},{ids['b']},{ids['c']}")["rows"]
    assert rows == [
        {"key": "args.extra", "values": ["absent", "absent", None]},
        {"key": "args.learning_rate", "values": [1.0, 2.0, 2.0]},
    ]
    assert board.get(f"/api/diff?runs={ids['b']}")["rows"] == []


def test_samples_come_newest_first_and_incidents_too(tmp_path, open_board):
    records = [*records_of(4, end=False)]
    records[2]["grad_norm"] = "inf"
    records[4]["skipped_steps"] = 2
    write_run(tmp_path / "run", records)
    samples = [
        {"global_step": step, "samples": [{"prompt": "<b>", "text": f"t{step}"}, "no sample"]}
        for step in (10, 20, 30)
    ]
    text = "".join(json.dumps(one) + "\n" for one in samples) + '{"global_step": 40, "samp'
    (tmp_path / "run" / "eval_text.jsonl").write_text(text)
    board = open_board(tmp_path)
    run = board.ids()["run"]
    found = board.get(f"/api/runs/{run}/samples?limit=2")["samples"]
    assert [(one["step"], one["text"]) for one in found] == [(30, "t30"), (20, "t20")]
    incidents = board.get(f"/api/runs/{run}/incidents")["incidents"]
    assert [(one["kind"], one["step"]) for one in incidents] == [("withheld", 4), ("not_finite", 2)]
    assert board.get("/api/runs")["runs"][0]["incidents"] == 2


# -- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ("series", "keys"),
        ("series?keys=loss&x=epoch", "step, time, tokens"),
        ("series?keys=loss&points=5", "from 10 to 20000"),
        ("series?keys=loss&points=1e3", "from 10 to 20000"),
        ("series?keys=loss&points=99999999999999999999", "from 10 to 20000"),
        ("series?keys=loss&from=nan", "from must be a number"),
        ("series?keys=loss&to=x", "to must be a number"),
        ("series?keys=loss&smoothing=1", "from 0 up to below 1"),
        ("series?keys=loss&keys=lr", "twice"),
        ("series?keys=loss&pints=5", "did you mean 'points'"),
        ("series?keys=" + ",".join(map(str, range(65))), "1 to 64"),
        ("samples?limit=0", "from 1 to 200"),
        ("keys?x=step", "no parameter"),
    ],
)
def test_a_bad_query_is_told_what_is_allowed(tmp_path, open_board, query, word):
    write_run(tmp_path / "run", records_of(2))
    board = open_board(tmp_path)
    assert word in board.get(f"/api/runs/{board.ids()['run']}/{query}", 400)["error"]


def test_names_from_addresses_are_looked_up_and_nothing_else(tmp_path, open_board):
    write_run(tmp_path / "run", records_of(2))
    (tmp_path / "secret").write_text("secret")
    board = open_board(tmp_path / "run")
    run = board.ids()["run"]
    for odd in [*ODD_NAMES, "unknown", "x" * 2000, "<script>"]:
        for path in (f"/api/runs/{odd}/keys", f"/api/runs/{odd}/status", f"/assets/{odd}"):
            status, answer, _ = ask(board.server, "GET", path, board.server.token)
            assert status in (400, 404), (path, status)
            assert b"secret" not in json.dumps(answer).encode()
        status, answer, _ = ask(
            board.server,
            "POST",
            f"/api/runs/{run}/checkpoints/{odd}/verify",
            board.server.token,
            {},
        )
        assert status in (400, 404), (odd, status)
    unknown = board.get(f"/api/runs/{run[:-1]}x/keys", 404)
    assert unknown["valid_runs"] == [run] and f"did you mean '{run}'" in unknown["error"]
    assert board.get(f"/api/diff?runs={run},unknown", 404)["valid_runs"] == [run]


# -- roles and files of the page --------------------------------------------------------------


def test_roles(tmp_path, open_board):
    write_run(tmp_path / "run", records_of(2))
    for read_only, role in ((False, "control"), (True, "read")):
        board = open_board(tmp_path, read_only=read_only)
        run = board.ids()["run"]
        assert board.get("/api/session")["role"] == role
        assert board.get("/api/session")["standalone"] is True
        for method, path, needs in _routes(board.server, run):
            body = {"command": "pause"} if method == "POST" else None
            for token in (None, "x", board.server.token[:-1]):
                status = ask(board.server, method, path, token, body)[0]
                assert status == 401 if needs != "public" else status in (200, 404), path
            status = ask(board.server, method, path, board.server.token, body)[0]
            if needs == "control" and read_only:
                assert status == 403, path
            else:
                assert status in (200, 400, 404, 410), (path, status)


def _routes(server, run):
    for method, path, _, role in server.routes:
        words = {"run_id": run, "name": "checkpoint-1", "command_id": "x"}
        yield method, path.format(**words), role


def test_the_page_is_served_whole_and_kept(tmp_path, open_board):
    board = open_board(tmp_path)
    status, page, headers = ask(board.server, "GET", "/", None)
    assert status == 200 and page.lower().startswith(b"<!doctype html>")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Cache-Control"] == "no-cache"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'")
    tag = {"If-None-Match": headers["ETag"]}
    status, content, again = ask(board.server, "GET", "/", None, **tag)
    assert (status, content, again["ETag"]) == (304, b"", headers["ETag"])
    status, script, headers = ask(board.server, "GET", "/assets/app.js", None)
    assert status == 200 and headers["Content-Type"].startswith("text/javascript")


def test_the_charts_script_comes_from_the_installed_package(tmp_path, open_board, monkeypatch):
    plotly = pytest.importorskip("plotly")
    board = open_board(tmp_path)
    status, script, headers = ask(board.server, "GET", "/assets/plotly.min.js", None)
    installed = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    assert status == 200 and script == installed.read_bytes()
    assert headers["X-Content-Type-Options"] == "nosniff"
    tag = {"If-None-Match": headers["ETag"]}
    assert ask(board.server, "GET", "/assets/plotly.min.js", None, **tag)[0] == 304
    monkeypatch.setattr("headway.control.dashboard.assets.find_charts_script", lambda: None)
    without = open_board(tmp_path)
    assert ask(without.server, "GET", "/assets/plotly.min.js", None)[0] == 404


def test_large_downloads_by_anybody_are_few(tmp_path, open_board):
    pytest.importorskip("plotly")
    board = open_board(tmp_path)
    path = "/assets/plotly.min.js"
    statuses = [ask(board.server, "GET", path, None)[0] for _ in range(40)]
    assert statuses[:8] == [200] * 8 and statuses.count(503) >= 10
    assert ask(board.server, "GET", "/", None)[0] == 200


def test_commands_are_those_of_the_schema(tmp_path, open_board):
    said = open_board(tmp_path).get("/api/commands")
    assert set(said) == set(COMMANDS)
    assert said["set_learning_rate"]["exactly_one_of"] == ["scale", "value"]
    assert said["pause"]["fields"]["offload"]["default"] is False


# -- inside a run's own server ----------------------------------------------------------------


class Mounted:
    def __init__(self, folder):
        self.board, self.inbox = StatusBoard("job-1"), Inbox()
        self.server = ControlServer(
            self.board,
            self.inbox,
            nonce="n" * 32,
            tokens={"control": CONTROL, "read": READ},
            version="1",
            add_routes=lambda server: mount(server, self.board, self.inbox, folder, None),
        )
        self.server.start()

    def get(self, path, token=READ):
        return ask(self.server, "GET", path, token)[:2]

    def post(self, path, body, token=CONTROL):
        return ask(self.server, "POST", path, token, body)[:2]


@pytest.fixture
def mounted(tmp_path):
    write_run(tmp_path / "run", records_of(4, end=False))
    found = Mounted(tmp_path / "run")
    yield found
    assert found.server.stop()


def test_a_run_serves_itself(mounted):
    mounted.board.publish(status="paused", global_step=9, max_steps=20, epoch=0.5)
    mounted.board.report_incident("divergence", "the loss jumped", 8)
    (run,) = mounted.get("/api/runs")[1]["runs"]
    assert (run["state"], run["step"], run["max_steps"]) == ("paused", 9, 20)
    assert run["controllable"] and run["job_id"] == "job-1" and run["incidents"] == 1
    assert run["latest"]["loss"] == 0.25
    path = f"/api/runs/{run['id']}"
    assert mounted.get("/api/session")[1] == {
        "role": "read",
        "standalone": False,
        "version": mounted.get("/api/session", CONTROL)[1]["version"],
    }
    assert mounted.get("/api/session", CONTROL)[1]["role"] == "control"
    assert mounted.get(f"{path}/status")[1]["global_step"] == 9
    assert mounted.get(f"{path}/incidents")[1]["incidents"][0]["kind"] == "divergence"
    assert mounted.get(f"{path}/series?keys=loss")[1]["series"]["loss"]["total"] == 4
    assert mounted.get("/api/runs/other/series?keys=loss")[0] == 404
    assert mounted.get("/")[0] == 200
    mounted.board.publish(status="finished", outcome="completed")
    (run,) = mounted.get("/api/runs")[1]["runs"]
    assert run["state"] == "finished" and not run["controllable"]


def test_a_command_goes_straight_to_the_inbox_and_nothing_else_does(mounted):
    run = mounted.get("/api/runs")[1]["runs"][0]["id"]
    body = {"command": "pause", "id": "once"}
    assert mounted.post(f"/api/runs/{run}/control", body, READ)[0] == 403
    assert mounted.post("/api/runs/other/control", body)[0] == 404
    bad = mounted.post(f"/api/runs/{run}/control", {"command": "pausee"})
    assert bad[0] == 400 and "did you mean 'pause'" in bad[1]["error"]
    assert mounted.post(f"/api/runs/{run}/checkpoints/checkpoint-1/verify", {})[0] == 403
    assert not mounted.inbox.pending
    for _ in range(2):  # the same id is the same command
        status, receipt = mounted.post(f"/api/runs/{run}/control", body)
        assert (status, receipt["state"]) == (200, "accepted")
    assert [command.name for command in mounted.inbox.take()] == ["pause"]
    mounted.inbox.settle("once", "applied", 7, "")
    receipt = mounted.get(f"/api/runs/{run}/commands/once")[1]
    assert (receipt["state"], receipt["step"]) == ("applied", 7)
    assert mounted.get(f"/api/runs/{run}/commands/never")[0] == 404


def test_who_asks_for_the_receipt_of_the_last_command_hears_it_before_the_server_ends(
    mounted, monkeypatch
):
    run = mounted.get("/api/runs")[1]["runs"][0]["id"]
    body = {"command": "save_and_stop", "id": "last"}
    assert mounted.post(f"/api/runs/{run}/control", body)[0] == 200
    look, is_asked = mounted.inbox.receipt, threading.Event()

    def receipt(command_id):
        is_asked.set()
        return look(command_id)

    monkeypatch.setattr(mounted.inbox, "receipt", receipt)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(mounted.get, f"/api/runs/{run}/commands/last")
        assert is_asked.wait(60)
        mounted.inbox.settle("last", "failed", 7, "disk full")
        assert mounted.server.stop()
        status, said = answer.result(60)[:2]
    assert (status, said["state"], said["message"]) == (200, "failed", "disk full")


def test_files_are_read_by_a_process_that_may_die(mounted, monkeypatch):
    monkeypatch.setattr("headway.control.dashboard.source._AGAIN_S", 0.0)
    assert len(mounted.get("/api/runs")[1]["runs"]) == 1
    worker = _children()
    assert len(worker) == 1
    os.kill(worker[0], 9)
    (run,) = mounted.get("/api/runs")[1]["runs"]
    assert run["latest"]["loss"] == 0.25
    assert mounted.server.stop()
    assert _children() == []


def _children():
    """Processes of this test that read for a dashboard."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getpid() and b"headway.control.dashboard.worker" in words:
            found.append(int(place.name))
    return found


def test_a_flood_is_turned_away_and_status_still_answers(mounted):
    run = mounted.get("/api/runs")[1]["runs"][0]["id"]
    statuses = []

    def flood():
        for _ in range(10):
            statuses.append(mounted.get(f"/api/runs/{run}/series?keys=loss,epoch")[0])

    threads = [threading.Thread(target=flood) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert mounted.get("/jobs/job-1/status")[0] == 200
    for thread in threads:
        thread.join(60)
    assert set(statuses) <= {200, 503} and 200 in statuses
    assert mounted.get("/api/runs")[0] == 200


# -- jobs of other processes ------------------------------------------------------------------


class Job:
    """A job with a control server and its files, as a training process has them."""

    def __init__(self, jobs_folder, output_dir):
        self.board, self.inbox = StatusBoard("train-1"), Inbox()
        self.files = Registration("train-1", jobs_folder)
        tokens = {"control": CONTROL, "read": READ}
        self.server = ControlServer(
            self.board, self.inbox, nonce=self.files.nonce, tokens=tokens, version="1"
        )
        self.server.start()
        self.files.write_tokens(tokens)
        self.files.write_endpoint(
            "127.0.0.1",
            self.server.port,
            None,
            output_dir=str(output_dir),
            logging_dir=None,
            run_name="my <b>run",
            version="1",
        )


def test_a_live_job_is_listed_shown_and_steered(tmp_path, open_board, monkeypatch):
    monkeypatch.setattr("headway.control.dashboard.live._FRESH_S", 0.0)
    monkeypatch.setattr("headway.control.dashboard.shelf._LOOK_S", 0.0)
    write_run(tmp_path / "elsewhere" / "live", records_of(4, end=False))
    job = Job(tmp_path / "jobs", tmp_path / "elsewhere" / "live")
    (tmp_path / "empty").mkdir()
    try:
        job.board.publish(status="training", global_step=5, max_steps=50)
        board = open_board(tmp_path / "empty")
        (run,) = board.get("/api/runs")["runs"]
        assert (run["name"], run["state"], run["step"]) == ("my <b>run", "running", 5)
        assert run["controllable"] and run["job_id"] == "train-1"
        path = f"/api/runs/{run['id']}"
        assert board.get(f"{path}/status")["max_steps"] == 50
        receipt = board.post(f"{path}/control", {"command": "pause", "id": "p1"})
        assert receipt["state"] == "accepted"
        assert [command.id for command in job.inbox.take()] == ["p1"]
        job.inbox.settle("p1", "refused", 6, "it is paused already")
        assert board.get(f"{path}/commands/p1")["state"] == "refused"
        assert board.get(f"{path}/commands/none", 404)
        assert board.get(f"{path}/commands/..%2f..%2fstatus", 404)
        bad = board.post(f"{path}/control", {"command": "set_learning_rate", "data": {}}, 400)
        assert "exactly one of scale, value" in bad["error"]
        taken = {"command": "resume", "id": "p1"}
        assert "was used for another" in board.post(f"{path}/control", taken, 409)["error"]
        # Killing the dashboard changes nothing in the job.
        before = dict(job.board.status)
        assert board.server.stop()
        assert dict(job.board.status) == before and not job.inbox.pending
        again = open_board(tmp_path / "empty")
        assert again.get("/api/runs")["runs"][0]["state"] == "running"
        job.inbox.close("the run has ended", 9)
        assert again.post(f"{path}/control", {"command": "pause"}, 410)["error"]
        job.server.stop()
        job.files.remove()
        assert again.get("/api/runs")["runs"] == []
    finally:
        job.server.stop()


def test_an_impostor_at_a_job_s_address_gets_no_token(tmp_path, open_board):
    write_run(tmp_path / "live", records_of(4, end=False, start=NOW))
    job = Job(tmp_path / "jobs", tmp_path / "live")
    try:
        endpoint = job.files.folder / "endpoint.json"
        said = json.loads(endpoint.read_text())
        endpoint.write_text(json.dumps({**said, "nonce": "f" * 32}))
        board = open_board(tmp_path / "live")
        (run,) = board.get("/api/runs")["runs"]
        assert run["state"] == "running" and not run["controllable"]
        refused = board.post(f"/api/runs/{run['id']}/control", {"command": "abort"}, 502)
        assert "is not that job" in refused["error"] and not job.inbox.pending
        assert math.isclose(run["latest"]["loss"], 0.25)
    finally:
        job.server.stop()


def test_jobs_that_do_not_answer_are_asked_together_and_not_at_every_look(
    tmp_path, open_board, monkeypatch
):
    num_jobs, asked = 6, []
    together = threading.Barrier(num_jobs)

    class Silent:
        def __init__(self, job, timeout_s):
            self.job = job

        def status(self):
            asked.append(self.job.endpoint.job_id)
            together.wait(5)
            raise ControlError("the job does not answer: timed out")

    monkeypatch.setattr("headway.control.dashboard.live.Client", Silent)
    for number in range(num_jobs):
        write_run(tmp_path / f"run-{number}", records_of(2, end=False, start=NOW))
        files = Registration(f"job-{number}", tmp_path / "jobs")
        place = {"output_dir": str(tmp_path / f"run-{number}"), "logging_dir": None}
        files.write_endpoint("127.0.0.1", 1, None, **place, run_name=None, version="1")
    board = open_board(tmp_path / "run-0")
    for _ in range(2):
        assert {run["state"] for run in board.get("/api/runs")["runs"]} == {"running"}
    assert len(asked) == num_jobs and not together.broken


class Leaving(Job):
    """Ends as soon as it has settled a command, before anybody has asked for the receipt."""

    def settle_and_leave(self, command_id, state, message):
        if state is not None:
            told = {"id": command_id, "state": state, "step": 7, "message": message}
            self.board.announce("command", **told)
        self.server.stop()
        self.files.remove()


@pytest.mark.parametrize(
    ("command", "state", "told"),
    [
        ("save_and_stop", "failed", "failed"),
        ("save_and_stop", "applied", "applied"),
        ("graceful_stop", None, "applied"),
    ],
)
def test_what_became_of_the_last_command_of_a_run_is_what_the_run_said(
    tmp_path, open_board, command, state, told
):
    write_run(tmp_path / "live", records_of(4, end=False, start=NOW))
    job = Leaving(tmp_path / "jobs", tmp_path / "live")
    board = open_board(tmp_path / "live")
    path = f"/api/runs/{board.ids()['live']}"
    try:
        board.post(f"{path}/control", {"command": command, "id": "c1"})
        job.settle_and_leave("c1", state, "disk full")
        receipt = board.get(f"{path}/commands/c1")
        assert (receipt["state"], receipt["settled_at"] is None) == (told, False)
        assert receipt["message"] == ("disk full" if state else "the run has ended")
        assert board.get(f"{path}/commands/c1")["state"] == told
    finally:
        job.server.stop()


def test_of_a_save_that_nobody_heard_of_again_it_is_not_said_that_it_was_done(tmp_path, open_board):
    write_run(tmp_path / "live", records_of(4, end=False, start=NOW))
    job = Leaving(tmp_path / "jobs", tmp_path / "live")
    board = open_board(tmp_path / "live")
    path = f"/api/runs/{board.ids()['live']}"
    try:
        board.post(f"{path}/control", {"command": "save_and_stop", "id": "c1"})
        job.settle_and_leave("c1", None, "")
        assert "is not known" in board.get(f"{path}/commands/c1", 410)["error"]
    finally:
        job.server.stop()
