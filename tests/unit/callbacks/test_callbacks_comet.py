"""Comet: what its offline zip holds, and how keys, notifications and tags are handled."""

from __future__ import annotations

import importlib.util
import json
import threading
import types
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headway.callbacks.remote.comet_tracker import CometCallback, CometNotificationSetting
from headway.callbacks.remote.tracker import Ending, RunFacts
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError
from headway.testing import tiny_trainer

# Not imported here: collecting the tests should not pay for it.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("comet_ml") is None, reason="the extra is not installed"
)


def _messages(path) -> list[tuple[str, dict]]:
    with zipfile.ZipFile(path) as archive:
        lines = archive.read("messages.json").decode().splitlines()
    return [(m["type"], m["payload"]) for m in map(json.loads, lines)]


def _metric(messages, name: str) -> list[int]:
    metrics = [p["metric"] for kind, p in messages if kind == "metric_msg"]
    return [m["step"] for m in metrics if m["metricName"] == name]


def _others(messages) -> dict:
    return {p["key"]: p["value"] for kind, p in messages if kind == "log_other"}


class Fail(TrainerCallback):
    def on_step_end(self, state) -> None:
        if state.global_step == 3:
            raise RuntimeError("power")


def test_an_offline_experiment_and_its_resume_have_one_key_and_no_gap(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    common = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "num_samples": 64}
    options = {"offline": True, "name": "kite", "tags": ["t"], "config": {"api_key": "hidden"}}
    with pytest.raises(RuntimeError, match="power"):
        tiny_trainer(tmp_path, [CometCallback(**options), Fail()], **common).train()
    second = CometCallback(**options)
    tiny_trainer(tmp_path, [second], resume_from_checkpoint=True, **common).train()

    files = sorted((tmp_path / "out" / "comet").glob("*.zip"), key=lambda p: p.stat().st_mtime_ns)
    assert len(files) == 2 and all(p.name.startswith(second._exp_key) for p in files)
    before, after = map(_messages, files)
    assert _metric(before, "train/CE loss") == [1, 2]
    assert _metric(after, "train/CE loss") == [3, 4]
    assert _others(before)["Name"] == "kite" and _others(before)["outcome"] == "failed"
    assert "power" in _others(before)["error"]
    assert _others(after)["resumed_from_step"] == 2 and _others(after)["outcome"] == "completed"
    assert _others(after)["error"] == ""
    params = {
        p["param"]["paramName"]: p["param"]["paramValue"]
        for kind, p in before
        if kind == "parameter_msg" and "param" in p
    }
    assert params["api_key"] == "<redacted>" and params["max_steps"] == 4
    with zipfile.ZipFile(files[0]) as archive:
        facts = json.loads(archive.read("experiment.json"))
    assert {"t", "failed"} <= set(facts["tags"]) and facts["resume_strategy"] == "create"
    with zipfile.ZipFile(files[1]) as archive:
        assert json.loads(archive.read("experiment.json"))["resume_strategy"] == "get"


class FakeExperiment:
    def __init__(self, **options) -> None:
        self.options, self.others, self.tags, self.mails = options, {}, [], []
        self.ended = False

    def log_other(self, key, value) -> None:
        self.others[key] = value

    def add_tag(self, tag) -> None:
        self.tags.append(tag)

    def send_notification(self, title, status, additional_data) -> None:
        self.mails.append((title, status, additional_data))

    def end(self) -> None:
        self.ended = True

    set_name = log_parameters = add_tags = lambda self, *args: None


@pytest.fixture
def service(monkeypatch):
    """Stands in for the Comet service, which no test machine has."""
    kinds = {
        name: type(name, (FakeExperiment,), {}) for name in ("Experiment", "ExistingExperiment")
    }
    errors = types.SimpleNamespace(ExperimentNotFound=type("ExperimentNotFound", (Exception,), {}))
    fake = types.SimpleNamespace(**kinds, exceptions=errors, __spec__=types.SimpleNamespace())
    monkeypatch.setitem(__import__("sys").modules, "comet_ml", fake)
    monkeypatch.setenv("COMET_API_KEY", "k")
    monkeypatch.delenv("COMET_MODE", raising=False)
    return fake


def _facts(resumed_step: int | None = None) -> RunFacts:
    return RunFacts("abc", "kite", "out", {"x": 1}, resumed_step)


def test_online_it_goes_on_in_its_experiment_when_the_name_is_the_same(service) -> None:
    first = CometCallback(name="a")
    first.open_run(_facts())
    saved = first.state_dict()
    assert len(saved["experiment_key"]) == 32 and type(first.experiment).__name__ == "Experiment"

    same = CometCallback(name="a")
    same.load_state_dict(saved)
    same.open_run(_facts(4))
    assert type(same.experiment).__name__ == "ExistingExperiment"
    assert same.experiment.options["experiment_key"] == saved["experiment_key"]
    assert same.experiment.others["resumed_from_step"] == 4

    for other in (CometCallback(name="b"), CometCallback(name="a", auto_resume=False)):
        other.load_state_dict(saved)
        other.open_run(_facts(4))
        assert type(other.experiment).__name__ == "Experiment"
        assert other.experiment.options["experiment_key"] != saved["experiment_key"]


