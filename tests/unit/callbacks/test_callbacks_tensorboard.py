"""TensorBoard: what TensorBoard's own reader finds in the files that a run leaves."""

from __future__ import annotations

import copy
import importlib.util
import logging
import math
import struct
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

from headway.callbacks.log import event_file
from headway.callbacks.log.json_logger import JsonLogger
from headway.callbacks.log.json_reader import read_json_log
from headway.callbacks.log.summary_writer import ResumableSummaryWriter
from headway.callbacks.log.tb_logger import TBLogger, default_tb_scalars
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError
from headway.testing import tiny_trainer

# Not imported here: collecting the tests should not pay for it.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="the extra is not installed"
)


def _read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def _steps(folder, tag: str) -> list[int]:
    return [event.step for event in _read(folder).Scalars(tag)]


def _read_as_the_server_does(folder, tag: str) -> list[int]:
    """Steps of a tag through the reader behind TensorBoard's pages."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"tensors": 0}, tensor_size_guidance=None)
    found._size_guidance["tensors"] = 0
    found.Reload()
    return [event.step for event in found.Tensors(tag)]


def _events(folder) -> list[Path]:
    return sorted(Path(folder).rglob("events.out.tfevents.*"))


def _args(folder, **more) -> SimpleNamespace:
    return SimpleNamespace(
        output_dir=str(folder), logging_dir=str(Path(folder) / "runs" / "1"), **more
    )


def _state(step: int, rank: int = 0) -> TrainerState:
    return TrainerState(global_step=step, is_world_process_zero=rank == 0)


def _killed(writer: ResumableSummaryWriter) -> None:
    """Drop a writer as a kill would: nothing more reaches its file."""
    writer._writer = None


class TestWriter:
    def test_each_step_once_after_many_kills_and_resumes(self, tmp_path) -> None:
        """Checkpoints every 5 steps, a kill some steps later, 30 times within a second or two."""
        args, saved, saved_step = _args(tmp_path), None, 0
        for cycle in range(30):
            writer = ResumableSummaryWriter()
            if saved is not None:
                writer.load_state_dict(saved)
                writer.on_load(args, _state(saved_step), TrainerControl())
            writer.on_init_end(args, _state(saved_step), TrainerControl())
            last = saved_step + 1 + cycle % 9
            for step in range(saved_step + 1, last + 1):
                writer.add_scalar("loss", cycle * 1000 + step, step)
                if step % 5 == 0:
                    saved, saved_step = copy.deepcopy(writer.state_dict()), step
            writer.flush()
            _killed(writer)
        folder = tmp_path / "runs" / "1"
        assert len(_events(folder)) == 30
        wanted = list(range(1, last + 1))
        assert _steps(folder, "loss") == wanted
        assert _read_as_the_server_does(folder, "loss") == wanted

    def test_the_first_resume_already_hides_the_steps_after_the_checkpoint(self, tmp_path) -> None:
        args = _args(tmp_path)
        first = ResumableSummaryWriter()
        first.begin(args, _state(0))
        for step in range(1, 9):
            first.add_scalar("loss", 1.0, step)
        first.close()
        second = ResumableSummaryWriter()
        second.load_state_dict(first.state_dict())
        second.on_load(args, _state(4), TrainerControl())
        second.on_init_end(args, _state(4), TrainerControl())
        second.add_scalar("loss", 2.0, 5)
        second.close()
        folder = tmp_path / "runs" / "1"
        assert _read_as_the_server_does(folder, "loss") == [1, 2, 3, 4, 5]
        assert [e.value for e in _read(folder).Scalars("loss")] == [1.0] * 4 + [2.0]

    def test_steps_of_another_writer_are_hidden_too(self, tmp_path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(tmp_path / "tb") as other:
            for step in range(1, 7):
                other.add_scalar("loss", 1.0, step)
        writer = ResumableSummaryWriter(tmp_path / "tb")
        writer.begin(_args(tmp_path), _state(3))
        writer.add_scalar("loss", 2.0, 4)
        writer.close()
        assert _read_as_the_server_does(tmp_path / "tb", "loss") == [1, 2, 3, 4]

    def test_a_torn_last_record_costs_nothing_before_it(self, tmp_path) -> None:
        args = _args(tmp_path)
        writer = ResumableSummaryWriter()
        writer.begin(args, _state(0))
        for step in (1, 2):
            writer.add_scalar("loss", 1.0, step)
        writer.close()
        (file,) = _events(tmp_path)
        with file.open("ab") as out:
            out.write(struct.pack("<Q", 40) + b"half")
        again = ResumableSummaryWriter()
        again.load_state_dict(writer.state_dict())
        again.on_load(args, _state(2), TrainerControl())
        again.add_scalar("loss", 1.0, 3)
        again.close()
        assert _steps(tmp_path / "runs" / "1", "loss") == [1, 2, 3]

    def test_a_rollback_hides_what_came_after_it_in_all_files(self, tmp_path) -> None:
        args = _args(tmp_path)
        writer = ResumableSummaryWriter()
        writer.begin(args, _state(0))
        for step in range(1, 7):
            writer.add_scalar("loss", 1.0, step)
            writer.add_scalars("norms", {"a": 1.0}, step)
        writer.on_load(args, _state(3), TrainerControl())
        for step in range(4, 6):
            writer.add_scalar("loss", 2.0, step)
            writer.add_scalars("norms", {"a": 2.0}, step)
        writer.close()
        folder = tmp_path / "runs" / "1"
        assert _steps(folder, "loss") == [1, 2, 3, 4, 5]
        assert _steps(folder / "norms_a", "norms") == [1, 2, 3, 4, 5]

    def test_closed_and_used_again_it_hides_nothing(self, tmp_path) -> None:
        writer = ResumableSummaryWriter(tmp_path / "tb")
        writer.begin(_args(tmp_path), _state(2))
        writer.add_scalar("loss", 1.0, 3)
        writer.close()
        writer.add_scalar("loss", 1.0, 4)
        writer.close()
        assert _steps(tmp_path / "tb", "loss") == [3, 4]

    def test_what_a_checkpoint_stands_for_is_on_disk(self, tmp_path) -> None:
        writer = ResumableSummaryWriter()
        writer.begin(_args(tmp_path), _state(0))
        for step in range(1, 51):
            writer.add_scalar("loss", 1.0, step)
        writer.state_dict()
        assert _steps(tmp_path / "runs" / "1", "loss") == list(range(1, 51))
        writer.close()

    def test_a_moved_run_is_found_by_its_relative_path(self, tmp_path) -> None:
        old, new = tmp_path / "old", tmp_path / "new"
        writer = ResumableSummaryWriter()
        writer.begin(_args(old), _state(0))
        writer.add_scalar("loss", 1.0, 1)
        saved = writer.state_dict()
        writer.close()
        assert saved == {"version": 1, "log_dir": "runs/1", "in_output_dir": True}
        old.rename(new)
        again = ResumableSummaryWriter()
        again.load_state_dict(saved)
        again.begin(SimpleNamespace(output_dir=str(new), logging_dir=str(new / "x")), _state(1))
        assert again.log_dir == str(new / "runs" / "1")

    def test_a_folder_that_is_gone_is_told_and_replaced(self, tmp_path, caplog) -> None:
        writer = ResumableSummaryWriter()
        writer.load_state_dict({"log_dir": "nowhere", "in_output_dir": True})
        with caplog.at_level(logging.WARNING):
            writer.begin(_args(tmp_path), _state(3))
        assert "nowhere" in caplog.text
        assert writer.log_dir == str(tmp_path / "runs" / "1")

    @pytest.mark.parametrize("state", [{}, {"log_dir": None}, {"log_dir": 3}, {"other": 1}])
    def test_state_of_another_kind_is_no_error(self, tmp_path, state) -> None:
        writer = ResumableSummaryWriter()
        writer.load_state_dict(state)
        writer.begin(_args(tmp_path), _state(3))
        assert writer.log_dir == str(tmp_path / "runs" / "1")

    def test_nothing_on_disk_before_the_first_write_and_nothing_from_other_ranks(
        self, tmp_path
    ) -> None:
        first, second = ResumableSummaryWriter(), ResumableSummaryWriter()
        first.begin(_args(tmp_path), _state(0))
        second.begin(_args(tmp_path), _state(0, rank=1))
        second.add_scalar("loss", 1.0, 1)
        second.flush()
        second.close()
        first.flush()
        first.close()
        assert list(tmp_path.iterdir()) == []

    def test_a_new_file_is_read_last_whatever_the_clock_says(self, tmp_path, monkeypatch) -> None:
        names = []
        for now_s in (2000.0, 2000.0, 1000.0, 2000.5):
            monkeypatch.setattr(event_file.time, "time", lambda now_s=now_s: now_s)
            file = event_file.EventFile(str(tmp_path))
            names.append(file.path.name)
            file.close()
        assert names == sorted(names) and len(set(names)) == 4

    def test_it_offers_every_method_of_the_writer_of_torch(self, tmp_path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        public = {name for name in vars(SummaryWriter) if not name.startswith("_")}
        assert public <= set(dir(ResumableSummaryWriter))
        with ResumableSummaryWriter(tmp_path) as writer:
            writer.add_text("note", "hello", 1)
            writer.add_histogram("weights", numpy.array([1.0, 2.0, 2.5]), 1)
            writer.add_hparams({"lr": 0.1}, {"best": 1.0}, run_name="hparams")
        tags = _read(tmp_path).Tags()
        assert tags["histograms"] == ["weights"] and "note/text_summary" in tags["tensors"]

    def test_a_folder_must_be_a_path(self) -> None:
        for wrong in (3, "", ["x"]):
            with pytest.raises(ConfigError, match="log_dir"):
                ResumableSummaryWriter(wrong)


def _run(folder, callbacks, steps: int, **arguments):
    trainer = tiny_trainer(folder, callbacks, max_steps=steps, **arguments)
    trainer.train()
    return trainer


class TestLogger:
    def test_a_run_and_its_resume_show_each_step_once(self, tmp_path) -> None:
        common = {"save_strategy": "steps", "save_steps": 2, "num_samples": 64}

        class Fail(TrainerCallback):
            def on_step_end(self, state) -> None:
                if state.global_step == 5:
                    raise RuntimeError("power")

        with pytest.raises(RuntimeError, match="power"):
            _run(tmp_path, [TBLogger(), Fail()], 8, **common)
        logger = TBLogger()
        _run(
            tmp_path,
            [logger],
            8,
            resume_from_checkpoint=True,
            eval_strategy="steps",
            eval_steps=8,
            **common,
        )
        (folder,) = {file.parent for file in _events(tmp_path)}
        found = _read(folder)
        assert [e.step for e in found.Scalars("train-loss")] == list(range(1, 9))
        assert [e.step for e in found.Scalars("train/CE loss")] == list(range(1, 9))
        assert [e.step for e in found.Scalars("learning-rate")] == list(range(1, 9))
        assert [e.step for e in found.Scalars("eval-loss")] == [8]
        loss, perplexity = found.Scalars("eval-loss")[0], found.Scalars("eval-perplexity")[0]
        assert perplexity.value == pytest.approx(math.exp(loss.value), rel=1e-5)
        assert "eval_perplexity" not in found.Tags()["scalars"], "one figure, one name"
        texts = Counter({t: len(found.Tensors(t)) for t in found.Tags()["tensors"]})
        assert texts["training_info/text_summary"] == 1
        assert texts["train_results/text_summary"] == 1
        text = found.Tensors("train_results/text_summary")[0].tensor_proto.string_val[0].decode()
        assert text.startswith("```") and "outcome" in text and "completed" in text

    def test_the_writer_may_be_a_callback_of_the_run_in_any_order(self, tmp_path) -> None:
        writer = ResumableSummaryWriter(tmp_path / "tb")
        logger = TBLogger(experiment_info={"seed": 1, "api_key": "hidden"})
        _run(tmp_path, [logger, writer], 2)
        assert logger.summary_writer is writer
        found = _read(tmp_path / "tb")
        assert [e.step for e in found.Scalars("train-loss")] == [1, 2]
        text = found.Tensors("experiment/text_summary")[0].tensor_proto.string_val[0].decode()
        assert "seed" in text and "hidden" not in text
        assert len(_events(tmp_path)) == 1

    def test_the_figures_of_a_step_are_handed_over_in_one_call(self, tmp_path, monkeypatch) -> None:
        calls = []

        class Counting(event_file.Sender):
            def submit(self, call, **more):
                calls.append(call)
                return super().submit(call, **more)

        monkeypatch.setattr(event_file, "Sender", Counting)
        logger = TBLogger(tmp_path / "tb")
        logger.summary_writer.begin(_args(tmp_path), _state(0))
        logger.summary_writer.add_scalar("first", 0.0, 0)  # opens the file
        opened = len(calls)
        figures = {f"m/{number}": number / 3 for number in range(20)}
        logger.on_metrics(None, _state(1), TrainerControl(), 1, figures)
        logger.on_log(None, _state(1), TrainerControl(), {"loss": 1.0, "peaks": [1, math.nan]})
        assert len(calls) - opened == 2
        logger.on_log(None, _state(1), TrainerControl(), {"loss": 1.0})  # told already
        assert len(calls) - opened == 2
        logger.summary_writer.close()
        found = _read(tmp_path / "tb")
        for name, value in figures.items():
            (event,) = found.Scalars(name)
            assert event.step == 1 and event.value == pytest.approx(value)
        assert {"train-loss", "peaks/0", "peaks/1"} <= set(found.Tags()["scalars"])

    def test_scalars_are_added_changed_and_left_out(self, tmp_path) -> None:
        def broken(value, metrics):
            raise KeyError("x")

        logger = TBLogger(
            tmp_path / "tb",
            {
                "grad-norm": None,
                "double": {"source": "loss", "transform": lambda value, metrics: 2 * value},
                "bad": {"source": "loss", "transform": broken},
            },
        )
        logger.summary_writer.begin(_args(tmp_path), _state(0))
        for step in (1, 2):
            logs = {"loss": 3.0, "grad_norm": 1.0, "extra": 4, "word": "x", "peaks": [1, 2]}
            logger.on_log(None, _state(step), TrainerControl(), logs)
        logger.on_evaluate(None, _state(2), TrainerControl(), {"eval_loss": 1000.0, "loss": 9.0})
        logger.summary_writer.close()
        found = _read(tmp_path / "tb")
        assert found.Scalars("double")[0].value == 6.0
        assert [e.value for e in found.Scalars("train-loss")] == [3.0, 3.0]
        assert found.Scalars("eval-perplexity")[0].value == math.inf
        assert set(found.Tags()["scalars"]) == {
            "train-loss", "double", "extra", "peaks/0", "peaks/1", "eval-loss", "eval-perplexity",
        }  # fmt: skip

    def test_an_end_without_a_record_is_no_error_and_other_ranks_stay_silent(
        self, tmp_path
    ) -> None:
        logger = TBLogger(tmp_path / "tb")
        for rank in (0, 1):
            state = _state(0, rank)
            logger.on_train_end(None, state, TrainerControl())
        state = _state(1, rank=1)
        state.log_history.append({"loss": 1.0})
        logger.on_log(None, state, TrainerControl(), {"loss": 1.0})
        logger.on_train_end(None, state, TrainerControl())
        assert not (tmp_path / "tb").exists()

    def test_bad_scalars_are_refused_by_name(self) -> None:
        with pytest.raises(TypeError, match=r"scalars\['x'\]"):
            TBLogger(scalars={"x": 3})
        with pytest.raises(ConfigError, match="did you mean 'source'"):
            TBLogger(scalars={"x": {"sorce": "loss"}})
        with pytest.raises(ConfigError, match="transform"):
            TBLogger(scalars={"x": {"transform": 3}})
        with pytest.raises(ConfigError, match="summary_writer"):
            TBLogger(summary_writer=object())
        assert default_tb_scalars()["train-loss"] == {"source": "loss"}

    def test_a_folder_that_cannot_be_written_costs_the_curves_and_not_the_run(
        self, tmp_path, caplog
    ) -> None:
        (tmp_path / "tb").write_text("a file is in the way")
        with caplog.at_level(logging.WARNING):
            trainer = _run(tmp_path, [TBLogger(tmp_path / "tb")], 2)
        assert trainer.state.global_step == 2
        assert "TBLogger" in caplog.text


class LogsAtOnce(TrainerCallback):
    priority = 1  # before the loggers hear of the start

    def on_train_begin(self, trainer) -> None:
        trainer.log({"size": 3.0})


def test_what_is_logged_while_a_run_begins_is_written(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, [LogsAtOnce(), TBLogger(), JsonLogger()], max_steps=1)
    trainer.train()
    assert trainer.bus.disabled == {}
    records = read_json_log(tmp_path / "out" / "trainer_logs.jsonl")
    assert [r["global_step"] for r in records if "size" in r] == [0]


def test_a_burst_of_values_loses_none(tmp_path, monkeypatch):
    released = threading.Event()

    class Held(event_file.Sender):
        """Runs nothing until someone waits for it, so that the queue fills up."""

        def submit(self, call, **more):
            return super().submit(lambda: released.wait(20) and call(), **more)

        def drain(self, timeout_s):
            released.set()
            return super().drain(timeout_s)

    monkeypatch.setattr(event_file, "_CAPACITY", 20)
    monkeypatch.setattr(event_file, "Sender", Held)
    writer = ResumableSummaryWriter(str(tmp_path))
    writer.add_scalar("a", 0, 0)
    released.clear()
    for step in range(1, 200):
        writer.add_scalar("a", step, step)
    writer.close()
    assert _steps(tmp_path, "a") == list(range(200))
