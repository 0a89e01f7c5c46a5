"""W&B: what its own offline file holds, and how an online run is opened, rewound and cancelled."""

from __future__ import annotations

import base64
import importlib.util
import json
import struct
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headway.callbacks.remote.tracker import Ending, RunFacts
from headway.callbacks.remote.wandb_tracker import RESUMED, STEP, WandBCallback
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError
from headway.testing import tiny_trainer

# Not imported here: collecting the tests should not pay for it.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="the extra is not installed"
)

_BLOCK_BYTES = 32768


def _read(path: Path):
    """The records of a .wandb file: a log in LevelDB's form, each record a protobuf message."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, []
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def _history(records) -> list[dict]:
    rows = []
    for record in records:
        if record.HasField("history"):
            items = record.history.item
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return rows


class Fail(TrainerCallback):
    def on_step_end(self, state) -> None:
        if state.global_step == 3:
            raise RuntimeError("power")


class Late(TrainerCallback):
    """Tells of an old step, as a save in the background does when it is done."""

    def on_step_end(self, state, trainer) -> None:
        if state.global_step == 4:
            trainer.record_metric("late/x", 5.0, step=1)


def test_an_offline_run_and_its_resume_are_one_run_without_a_gap(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "")  # as if it were not set
    common = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "num_samples": 64}
    options = {
        "mode": "offline",
        "project": "p",
        "tags": ["t"],
        "name": "kite",
        "config": {"secret_key": "hidden"},
    }
    first, second = WandBCallback(**options), WandBCallback(**options)
    with pytest.raises(RuntimeError, match="power"):
        tiny_trainer(tmp_path, [first, Fail()], **common).train()
    tiny_trainer(tmp_path, [second, Late()], resume_from_checkpoint=True, **common).train()
    import wandb

    wandb.teardown()  # its process writes the end of a file some time after `finish`

    files = sorted(tmp_path.glob("out/wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    records = [list(_read(file)) for file in files]
    ids = {r.run.run_id for some in records for r in some if r.HasField("run")}
    assert len(ids) == 1, "a resumed run keeps its id"
    run = next(r.run for r in records[0] if r.HasField("run"))
    assert run.project == "p" and run.display_name == "kite" and list(run.tags) == ["t"]
    config = {c.key: c.value_json for c in run.config.update}
    assert json.loads(config["secret_key"]) == "<redacted>"
    assert json.loads(config["max_steps"]) == 4

    before, after = _history(records[0]), _history(records[1])
    assert [row["_step"] for row in before if "train/CE loss" in row] == [1, 2]
    assert [row["_step"] for row in after if "train/CE loss" in row] == [3, 4]
    assert [row[STEP] for row in after if "train/CE loss" in row] == [3, 4]
    assert [row[RESUMED] for row in after if RESUMED in row] == [2]
    assert [row["late/x"] for row in after if "late/x" in row] == [5.0]

    assert [r.exit.exit_code for r in records[0] if r.HasField("exit")] == [1]
    assert [r.exit.exit_code for r in records[1] if r.HasField("exit")] == [0]
    summaries = [
        {
            item.key: json.loads(item.value_json)
            for r in some
            if r.HasField("summary")
            for item in r.summary.update
        }
        for some in records
    ]
    assert summaries[0]["outcome"] == "failed" and "power" in summaries[0]["error"]
    assert summaries[1]["outcome"] == "completed" and summaries[1]["error"] is None
    tags = [list(r.run.tags) for r in records[0] if r.HasField("run")]
    assert "failed" in tags[-1]


class FakeRun:
    def __init__(self, starting_step: int) -> None:
        self.starting_step = self.step = starting_step
        self.rows: list[tuple[int, dict]] = []
        self.summary: dict = {}
        self.tags: tuple = ()
        self.entity, self.project, self.id, self.path = "e", "p", "r", "e/p/r"
        self.exit_code: int | None = None

    def define_metric(self, *names, **options) -> None:
        pass

    def log(self, row, step) -> None:
        self.rows.append((step, row))
        self.step = step

    def finish(self, exit_code) -> None:
        self.exit_code = exit_code


@pytest.fixture
def service(monkeypatch):
    """Stands in for the W&B service, which no test machine has; records how it is asked."""
    fake = types.SimpleNamespace(
        asked=[],
        rewinds=True,
        starting_step=0,
        Settings=lambda **s: s,
        run=None,
        __spec__=types.SimpleNamespace(),
    )

    def init(**options):
        fake.asked.append(options)
        if "resume_from" in options and not fake.rewinds:
            raise RuntimeError("rewind is not enabled")
        fake.run = FakeRun(fake.starting_step)
        return fake.run

    fake.init = init
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    for name in ("WANDB_MODE", "WANDB_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    return fake


def _facts(resumed_step: int | None = None) -> RunFacts:
    return RunFacts("abc", "kite", "out", {"x": 1}, resumed_step)


def test_an_online_resume_rewinds_the_run_to_the_checkpoint(service) -> None:
    tracker = WandBCallback()
    tracker.load_state_dict({"run_id": "abc", "offset": 0})
    service.starting_step = 5
    tracker.open_run(_facts(4))
    (asked,) = service.asked
    assert asked["resume_from"] == "abc?_step=4" and asked["id"] is None and "resume" not in asked
    tracker.send(5, {"loss": 1.0})
    assert service.run.rows[-1] == (5, {"loss": 1.0, STEP: 5})


def test_a_server_that_cannot_rewind_gets_a_mark_and_later_rows(service, caplog) -> None:
    service.rewinds, service.starting_step = False, 8
    tracker = WandBCallback()
    tracker.load_state_dict({"run_id": "abc"})
    tracker.open_run(_facts(4))
    assert [("resume_from" in asked, asked.get("resume")) for asked in service.asked] == [
        (True, None),
        (False, "allow"),
    ]
    assert service.asked[1]["id"] == "abc"
    assert "could not be rewound" in caplog.text
    tracker.send(5, {"loss": 1.0})
    assert service.run.rows == [
        (8, {RESUMED: 4, STEP: 5}),
        (8, {"loss": 1.0, STEP: 5}),
    ]
    assert tracker.state_dict() == {"version": 1, "run_id": "abc", "offset": 3}
    again = WandBCallback()
    again.load_state_dict(tracker.state_dict())
    service.rewinds, service.starting_step = True, 10
    again.open_run(_facts(6))
    assert service.asked[-1]["resume_from"] == "abc?_step=9"


def test_a_rollback_goes_on_after_the_rows_that_are_there(service) -> None:
    tracker = WandBCallback()
    tracker.open_run(_facts())
    for step in (1, 2, 3):
        tracker.send(step, {"loss": 1.0})
    tracker.mark_rewind(1)
    tracker.send(2, {"loss": 2.0})
    steps = [step for step, _ in service.run.rows]
    assert steps == sorted(steps) and service.run.rows[-1][1] == {"loss": 2.0, STEP: 2}
    assert service.run.rows[-2][1] == {RESUMED: 1, STEP: 2}


@pytest.mark.parametrize(
    ("ending", "code", "label"),
    [
        (Ending("completed"), 0, "completed"),
        (Ending("stopped"), 0, "stopped"),
        (Ending("stopped", cancelled_by="cancel"), 255, "cancelled"),
        (Ending("interrupted"), 255, "interrupted"),
        (Ending("aborted"), 1, "aborted"),
        (Ending("failed", error="x"), 1, "failed"),
    ],
)
def test_each_outcome_has_its_exit_code_and_tag(service, ending, code, label) -> None:
    tracker = WandBCallback()
    tracker.open_run(_facts())
    tracker.finish_run(ending)
    assert service.run.exit_code == code and service.run.summary["outcome"] == label
    assert service.run.tags == (() if label == "completed" else (label,))


def test_a_resumed_run_that_ends_well_takes_back_what_was_said_of_its_failure(service) -> None:
    tracker = WandBCallback(tags=["stopped"])  # the user's own word
    tracker.load_state_dict({"run_id": "abc"})
    tracker.open_run(_facts(4))
    service.run.tags, service.run.summary = ("mine", "stopped", "failed"), {"error": "power"}
    tracker.finish_run(Ending("completed"))
    assert service.run.tags == ("mine", "stopped")
    assert service.run.summary == {"outcome": "completed", "error": None}


def test_tags_are_asked_for_over_http_with_the_key(service, monkeypatch) -> None:
    seen = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, self.headers["Authorization"], body["variables"]))
            answer = json.dumps({"data": {"project": {"run": {"tags": ["Cancel"]}}}}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}/")
        tracker = WandBCallback()
        assert tracker.fetch_tags() == (), "not open yet"
        tracker.open_run(_facts())
        assert tracker.fetch_tags() == ["Cancel"]
    finally:
        server.shutdown()
        server.server_close()
    ((path, login, variables),) = seen
    assert path == "/graphql" and variables == {"entity": "e", "project": "p", "run": "r"}
    assert base64.b64decode(login.removeprefix("Basic ")).decode() == "api:" + "k" * 40


class TestAccess:
    @pytest.fixture(autouse=True)
    def nobody(self, monkeypatch, tmp_path) -> None:
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DISABLED", "WANDB_BASE_URL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    def test_online_without_a_key_ends_before_the_first_step(self, tmp_path) -> None:
        with pytest.raises(ConfigError, match=r"WANDB_API_KEY.*offline"):
            tiny_trainer(tmp_path, [WandBCallback()], max_steps=1).train()

    def test_a_login_in_netrc_is_enough(self, tmp_path) -> None:
        (tmp_path / "netrc").write_text("machine api.wandb.ai login user password abc\n")
        WandBCallback().check_access()

    def test_offline_and_disabled_need_no_key(self, monkeypatch) -> None:
        WandBCallback(mode="offline").check_access()
        WandBCallback(mode="disabled").check_access()
        monkeypatch.setenv("WANDB_MODE", "offline")
        WandBCallback().check_access()

    def test_bad_options_are_refused_by_name(self, monkeypatch) -> None:
        with pytest.raises(ConfigError, match="did you mean 'offline'"):
            WandBCallback(mode="offlin")
        with pytest.raises(ConfigError, match="tags"):
            WandBCallback(tags="x")
        with pytest.raises(ConfigError, match="project"):
            WandBCallback(project=3)
        monkeypatch.setenv("WANDB_MODE", "nowhere")
        with pytest.raises(ConfigError, match="WANDB_MODE"):
            WandBCallback().check_access()
