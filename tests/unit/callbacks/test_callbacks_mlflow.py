"""MLflow: what its own client reads back from a file store."""

from __future__ import annotations

import importlib.util

import pytest

from headway.callbacks.remote.mlflow_tracker import MLflowCallback
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError
from headway.testing import tiny_trainer

# Not imported here: collecting the tests should not pay for it.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None, reason="the extra is not installed"
)


class Fail(TrainerCallback):
    def on_step_end(self, state) -> None:
        if state.global_step == 3:
            raise RuntimeError("power")


@pytest.fixture(autouse=True)
def _no_server(monkeypatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def _client(folder):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=folder.resolve().as_uri())


def _only_run(client):
    experiment = client.get_experiment_by_name("headway")
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def _steps(client, run, name: str) -> list[int]:
    return [m.step for m in client.get_metric_history(run.info.run_id, name)]


_COMMON = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "num_samples": 64}


def test_a_run_and_its_resume_are_one_run_without_a_gap(tmp_path) -> None:
    options = {"name": "kite", "tags": {"team": "a"}, "config": {"token": "hidden", "n": {"m": 1}}}
    first = MLflowCallback(**options)
    with pytest.raises(RuntimeError, match="power"):
        tiny_trainer(tmp_path, [first, Fail()], **_COMMON).train()
    client = _client(tmp_path / "out" / "mlruns")
    run = _only_run(client)
    assert run.info.status == "FAILED" and run.data.tags["headway.outcome"] == "failed"
    assert "power" in run.data.tags["headway.error"]

    second = MLflowCallback(**options)
    tiny_trainer(tmp_path, [second], resume_from_checkpoint=True, **_COMMON).train()
    run = _only_run(client)
    assert run.info.run_id == first.run_id == second.run_id
    assert run.info.status == "FINISHED" and run.info.run_name == "kite"
    assert _steps(client, run, "train/CE loss") == [1, 2, 3, 4]
    assert _steps(client, run, "optim/LR _group 0_") == [1, 2, 3, 4]
    tags = run.data.tags
    assert tags["team"] == "a" and tags["headway.resumed_from_step"] == "2"
    assert tags["headway.outcome"] == "completed" and "headway.error" not in tags
    params = run.data.params
    assert params["token"] == "<redacted>" and params["n.m"] == "1" and params["max_steps"] == "4"


def test_a_run_is_found_by_its_own_id_when_the_checkpoint_was_made_too_early(tmp_path) -> None:
    first = MLflowCallback()
    with pytest.raises(RuntimeError, match="power"):
        tiny_trainer(tmp_path, [first, Fail()], **_COMMON).train()
    second = MLflowCallback()
    second.load_state_dict = lambda state: None
    tiny_trainer(tmp_path, [second], resume_from_checkpoint=True, **_COMMON).train()
    assert second.run_id == first.run_id


def test_a_tag_in_the_store_cancels_the_run(tmp_path) -> None:
    tracker = MLflowCallback(cancel_check_interval=1)
    client = _client(tmp_path / "out" / "mlruns")

    class Somebody(TrainerCallback):
        priority = -50

        def on_step_end(self, state) -> None:
            assert tracker._sender.drain(60)
            if state.global_step == 1:
                client.set_tag(tracker.run_id, "Cancelled", "false")
            if state.global_step == 2:
                client.set_tag(tracker.run_id, "Cancelled", "yes")
            assert tracker.cancel._sender.drain(60)

    trainer = tiny_trainer(tmp_path, [tracker, Somebody()], max_steps=30, num_samples=64)
    trainer.train()
    assert trainer.state.global_step in (3, 4)
    run = _only_run(client)
    assert run.info.status == "KILLED" and run.data.tags["headway.outcome"] == "cancelled"


def test_a_server_that_cannot_be_reached_costs_the_figures_and_not_the_run(
    tmp_path, caplog, monkeypatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = MLflowCallback(tracking_uri="http://127.0.0.1:9", close_timeout_s=20)
    trainer = tiny_trainer(tmp_path, [tracker], max_steps=2)
    trainer.train()
    assert trainer.state.outcome == "completed"
    assert "MLflowCallback" in caplog.text


def test_bad_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="tags"):
        MLflowCallback(tags=["x"])
    with pytest.raises(ConfigError, match="tracking_uri"):
        MLflowCallback(tracking_uri="")
