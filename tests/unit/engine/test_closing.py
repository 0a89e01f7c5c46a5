"""The end of a run: callbacks that wait for something share one deadline."""

from __future__ import annotations

import threading
import time

import pytest

from headway import TrainerCallback
from headway.testing import tiny_trainer

LONG_S = 30.0


class Leaving(TrainerCallback):
    """Waits at the end for work of its own thread, as those that send to a service do."""

    def __init__(self, work=None, timeout_s=0.3):
        self.work, self.timeout_s = work, timeout_s
        self.waited_s, self.done = None, threading.Event()

    def on_close(self):
        def send():
            if self.work is not None:
                self.work.wait(LONG_S)
            self.done.set()

        threading.Thread(target=send, daemon=True).start()
        self.wait_at_close(self.wait, self.timeout_s)

    def wait(self, seconds):
        began_s = time.monotonic()
        self.arrived = self.done.wait(seconds)
        self.waited_s = time.monotonic() - began_s


@pytest.mark.parametrize("fails", [False, True])
def test_waits_at_the_end_share_their_time_and_a_dead_one_costs_the_others_nothing(tmp_path, fails):
    stuck = threading.Event()
    dead = [Leaving(stuck) for _ in range(6)]
    well = Leaving(timeout_s=0.1)
    patient = Leaving(timeout_s=0.5)
    trainer = tiny_trainer(tmp_path, [*dead, well, patient], max_steps=1)
    if fails:
        trainer.add_callback(type("Fails", (TrainerCallback,), {"on_log": lambda self: 1 / 0}))
        with pytest.raises(ZeroDivisionError):
            trainer.train()
    else:
        trainer.train()
    stuck.set()
    assert sum(one.waited_s for one in dead) < 2 * 0.3
    assert not any(one.arrived for one in dead)
    # Although its time was up when its turn came.
    assert well.arrived and patient.arrived


def test_a_wait_that_fails_is_told_and_the_others_are_waited_for(tmp_path):
    class Broken(Leaving):
        def wait(self, seconds):
            raise OSError("no answer")

    after = Leaving()
    with pytest.raises(OSError, match="callback 'Broken', on_close: no answer"):
        tiny_trainer(tmp_path, [Broken(), after], max_steps=1).train()
    assert after.arrived
    # Without a run there is nobody to wait together with.
    alone = Leaving()
    alone.on_close()
    assert alone.arrived


def test_what_fails_as_a_run_closes_is_told_once_and_the_others_close_once(tmp_path, caplog):
    class Fails(TrainerCallback):
        closed = 0

        def on_close(self):
            self.closed += 1
            raise ZeroDivisionError

    class Plain(Fails):
        def on_close(self):
            self.closed += 1

    fails, after = Fails(), Plain()
    trainer = tiny_trainer(tmp_path, [fails, after], max_steps=1)
    for runs in (1, 2):
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        assert fails.closed == after.closed == runs
        assert caplog.text.count("'Fails' failed in on_close") == runs
