"""No step within the limit is an alarm; what may take longer is none."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway import TrainerCallback
from headway.callbacks import EvaluatorCallback, HangWatchdogCallback
from headway.callbacks.evaluate.evaluator import Evaluator
from headway.callbacks.guard import progress
from headway.callbacks.guard.hang_watchdog import judge
from headway.callbacks.guard.progress import Limits, Progress
from headway.testing import tiny_trainer

LIMITS = Limits(step_s=10.0, factor=5.0, first_step_s=100.0, other_s=50.0)


class Now:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.s = 1000.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.s)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    return Now(monkeypatch)


def watched() -> tuple[Progress, Any, Any]:
    timing = SimpleNamespace(doing=None, is_aside=False, fetch_s=0.0, num_signs=0)
    bus = SimpleNamespace(busy_with=None)
    return Progress(LIMITS, timing, bus, "own"), timing, bus


def wait(one: Progress, now: Now, seconds: int, *, still: bool = False) -> Any:
    """Look every second; `still`: the main thread is always found at the same place."""
    for number in range(1, seconds + 1):
        now.s += 1
        status = one.look(5.0, float(number) if still else 0.0)
    return status


def take_steps(one: Progress, now: Now, *lengths_s: float) -> None:
    for number, length_s in enumerate(lengths_s, one.num_steps + 1):
        one.begin_step()
        now.s += length_s
        one.end_step(number)
        one.look(1e9)


def test_the_first_step_may_compile_and_later_ones_have_the_limit(now: Now) -> None:
    one, _, _ = watched()
    assert not wait(one, now, 99).is_late
    take_steps(one, now, 90.0, 1.0, 1.0)
    assert not wait(one, now, 10).is_late
    late = wait(one, now, 2)
    assert late.is_late and late.step == 3 and late.what == "training"


def test_slow_steps_make_it_more_patient(now: Now) -> None:
    one, _, _ = watched()
    take_steps(one, now, 4.0, 4.0, 4.0)
    assert not wait(one, now, 19).is_late
    assert wait(one, now, 3).is_late


@pytest.mark.parametrize("doing", ["save", "rollback", "close", "a callback", "aside"])
def test_what_is_no_step_has_a_limit_of_its_own(now: Now, doing: str) -> None:
    one, timing, bus = watched()
    take_steps(one, now, 1.0)
    wait(one, now, 9)
    if doing == "a callback":
        bus.busy_with = "Evaluator"
    elif doing == "aside":
        timing.is_aside = True
    else:
        timing.doing = doing
    status = wait(one, now, 49)
    assert not status.is_late and status.is_excused
    assert wait(one, now, 3).is_late
    timing.doing, bus.busy_with, timing.is_aside = None, None, False
    assert not wait(one, now, 9).is_late, "counts from when it was over"


def test_an_evaluation_moves_by_batches(now: Now) -> None:
    one, timing, _ = watched()
    take_steps(one, now, 1.0)
    timing.doing = "evaluate"
    assert not wait(one, now, 90).is_late
    for _ in range(5):
        one.end_batch()
        assert not wait(one, now, 9).is_late
    assert wait(one, now, 3).is_late


def test_batches_of_evaluators_count_as_well(now: Now) -> None:
    one, timing, bus = watched()
    take_steps(one, now, 1.0)
    timing.doing, bus.busy_with = "evaluate", "EvaluatorCallback"
    assert not wait(one, now, 90).is_suspect, "the first batch may compile"
    for _ in range(20):
        timing.num_signs += 1
        assert not wait(one, now, 9).is_suspect
    assert wait(one, now, 3).is_suspect
    assert not wait(one, now, 37).is_late, "a handler may take its time"
    assert wait(one, now, 3).is_late


def test_a_handler_that_does_not_move_is_told_of_before_it_is_late(now: Now) -> None:
    one, _, bus = watched()
    take_steps(one, now, 1.0)
    bus.busy_with = "Upload"
    assert not wait(one, now, 40).is_suspect, "it works"
    bus.busy_with = None
    wait(one, now, 1)
    bus.busy_with = "Upload"
    assert not wait(one, now, 9, still=True).is_suspect
    told = wait(one, now, 12, still=True)
    assert told.is_suspect and not told.is_late and not told.is_excused
    assert told.what == "the callback Upload"


def test_a_pause_and_a_suspended_machine_are_no_hang(now: Now) -> None:
    one, timing, bus = watched()
    take_steps(one, now, 1.0)
    wait(one, now, 5)
    now.s += 10_000  # nobody looked
    assert not wait(one, now, 5).is_late
    bus.busy_with = "own"
    assert wait(one, now, 8).is_late, "its own handler is no excuse"
    timing.doing = "pause"
    assert wait(one, now, 1000).allowed_s == math.inf


def answer(what: str, silent_s: float, agreements: int, waited_s: float, place: str) -> Any:
    handler = what.startswith("the callback")
    status = {
        "what": what,
        "silent_s": silent_s,
        "allowed_s": 100.0 if handler else 10.0,
        "step": 7,
        "tell_after_s": 10.0,
    }
    standing = {"num_agreements": agreements, "waited_s": waited_s, "place": place}
    return {"status": status, "standing": standing}


def test_ranks_judge_together() -> None:
    waiting = answer("training", 12.0, 9, 11.0, "loop.py:1 in agree")
    stuck = answer("training", 12.0, 8, 0.0, "data.py:3 in read")
    verdict = judge({0: waiting, 1: stuck, 2: waiting}, 3)
    assert verdict is not None and verdict["stuck"] == [1]
    assert "stuck is rank 1 of 3, at data.py:3 in read" in verdict["text"]
    busy = answer("save (by the loop)", 8.0, 8, 0.0, "disk.py:1 in write")
    assert judge({0: waiting, 1: busy}, 2) is None
    moves = answer("training", 1.0, 8, 0.0, "step.py:1 in take")
    assert judge({0: waiting, 1: moves}, 2) is None
    silent = judge({0: waiting, 2: waiting}, 3)
    assert silent is not None and silent["stuck"] == [1] and "do not answer" in silent["text"]
    assert verdict["is_final"]
    handler = judge({0: waiting, 1: answer("the callback X", 12.0, 8, 0.0, "x.py:1 in put")}, 2)
    assert handler is not None and handler["stuck"] == [1] and not handler["is_final"]
    handler = judge({0: waiting, 1: answer("the callback X", 102.0, 8, 0.0, "x.py:1 in put")}, 2)
    assert handler is not None and handler["is_final"]
    alike = judge({0: waiting, 1: waiting}, 2)
    assert alike is not None and alike["stuck"] == [] and "all ranks" in alike["text"]


def test_a_hang_on_one_process_is_told_with_its_stack(tmp_path: Path, capfd: Any) -> None:
    told = tmp_path / "out" / "hang-rank0.txt"

    class Stand(TrainerCallback):
        """The forward of the third step does not come back until that was told."""

        def hook(self, module: Any, inputs: Any) -> None:
            deadline = time.monotonic() + 20
            while not told.exists() and time.monotonic() < deadline:
                time.sleep(0.01)

        def on_step_begin(self, state: Any, model: Any) -> None:
            if state.global_step == 2:
                self.handle = model.register_forward_pre_hook(self.hook)

    dog = HangWatchdogCallback(0.3, step_factor=1.0)
    output = tiny_trainer(tmp_path, [Stand(), dog], num_samples=64, max_steps=4).train()
    assert output.global_step == 4 and dog.alarms
    assert "after step 2" in dog.alarms[0] and "in hook" in dog.alarms[0]
    for text in (told.read_text(), capfd.readouterr().err):
        assert dog.alarms[0] in text and "in hook" in text
    assert not any(thread.name == "headway-hang" for thread in threading.enumerate())


class Batches(Evaluator):
    """Takes a while for each of its batches."""

    def __init__(self) -> None:
        ids = torch.zeros(1, 8, dtype=torch.long)
        super().__init__("slow", [{"input_ids": ids, "labels": ids}] * 12)

    def reset_metrics(self) -> None: ...

    def update_metrics(self, batch: Any, scores: Any) -> None:
        time.sleep(0.1)

    def compute_metrics(self, join: Any) -> dict[str, float]:
        return {"one": 1.0}


def test_a_long_pass_of_an_evaluator_is_no_hang(tmp_path: Path) -> None:
    dog = HangWatchdogCallback(0.6, step_factor=1.0, first_step_limit_s=0.7, other_limit_s=0.7)
    callbacks = [EvaluatorCallback([Batches()], eval_interval=2), dog]
    tiny_trainer(tmp_path, callbacks, num_samples=64, max_steps=2).train()
    assert dog.alarms == []


def test_a_handler_that_stands_still_is_told_and_not_ended(tmp_path: Path) -> None:
    told = tmp_path / "out" / "hang-rank0.txt"

    class Upload(TrainerCallback):
        def on_step_end(self, state: Any) -> None:
            if state.global_step == 2:
                # One call that does not come back, as a read of a server that is away.
                waiting.wait(20)

    waiting = threading.Event()
    dog = HangWatchdogCallback(0.3, "abort", step_factor=1.0, other_limit_s=600)

    def release() -> None:
        deadline = time.monotonic() + 15
        while not (told.exists() and "Upload" in told.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        waiting.set()

    thread = threading.Thread(target=release)
    thread.start()
    output = tiny_trainer(tmp_path, [Upload(), dog], num_samples=64, max_steps=4).train()
    thread.join()
    assert output.global_step == 4
    assert "nothing has come of the callback Upload" in dog.alarms[0]
    assert "(limit 600 s) after step 1" in dog.alarms[0]
