"""Operations beside training: where they run, when their results come, and how they end."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from headway import TrainerCallback
from headway.engine import bookkeeping
from headway.engine.bookkeeping import BookkeepingError
from headway.errors import ConfigError
from headway.testing import tiny_trainer

LONG_S = 30.0


class Begin(TrainerCallback):
    """Begins operations at step 1, or at the end of the run."""

    def __init__(self, begin, *, policy="raise", at_end=False):
        self.begin, self.failure_policy, self.at_end = begin, policy, at_end

    def on_step_end(self, state, trainer):
        if state.global_step == 1 and not self.at_end:
            self.begin(trainer)

    def on_train_end(self, trainer):
        if self.at_end:
            self.begin(trainer)


class Wait(TrainerCallback):
    """Lets a step begin only when an event has come."""

    def __init__(self, step, event):
        self.step, self.event = step, event

    def on_step_begin(self, state):
        if state.global_step == self.step:
            assert self.event.wait(LONG_S)


class Free(TrainerCallback):
    """Sets an event when the second step begins."""

    def __init__(self, event):
        self.event = event

    def on_step_begin(self, state):
        if state.global_step == 1:
            self.event.set()


def test_results_come_in_order_on_the_main_thread_at_the_end_of_a_step(tmp_path):
    free, came = threading.Event(), []

    def work(number, *, scale):
        if number == 1:  # the second one ends first
            assert free.wait(LONG_S)
        return number * scale, threading.current_thread()

    def begin(trainer):
        def take(got):
            assert threading.current_thread() is threading.main_thread()
            came.append((trainer.state.global_step, *got))

        for number in (1, 2):
            trainer.run_bookkeeping_op(work, number, scale=10, op_name="work", cb=take)

    tiny_trainer(tmp_path, [Begin(begin), Free(free)], max_steps=4).train()
    assert [number for _, number, _ in came] == [10, 20]
    assert all(thread is not threading.main_thread() for *_, thread in came)
    assert all(step > 1 for step, *_ in came)


def test_what_a_result_asks_for_acts_at_that_step_and_the_end_waits_for_all(tmp_path):
    done, came = threading.Event(), []

    def begin(trainer):
        trainer.run_bookkeeping_op(done.set, cb=lambda _: trainer.cancel_run("found a tag"))

    trainer = tiny_trainer(tmp_path, [Begin(begin), Wait(1, done)], max_steps=50)
    trainer.train()
    assert trainer.state.outcome == "canceled" and trainer.state.global_step <= 3

    def begin_late(trainer):
        trainer.run_bookkeeping_op(threading.Event().wait, 0.05, cb=came.append)

    tiny_trainer(tmp_path / "b", [Begin(begin_late, at_end=True)], max_steps=1).train()
    assert came == [False]


def test_an_operation_past_its_hard_limit_ends_the_run_by_its_name(tmp_path, caplog, monkeypatch):
    stuck, now_s = threading.Event(), [0.0]
    monkeypatch.setattr(bookkeeping, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    # The run has failed by then, on a clock that stands still: there is nothing to wait for.
    monkeypatch.setattr(bookkeeping, "_AFTER_ERROR_S", 0.0)

    class Tick(TrainerCallback):
        def on_step_begin(self):
            now_s[0] += 10.0

    def begin(trainer):
        trainer.run_bookkeeping_op(stuck.wait, op_name="upload", soft_timeout=15, hard_timeout=35)

    trainer = tiny_trainer(tmp_path, [Begin(begin), Tick()], max_steps=100)
    with pytest.raises(BookkeepingError, match="'upload' did not end within 35 s"):
        trainer.train()
    assert trainer.state.global_step == 5  # begun at step 1, 40 s ago
    assert "'upload' has taken more than 15 s" in caplog.text
    stuck.set()


def test_a_stuck_operation_does_not_keep_the_run_from_ending(tmp_path):
    stuck = threading.Event()

    def begin(trainer):
        trainer.run_bookkeeping_op(stuck.wait, op_name="upload", hard_timeout=0.05)

    with pytest.raises(BookkeepingError, match="'upload'"):
        tiny_trainer(tmp_path, [Begin(begin)], max_steps=2).train()
    stuck.set()


@pytest.mark.parametrize("part", ["op", "cb"])
@pytest.mark.parametrize("policy", ["raise", "disable"])
def test_a_failure_counts_as_the_callbacks_own(tmp_path, policy, part):
    def fail(*_):
        raise OSError("no route")

    def begin(trainer):
        if part == "op":
            trainer.run_bookkeeping_op(fail, op_name="ask")
        else:
            trainer.run_bookkeeping_op(bool, op_name="ask", cb=fail)

    trainer = tiny_trainer(tmp_path, [Begin(begin, policy=policy)], max_steps=3)
    if policy == "raise":
        told = "callback 'Begin', background operation 'ask'.*no route"
        with pytest.raises((BookkeepingError, OSError), match=told):
            trainer.train()
    else:
        trainer.train()
        assert "background operation 'ask'" in trainer.bus.disabled["Begin"]


def test_twins(tmp_path):
    """A second of one name: dropped, or in the place of the first."""
    free, came, took = threading.Event(), [], []

    def work(number):
        assert number == 1 or free.is_set() or number == 3
        return number if number != 1 or free.wait(LONG_S) else 0

    def begin(trainer):
        def run(number, **options):
            took.append(
                trainer.run_bookkeeping_op(work, number, op_name="work", cb=came.append, **options)
            )

        run(1)
        run(2, allow_multiple=False)
        run(3, cancel_in_progress=True)

    tiny_trainer(tmp_path, [Begin(begin)], max_steps=2).train()
    free.set()
    assert took == [True, False, True]
    assert came == [3]


def test_outside_a_run_it_is_done_at_once(tmp_path):
    came = []
    tiny_trainer(tmp_path).run_bookkeeping_op(threading.current_thread, cb=came.append)
    assert came == [threading.main_thread()]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"op": 3}, "op must be callable"),
        ({"op": print, "cb": "x"}, "cb must be callable"),
        ({"op": print, "soft_timeout": 0}, "soft_timeout must be more than 0"),
        ({"op": print, "hard_timeout": -1}, "hard_timeout must be more than 0"),
    ],
)
def test_mistakes(tmp_path, options, told):
    with pytest.raises(ConfigError, match=told):
        tiny_trainer(tmp_path).run_bookkeeping_op(**options)
