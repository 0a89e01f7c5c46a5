"""What JsonLogger records of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headway.callbacks import JsonLogger
from headway.callbacks.log.json_reader import read_json_log
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError
from headway.testing import tiny_trainer


def steps_of(records: list[dict[str, Any]], kind: str) -> list[int]:
    return [record["global_step"] for record in records if record["type"] == kind]


@pytest.mark.parametrize(
    ("form", "name"), [("lines", "trainer_logs.jsonl"), ("array", "trainer_logs.json")]
)
def test_train_evaluate_save_resume(tmp_path: Path, form: str, name: str) -> None:
    common: dict[str, Any] = {
        "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
    }  # fmt: skip
    tiny_trainer(tmp_path, [JsonLogger(format=form, note="first")], max_steps=4, **common).train()
    path = tmp_path / "out" / name
    records = read_json_log(path)
    assert [r["type"] for r in records] == [
        "start", "train", "train", "eval", "train", "train", "eval", "summary",
    ]  # fmt: skip
    assert records[0]["kwargs"] == {"note": "first"} and records[0]["max_steps"] == 4
    assert steps_of(records, "train") == [1, 2, 3, 4] and steps_of(records, "eval") == [2, 4]
    assert {"timestamp", "global_step", "epoch", "loss", "learning_rate"} <= set(records[1])
    assert records[3]["eval_loss"] > 0 and records[-1]["train_runtime"] > 0
    if form == "array":
        assert json.loads(path.read_text()) == records

    again = tiny_trainer(
        tmp_path, [JsonLogger(format=form, note="second")], max_steps=5,
        resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"), **common,
    )  # fmt: skip
    again.train()
    records = read_json_log(path)
    assert steps_of(records, "train") == [1, 2, 3, 4, 5]
    assert steps_of(records, "eval") == [2, 4, 5] and steps_of(records, "summary") == [5]
    (resumed,) = [r for r in records if r["type"] == "resume"]
    assert resumed["global_step"] == 2 and resumed["kwargs"] == {"note": "second"}
    assert resumed["loaded_checkpoint"].endswith("checkpoint-2")
    # Both tell where the run stood before its first step.
    assert records[0]["epoch"] == 0.0 and resumed["epoch"] == records[2]["epoch"]


class RollBack(TrainerCallback):
    def __init__(self) -> None:
        self.done = False

    def on_step_end(self, args: Any, state: Any, control: Any) -> None:
        if state.global_step == 4 and not self.done:
            self.done = control.rollback = True


def test_what_a_rollback_undoes_leaves_the_log(tmp_path: Path) -> None:
    callbacks = [JsonLogger(), RollBack()]
    tiny_trainer(
        tmp_path, callbacks, max_steps=5, save_strategy="steps", save_steps=2
    ).train()  # fmt: skip
    records = read_json_log(tmp_path / "out/trainer_logs.jsonl")
    assert steps_of(records, "train") == [1, 2, 3, 4, 5]
    assert steps_of(records, "rollback") == [2]


def test_metrics_that_only_come_with_on_evaluate_are_recorded(tmp_path: Path) -> None:
    class Scores(TrainerCallback):
        def on_step_end(self, trainer: Any) -> None:
            trainer.bus.fire("on_evaluate", metrics={"eval_score": float("nan")})

    tiny_trainer(tmp_path, [JsonLogger(), Scores()], max_steps=1).train()
    records = read_json_log(tmp_path / "out/trainer_logs.jsonl")
    assert [r["eval_score"] for r in records if r["type"] == "eval"] == ["nan"]


def test_two_that_would_write_one_file_are_told_and_the_first_writes_it(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, [JsonLogger(), JsonLogger()], max_steps=2)
    trainer.train()
    assert list(trainer.bus.disabled) == ["JsonLogger_2"]
    assert "trainer_logs.jsonl is being written" in trainer.bus.disabled["JsonLogger_2"]
    (path,) = (tmp_path / "out").glob("trainer_logs*")
    assert steps_of(read_json_log(path), "train") == [1, 2]


def test_an_unwritable_folder_is_told_at_the_start_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").write_text("a file")
    seen: list[str] = []

    class Watch(TrainerCallback):
        def on_step_begin(self) -> None:
            seen.append(caplog.text)

    trainer = tiny_trainer(
        tmp_path, [JsonLogger(), Watch()], max_steps=2, logging_dir=str(tmp_path / "logs/here")
    )
    assert trainer.train().global_step == 2
    assert "cannot be written" in seen[0] and "goes on without this log" in seen[0]
    assert caplog.text.count("JsonLogger:") == 1


@pytest.mark.parametrize(
    ("full", "verb", "kept"),
    [({2, 3}, "write", [1, 4]), ({1, 2}, "open", [3, 4]), ({1, 2, 3, 4, 5}, "open", [])],
    ids=["for a while", "from the start", "all the time"],
)
@pytest.mark.parametrize("form", ["lines", "array"])
def test_a_full_disk_costs_the_records_of_its_time_and_is_told_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    form: str,
    full: set[int],
    verb: str,
    kept: list[int],
) -> None:
    mine, real = JsonLogger(format=form), {verb: getattr(os, verb) for verb in ("open", "write")}

    def fail(target: Any, *rest: Any) -> Any:
        if trainer.state.global_step in full and (
            str(target).endswith(mine.writer.filename) or target == mine.writer._file
        ):
            if verb == "write":
                real["write"](target, rest[0][:9])
            raise OSError(28, "No space left on device")
        return real[verb](target, *rest)

    monkeypatch.setattr(os, verb, fail)
    trainer = tiny_trainer(tmp_path, [mine], max_steps=4)
    assert trainer.train().global_step == 4 and trainer.bus.disabled == {}
    monkeypatch.undo()
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("JsonLogger:")]
    num_lost = 2 if kept else 5
    assert len(told) == 2 and "No space left on device" in told[0]
    assert told[1] == f"JsonLogger: {num_lost} records could not be written"
    path = tmp_path / "out" / mine.writer.filename
    assert steps_of(read_json_log(path) if path.exists() else [], "train") == kept


def test_a_chosen_logging_dir_is_used_and_an_evaluation_alone_writes_nothing(
    tmp_path: Path,
) -> None:
    trainer = tiny_trainer(
        tmp_path, [JsonLogger("mine.jsonl")], max_steps=2, logging_dir=str(tmp_path / "logs")
    )
    trainer.evaluate()
    assert not (tmp_path / "logs").exists()
    trainer.train()
    written = (tmp_path / "logs/mine.jsonl").read_text()
    trainer.evaluate()
    assert (tmp_path / "logs/mine.jsonl").read_text() == written


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'array'"):
        JsonLogger(format="aray")
    with pytest.raises(ConfigError, match="without a folder"):
        JsonLogger("logs/mine.jsonl")


@pytest.mark.parametrize("form", ["lines", "array"])
def test_a_complete_run_that_is_only_evaluated_again_keeps_its_summary(
    tmp_path: Path, form: str
) -> None:
    def run(max_steps: int, **options: Any) -> list[dict[str, Any]]:
        log = JsonLogger(format=form)
        tiny_trainer(
            tmp_path, [log], max_steps=max_steps, save_strategy="steps", save_steps=1, **options
        ).train()
        assert log.writer.path is not None
        return read_json_log(log.writer.path)

    (summary,) = [record for record in run(2) if record["type"] == "summary"]
    evaluated = {"eval_strategy": "steps", "eval_steps": 2}
    records = run(2, **evaluated)
    assert [r["type"] for r in records] == ["start", "train", "train", "resume", "eval", "summary"]
    assert records[-1] == summary and summary["train_samples"] > 0
    after = run(3, **evaluated)
    assert steps_of(after, "summary") == [3] and steps_of(after, "eval") == [2, 3]


class MeasureTraining(TrainerCallback):
    def on_step_end(self, trainer: Any) -> None:
        trainer.evaluate(trainer.train_dataset, metric_key_prefix="train")


def test_an_evaluation_called_train_is_no_summary(tmp_path: Path) -> None:
    tiny_trainer(tmp_path, [MeasureTraining(), JsonLogger()], max_steps=2).train()
    records = read_json_log(tmp_path / "out" / "trainer_logs.jsonl")
    assert steps_of(records, "eval") == [1, 2] and steps_of(records, "summary") == [2]
