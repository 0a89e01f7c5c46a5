"""Trackio: what its local database holds."""

from __future__ import annotations

import importlib.util
import json
import logging
import sqlite3
import uuid

import pytest

from headway.callbacks.remote.trackio_tracker import RESUMED, TrackioCallback
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError
from headway.testing import tiny_trainer

# Not imported here: collecting the tests should not pay for it.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trackio") is None, reason="the extra is not installed"
)


class Fail(TrainerCallback):
    def on_step_end(self, state) -> None:
        if state.global_step == 3:
            raise RuntimeError("power")


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory):
    """The package decides at its import where databases lie."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_PROJECT"):
            patch.delenv(name, raising=False)
        yield


def test_a_run_and_its_resume_are_one_run_without_a_gap(tmp_path, capsys, caplog) -> None:
    caplog.set_level(logging.INFO, "headway.callbacks.remote")
    common = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "num_samples": 64}
    project = f"p{uuid.uuid4().hex}"
    options = {"project": project, "name": "kite", "config": {"password": "hidden"}}
    with pytest.raises(RuntimeError, match="power"):
        tiny_trainer(tmp_path, [TrackioCallback(**options), Fail()], **common).train()
    again = TrackioCallback(**options)
    tiny_trainer(tmp_path, [again], resume_from_checkpoint=True, **common).train()
    assert capsys.readouterr().out == "" and "Trackio project initialized" in caplog.text
    assert "\x1b" not in caplog.text

    from trackio.utils import TRACKIO_DIR

    with sqlite3.connect(TRACKIO_DIR / f"{project}.db") as database:
        rows = database.execute("select run_id, run_name, step, metrics from metrics order by id")
        found = [(run, name, step, json.loads(text)) for run, name, step, text in rows]
        (config,) = database.execute("select config from configs").fetchone()
        alerts = [row[0] for row in database.execute("select title from alerts order by id")]
    assert len({run for run, *_ in found}) == 1
    assert {name for _, name, *_ in found} == {again.state_dict()["run_name"]}
    assert [step for *_, step, m in found if "train/CE loss" in m] == [1, 2, 3, 4]
    assert [m[RESUMED] for *_, m in found if RESUMED in m] == [2]
    settings = json.loads(config)
    assert settings["password"] == "<redacted>" and settings["max_steps"] == 4
    assert alerts == ["run failed", "run completed"]


def test_a_space_needs_a_token(monkeypatch, tmp_path) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("headway.callbacks.remote.trackio_tracker._hub_token", lambda: None)
    TrackioCallback().check_access()
    with pytest.raises(ConfigError, match="HF_TOKEN"):
        TrackioCallback(space_id="me/space").check_access()


def test_bad_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="project"):
        TrackioCallback(project="")
