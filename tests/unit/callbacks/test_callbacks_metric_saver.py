"""The files of MetricSaverCallback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.callbacks import MetricSaverCallback
from headway.callbacks.log.json_reader import read_json_log
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError
from headway.testing import tiny_trainer


def read(path: Path) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    found: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    return found


class Record(TrainerCallback):
    """Records one metric at step 1 only, and fails where it is told to."""

    def __init__(self, fail_at: int = 0) -> None:
        self.fail_at = fail_at

    def on_step_end(self, state: Any, trainer: Any) -> None:
        if state.global_step == 1:
            trainer.record_metric("rare/value", float("nan"))
        if state.global_step == self.fail_at:
            raise RuntimeError("on purpose")


def test_metrics_that_come_late_change_nothing_but_themselves(tmp_path: Path) -> None:
    class Late(TrainerCallback):
        def on_step_end(self, state: Any, trainer: Any) -> None:
            if state.global_step == 4:  # as the duration of a save in the background
                trainer.record_metric("late/value", 7.0, step=2)

    saver = MetricSaverCallback(save_interval=2)
    tiny_trainer(tmp_path, [saver, Late()], max_steps=5).train()
    second = read(tmp_path / "out/metrics_step2.json")
    assert second["_step"] == 2 and second["_steps"]["train/CE loss"] == 2
    assert second["late/value"] == 7.0 and second["_steps"]["late/value"] == 2
    last = read(tmp_path / "out/metrics.json")
    assert last["late/value"] == 7.0 and last["_steps"]["train/CE loss"] == 5


def test_files_at_steps_and_at_the_end_tell_the_step_of_each_value(tmp_path: Path) -> None:
    saver = MetricSaverCallback(save_interval=2, fixed_steps=[3])
    tiny_trainer(
        tmp_path, [saver, Record()], max_steps=5, eval_strategy="steps", eval_steps=5
    ).train()  # fmt: skip
    out = tmp_path / "out"
    assert sorted(p.name for p in out.glob("metrics*.json")) == [
        "metrics.json", "metrics_step2.json", "metrics_step3.json", "metrics_step4.json",
    ]  # fmt: skip
    third = read(out / "metrics_step3.json")
    assert third["_step"] == 3 and third["_steps"]["train/CE loss"] == 3
    assert third["rare/value"] == "nan" and third["_steps"]["rare/value"] == 1
    last = read(out / "metrics.json")
    assert last["_steps"]["train/CE loss"] == 5 and last["_steps"]["eval_loss"] == 5
    assert saver.metrics["train/CE loss"] == last["train/CE loss"] != third["train/CE loss"]


def test_the_last_file_is_written_after_an_error_and_over_an_older_one(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/metrics.json").write_text("old")
    with pytest.raises(RuntimeError, match="on purpose"):
        tiny_trainer(
            tmp_path, [MetricSaverCallback(), Record(fail_at=3)], max_steps=5
        ).train()  # fmt: skip
    assert read(tmp_path / "out/metrics.json")["_step"] >= 2


def test_a_resumed_run_goes_on_with_the_values_and_the_history(tmp_path: Path) -> None:
    def run(max_steps: int) -> MetricSaverCallback:
        saver = MetricSaverCallback(
            metrics_to_capture=["rare/*", "train/*"], history_fname="h.jsonl"
        )
        tiny_trainer(
            tmp_path, [saver, Record()], max_steps=max_steps, save_strategy="steps", save_steps=2,
        ).train()  # fmt: skip
        return saver

    first = run(3)
    state = json.loads(json.dumps(first.state_dict()))
    again = MetricSaverCallback(history_fname="h.jsonl")
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.load_state_dict({})
    assert again.metrics == {}
    second = run(5)
    last = read(tmp_path / "out/metrics.json")
    assert last["rare/value"] == "nan" and last["_steps"]["rare/value"] == 1
    assert last["_steps"]["train/CE loss"] == 5 and "optim/LR (group 0)" not in last
    records = read_json_log(tmp_path / "out/h.jsonl")
    assert [r["global_step"] for r in records] == [1, 2, 3, 4, 5]
    assert records[0]["epoch"] == 0.25 and records[-1]["train/CE loss"] > 0
    assert second.metrics["rare/value"] == "nan"


def test_disabled_it_writes_nothing(tmp_path: Path) -> None:
    tiny_trainer(
        tmp_path, [MetricSaverCallback(enabled=False, save_interval=1)], max_steps=2
    ).train()
    assert not list((tmp_path / "out").glob("metrics*"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"save_interval": 0}, "save_interval must be an integer of at least 1 or None, got 0"),
        ({"fixed_steps": [0]}, "fixed_steps must be a list"),
        ({"fixed_steps": 5}, "fixed_steps must be a list"),
        ({"step_metrics_fname": "m.json", "save_interval": 2}, "must hold {step}"),
        ({"final_metrics_fname": "../m.json"}, "final_metrics_fname must be the name of a file"),
        ({"metrics_to_capture": "train/*"}, "must be a list of patterns"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        MetricSaverCallback(**arguments)


def test_a_second_run_of_one_object_begins_anew(tmp_path: Path) -> None:
    saver = MetricSaverCallback(save_interval=2)
    evaluated = {"eval_strategy": "steps", "eval_steps": 1}
    tiny_trainer(tmp_path / "one", [saver, Record()], max_steps=6, **evaluated).train()
    tiny_trainer(tmp_path / "two", [saver], max_steps=3, **evaluated).train()
    for name in ("metrics_step2.json", "metrics.json"):
        found = read(tmp_path / "two/out" / name)
        assert "rare/value" not in found, "of the run before"
        assert found["_steps"]["eval_loss"] <= found["_step"] == found["_steps"]["train/CE loss"]