def test_a_checkpoint_from_before_the_experiment_was_open_still_finds_it(service) -> None:
    first, again = CometCallback(), CometCallback()
    early = first.state_dict()
    assert early["experiment_key"] is None
    first.open_run(_facts())
    again.load_state_dict(early)
    again.open_run(_facts(2))
    assert again.state_dict() == first.state_dict()
    assert type(again.experiment).__name__ == "ExistingExperiment"


def test_an_experiment_that_is_gone_is_begun_anew(service) -> None:
    def gone(**options):
        raise service.exceptions.ExperimentNotFound()

    service.ExistingExperiment = gone
    tracker = CometCallback()
    tracker.load_state_dict({"experiment_key": "a" * 32, "name": None})
    tracker.open_run(_facts(2))
    assert type(tracker.experiment).__name__ == "Experiment"
    assert tracker.experiment.others == {"resumed_from_step": 2}


@pytest.mark.parametrize(
    ("setting", "ending", "statuses"),
    [
        ("all", Ending("completed"), ["started", "completed"]),
        ("all", Ending("failed", error="x"), ["started", "failed"]),
        ("end_only", Ending("completed"), ["completed"]),
        ("end_only", Ending("stopped", cancelled_by="cancel"), ["cancelled"]),
        ("failure_only", Ending("completed"), []),
        ("failure_only", Ending("interrupted"), []),
        ("failure_only", Ending("aborted"), ["aborted"]),
        (CometNotificationSetting.none, Ending("failed"), []),
    ],
)
def test_mails_go_out_as_set(service, setting, ending, statuses) -> None:
    tracker = CometCallback(notifications=setting)
    tracker.open_run(_facts())
    tracker.finish_run(ending)
    assert [status for _, status, _ in tracker.experiment.mails] == statuses
    assert tracker.experiment.ended


def test_failures_are_tagged_as_named_and_other_ends_by_what_they_are(service) -> None:
    for ending, tags in (
        (Ending("failed"), ["broken"]),
        (Ending("interrupted"), ["interrupted"]),
        (Ending("completed"), []),
    ):
        tracker = CometCallback(failure_tag="broken")
        tracker.open_run(_facts())
        tracker.finish_run(ending)
        assert tracker.experiment.tags == tags


def test_a_resumed_run_that_ends_well_takes_back_what_was_said_of_its_failure(
    service, monkeypatch, caplog
) -> None:
    deleted = []

    class Server:
        def __init__(self, api_key, previous_experiment) -> None:
            assert (api_key, previous_experiment) == ("k", "a" * 32)

        def delete_tags(self, tags) -> None:
            deleted.append(tags)
            if len(deleted) > 1:
                raise RuntimeError("an old server")

    service.APIExperiment = Server
    for _ in range(2):
        tracker = CometCallback(failure_tag="broken", tags=["stopped"])
        tracker.load_state_dict({"experiment_key": "a" * 32, "name": None})
        tracker.open_run(_facts(2))
        tracker.fetch_tags = lambda: ["mine", "broken", "stopped", "interrupted"]
        tracker.finish_run(Ending("completed"))
        assert tracker.experiment.others["error"] == "" and tracker.experiment.ended
    assert deleted == [["broken", "interrupted"]] * 2 and "an old server" in caplog.text


def test_tags_are_asked_for_over_http_with_the_key(service, monkeypatch) -> None:
    seen = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers["Authorization"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"tags": ["x", "CANCEL"]}).encode())

        def log_message(self, *args) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        monkeypatch.setenv("COMET_URL_OVERRIDE", f"http://127.0.0.1:{server.server_port}/clientlib")
        tracker = CometCallback()
        assert tracker.fetch_tags() == (), "not open yet"
        tracker.open_run(_facts())
        assert tracker.fetch_tags() == ["x", "CANCEL"]
    finally:
        server.shutdown()
        server.server_close()
    key = tracker.state_dict()["experiment_key"]
    assert seen == [(f"/api/rest/v2/experiment/tags?experimentKey={key}", "k")]


def test_a_key_is_needed_online_only_and_may_come_from_the_file_of_the_login(
    tmp_path, monkeypatch
) -> None:
    for name in ("COMET_API_KEY", "COMET_MODE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "comet.config"
    monkeypatch.setenv("COMET_CONFIG", str(file))
    with pytest.raises(ConfigError, match=r"COMET_API_KEY.*offline=true"):
        tiny_trainer(tmp_path, [CometCallback()], max_steps=1).train()
    CometCallback(offline=True).check_access()
    file.write_text("[comet]\napi_key=abc\n")
    CometCallback().check_access()
    file.unlink()
    monkeypatch.setenv("COMET_MODE", "offline")
    CometCallback().check_access()


def test_bad_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'end_only'"):
        CometCallback(notifications="end_onl")
    with pytest.raises(ConfigError, match="failure_tag"):
        CometCallback(failure_tag="")
    with pytest.raises(ConfigError, match="workspace"):
        CometCallback(workspace=["x"])
