"""When metrics reach the callbacks, what a bad step leads to, what a failed run leaves behind."""

from __future__ import annotations

import json
import math

import pytest
import torch

from headway import TrainerCallback
from headway.engine.delivery import NonFiniteError
from headway.engine.flushing import Flusher
from headway.engine.metrics import MetricBuffer
from headway.testing import tiny_trainer


class Sink(TrainerCallback):
    def __init__(self):
        self.came = []

    def on_metrics(self, step, metrics, state):
        self.came.append((state.global_step, step, dict(metrics)))

    def of(self, name):
        return [(step, metrics[name]) for _, step, metrics in self.came if name in metrics]


class Poison(TrainerCallback):
    """Makes the gradients of one step not finite."""

    def __init__(self, step):
        self.step = step

    def on_gradients(self, state, model):
        if state.global_step + 1 == self.step:
            next(model.parameters()).grad.fill_(math.nan)


QUIET = {"logging_strategy": "no", "num_samples": 64}


def test_a_metric_belongs_to_the_step_it_describes(tmp_path):
    class Record(TrainerCallback):
        def on_train_begin(self, trainer):
            trainer.record_metric("early", 1.0)

        def on_step_end(self, state, trainer):
            if state.global_step == 4:
                trainer.record_metric("late", 4.0, step=2, namespace="mine")
                trainer.record_ce_loss(torch.tensor(0.5))
                assert trainer.get_metric("loss") == 0.5
                assert trainer.get_metric("late", "mine") is None  # of another step

    sink = Sink()
    tiny_trainer(tmp_path, [Record(), sink], max_steps=5, **QUIET).train()
    assert sink.of("early") == [(0, 1.0)]
    assert sink.of("mine/late") == [(2, 4.0)]
    losses = dict(sink.of("train/CE loss"))
    assert list(losses) == [1, 2, 3, 4, 5] and losses[4] == 0.5


def test_deliveries_in_between_and_at_the_end_of_an_epoch(tmp_path):
    sink = Sink()
    options = {**QUIET, "num_samples": 10, "num_train_epochs": 2, "metrics_collect_interval": 2}
    tiny_trainer(tmp_path, [sink], **options).train()
    # 5 steps an epoch: the first step, multiples of 2 one step later, the epoch's end at once.
    assert [(at, step) for at, step, _ in sink.came] == [
        (2, 1), (3, 2), (5, 3), (5, 4), (5, 5), (7, 6), (9, 7), (9, 8), (10, 9), (10, 10),
    ]  # fmt: skip


def test_every_group_has_its_learning_rate(tmp_path):
    trainer = tiny_trainer(tmp_path, [sink := Sink()], max_steps=2, learning_rate=1e-3)
    trainer._optimizer_groups = {
        "norms": {"regex": "norm", "config": {"lr": 2e-3}},
        "rest": {"regex": ".", "config": {}},
    }
    trainer.train()
    rates = [
        {name: value for name, value in metrics.items() if name.startswith("optim/LR")}
        for _, step, metrics in sink.came
        if step == 1
    ]
    assert rates == [{"optim/LR (group 0)": 2e-3, "optim/LR (group 1)": 1e-3}]


def test_a_bad_step_is_acted_on_before_a_save(tmp_path):
    trainer = tiny_trainer(
        tmp_path,
        [Poison(4)],
        max_steps=8,
        nonfinite_action="raise",
        save_strategy="steps",
        save_steps=2,
        metrics_collect_interval=100,
        **QUIET,
    )
    with pytest.raises(NonFiniteError, match="not finite at step 4"):
        trainer.train()
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize("action", ["raise", "stop"])
def test_a_bad_step_is_noticed_though_no_log_is_due(tmp_path, action):
    trainer = tiny_trainer(
        tmp_path,
        [Poison(2)],
        max_steps=20,
        nonfinite_action=action,
        metrics_collect_interval=3,
        **QUIET,
    )
    if action == "raise":
        with pytest.raises(NonFiniteError, match="not finite at step 2"):
            trainer.train()
    else:
        trainer.train()
        assert trainer.bus.stopped_by == ("loop", "nonfinite", "stop")
    assert trainer.state.global_step == 4, "flushed at step 3, delivered at step 4"


def test_a_flag_raised_in_on_metrics_acts_at_that_step(tmp_path):
    class StopAtTwo(TrainerCallback):
        def on_metrics(self, step, control):
            control.should_training_stop |= step == 2

    trainer = tiny_trainer(
        tmp_path, [StopAtTwo()], max_steps=9, metrics_collect_interval=2, **QUIET
    )
    assert trainer.train().global_step == 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saves_and_loads_are_timed_under_their_step(tmp_path, asynchronous):
    options = {"save_strategy": "steps", "save_steps": 2, "save_async": asynchronous, **QUIET}
    tiny_trainer(tmp_path, [sink := Sink()], max_steps=2, **options).train()
    assert [step for step, _ in sink.of("checkpoint/save_duration_s")] == [2]
    in_background = [step for step, _ in sink.of("checkpoint/save_async_duration_s")]
    assert in_background == ([2] if asynchronous else [])
    tiny_trainer(tmp_path, [sink := Sink()], max_steps=3, **options).train()
    [(step, seconds)] = sink.of("checkpoint/load_duration_s")
    assert step == 2 and 0 < seconds < 60


