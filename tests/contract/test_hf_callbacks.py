"""Callbacks of transformers, unmodified."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)
from transformers.integrations import TensorBoardCallback

from headway import TrainerCallback as OurCallback
from headway.testing import tiny_trainer


class Scripted(OurCallback):
    """Replaces the evaluation's loss by a script, before other callbacks see it."""

    priority = 100

    def __init__(self, losses):
        self.losses = list(losses)

    def on_evaluate(self, metrics):
        metrics["eval_loss"] = self.losses.pop(0)


def evaluating(tmp_path, callbacks, **arguments):
    return tiny_trainer(
        tmp_path,
        callbacks,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        max_steps=8,
        **arguments,
    )


def test_early_stopping_stops_when_it_should_and_not_before(tmp_path):
    # Best at the third evaluation, then two without improvement: stop at the fifth.
    losses = [3.0, 2.0, 1.0, 1.5, 1.2, 0.5, 0.4, 0.3]
    trainer = evaluating(
        tmp_path, [Scripted(losses), EarlyStoppingCallback(early_stopping_patience=2)]
    )
    assert trainer.train().global_step == 5
    assert trainer.bus.stopped_by == ("EarlyStoppingCallback", "on_evaluate", "stop")
    assert trainer.state.best_metric == 1.0 and trainer.state.best_global_step == 3


def test_early_stopping_keeps_quiet_while_the_loss_falls(tmp_path):
    losses = [8.0, 7.0, 6.0, 6.5, 5.0, 4.0, 3.0, 2.0]
    trainer = evaluating(
        tmp_path, [Scripted(losses), EarlyStoppingCallback(early_stopping_patience=2)]
    )
    assert trainer.train().global_step == 8


def test_early_stopping_state_survives_a_resume(tmp_path):
    early = EarlyStoppingCallback(early_stopping_patience=3)
    trainer = evaluating(tmp_path, [Scripted([1.0, 2.0, 2.0]), early], stop_at=3)
    assert trainer.train().global_step == 3
    early = EarlyStoppingCallback(early_stopping_patience=3)
    trainer = evaluating(tmp_path, [Scripted([2.0, 9.0]), early])
    assert trainer.train().global_step == 4, "two bad evaluations before the resume, one after"


def test_printer_pops_from_its_own_copy(tmp_path, capsys):
    seen = []

    class After(OurCallback):
        priority = -1

        def on_log(self, logs):
            seen.append(dict(logs))

    trainer = tiny_trainer(tmp_path, [PrinterCallback(), After()], max_steps=2)
    trainer.train()
    assert "'loss'" in capsys.readouterr().out
    assert all("total_flos" in logs for logs in seen[:2])
    assert "total_flos" in trainer.state.log_history[0]


def test_progress_bar_runs_to_the_end(tmp_path, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    tiny_trainer(
        tmp_path, [ProgressCallback()], max_steps=3, eval_strategy="steps", eval_steps=2
    ).train()
    assert "3/3" in stream.getvalue()


def test_default_flow_agrees_with_our_own_cadence(tmp_path):
    def history(directory, callbacks):
        trainer = tiny_trainer(
            directory, callbacks, max_steps=7, logging_steps=3, eval_strategy="steps", eval_steps=2
        )
        trainer.train()
        return sorted((record["step"], *sorted(record)) for record in trainer.state.log_history)

    assert history(tmp_path / "a", [DefaultFlowCallback()]) == history(tmp_path / "b", [])


def test_tensorboard_files_hold_the_losses(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = tiny_trainer(tmp_path, [TensorBoardCallback()], max_steps=3)
    trainer.train()
    [folder] = (tmp_path / "out" / "runs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    [tag] = [t for t in events.Tags()["scalars"] if t.endswith("/loss") or t == "loss"]
    logged = [r["loss"] for r in trainer.state.log_history if "loss" in r]
    assert [e.value for e in events.Scalars(tag)] == pytest.approx(logged)


def test_inherited_no_ops_are_not_dispatched(tmp_path):
    class OnlySave(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            pass

    trainer = tiny_trainer(tmp_path, [OnlySave()])
    assert trainer.bus.listens("on_save")
    assert not trainer.bus.listens("on_step_end")


def test_the_folder_of_a_save_is_found_by_the_step(tmp_path):
    # The save is written in the background and announced at a later step.
    found = []

    class Finds(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            state.own_mark = "is still there"

        def on_save(self, args, state, control, **kwargs):
            assert state.own_mark
            state.trial_name = state.trial_name or f"first saved at {state.global_step}"
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            found.append((state.global_step, (folder / "checkpoint_manifest.json").is_file()))

    trainer = tiny_trainer(tmp_path, [Finds()], save_strategy="steps", save_steps=2, max_steps=5)
    trainer.train()
    assert found == [(2, True), (4, True), (5, True)]
    assert trainer.state.trial_name == "first saved at 2"
    assert trainer.state.global_step == 5


def test_arguments_offer_what_these_callbacks_read(tmp_path):
    args = tiny_trainer(tmp_path, run_name="x").args
    assert args.to_dict()["run_name"] == "x"
    assert '"run_name": "x"' in args.to_json_string()
    assert all(isinstance(v, bool | int | float | str) for v in args.to_sanitized_dict().values())
    assert args.world_size == 1 and args.process_index == 0 and args.n_gpu == 0
    assert args.parallel_mode is not None and args.report_to in ("none", [], ["none"])
    assert args.do_eval in (True, False)


def test_a_best_evaluation_that_was_not_saved_is_told(tmp_path, caplog):
    losses = [1.0, 5.0, 3.0, 4.0]
    trainer = tiny_trainer(
        tmp_path,
        [Scripted(losses)],
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=3,
        load_best_model_at_end=True,
        max_steps=4,
    )
    trainer.train()
    (told,) = [record for record in caplog.records if "load_best_model_at_end" in record.msg]
    assert told.levelname == "WARNING"
    assert "1.0 at step 1" in told.getMessage() and "checkpoint-3" in told.getMessage()