class Fail(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, state, trainer):
        trainer.record_metric("bad", math.inf)
        if state.global_step == self.step:
            raise RuntimeError("out of memory\nand more")

    def on_window(self, state):
        if self.step == state.global_step == 0:
            raise RuntimeError("at once")


def test_a_failed_run_leaves_what_was_not_delivered(tmp_path):
    trainer = tiny_trainer(tmp_path, [Fail(7), sink := Sink()], max_steps=9, **QUIET)
    with pytest.raises(RuntimeError):
        trainer.train()
    dump = json.loads((tmp_path / "out" / "last_metrics-rank0.json").read_text())
    assert dump["error"] == "RuntimeError: callback 'Fail', on_step_end: out of memory"
    assert (dump["rank"], dump["global_step"], dump["run_id"]) == (0, 7, trainer.run_id)
    # Steps 1 to 5 were delivered at the end of step 6.
    assert [step for _, step, _ in sink.came] == [1, 2, 3, 4, 5]
    assert list(dump["metrics"]) == ["6", "7"]
    assert dump["metrics"]["7"]["bad"] == "inf"
    assert 0 < dump["metrics"]["6"]["train/CE loss"] < 10


def test_a_flush_under_way_is_part_of_what_a_failed_run_leaves(tmp_path):
    with pytest.raises(RuntimeError):
        tiny_trainer(tmp_path, [Fail(6)], max_steps=9, **QUIET).train()
    dump = json.loads((tmp_path / "out" / "last_metrics-rank0.json").read_text())
    assert list(dump["metrics"]) == ["2", "3", "4", "5", "6"]


def test_a_run_that_ends_well_or_cannot_start_leaves_no_such_file(tmp_path):
    tiny_trainer(tmp_path, max_steps=2, **QUIET).train()
    assert not list(tmp_path.rglob("last_metrics*"))
    with pytest.raises(RuntimeError):
        tiny_trainer(tmp_path / "other", [Fail(0)], max_steps=2, **QUIET).train()
    assert not (tmp_path / "other").exists()


class BrokenChannel:
    rank, world_size, timeout_s = 0, 2, 10.0

    def reduce(self, values, operation):
        raise RuntimeError("connection closed by peer")


def test_an_error_in_the_background_comes_up_with_the_result_and_loses_nothing():
    buffer = MetricBuffer()
    buffer.record(3, "x", torch.tensor(1.0), "sum")
    flusher = Flusher(buffer, BrokenChannel())
    flusher.start()
    buffer.record(4, "x", torch.tensor(1.0), "sum")
    with pytest.raises(RuntimeError, match="closed by peer"):
        flusher.finish()
    assert list(flusher.pending()) == [3, 4]
    flusher.close()


def test_a_step_comes_once_and_again_only_with_what_was_recorded_late(tmp_path):
    class Late(TrainerCallback):
        def on_train_begin(self, trainer):
            trainer.record_metric("at the beginning", 1.0)

        def on_step_end(self, state, trainer):
            trainer.record_metric("own", 1.0)
            if state.global_step == 7:
                trainer.record_metric("late", 2.0, step=1)

    sink = Sink()
    options = {"max_steps": 9, "logging_steps": 4, "num_samples": 32}
    tiny_trainer(tmp_path, [Late(), sink], **options).train()
    whole = [step for _, step, metrics in sink.came if "optim/total grad norm" in metrics]
    assert whole == list(range(1, 10))
    assert all("own" in metrics for _, step, metrics in sink.came if "train/CE loss" in metrics)
    rest = [(s, m) for _, s, m in sink.came if "optim/total grad norm" not in m]
    assert rest == [(0, {"at the beginning": 1.0}), (1, {"late": 2.0})]
    assert all(step <= now for now, step, _ in sink.came)


@pytest.mark.parametrize("logging_steps", [1, 5])
def test_the_mean_loss_is_without_steps_that_were_given_up(tmp_path, logging_steps):
    class Ruin(TrainerCallback):
        done = False

        def on_step_begin(self, state, model):
            if state.global_step == 6 and not self.done:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(9)

        def on_step_end(self, state, control):
            if state.global_step == 8 and not self.done:
                self.done = control.rollback = True

    options = {"num_samples": 64, "max_steps": 9, "save_strategy": "steps", "save_steps": 3}
    options["logging_steps"] = logging_steps
    whole = tiny_trainer(tmp_path / "whole", **options).train()
    back = tiny_trainer(tmp_path / "back", [Ruin()], **options).train()
    assert back.training_loss == pytest.approx(whole.training_loss, rel=1e-9)
