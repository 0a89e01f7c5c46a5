"""The time to the first step: all of it, compilation told apart, from the process's start."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from headway.engine import start_times
from headway.engine.start_times import StartTimes
from headway.testing import tiny_trainer


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(start_times, "clock", lambda: now[0])
    return now


@pytest.fixture
def compiled(monkeypatch):
    seconds = [3.0]
    monkeypatch.setattr(start_times, "_compile_seconds", lambda: seconds[0])
    return seconds


def test_phases_are_all_of_the_time(clock, compiled):
    times = StartTimes()
    for phase, seconds in (("imports", 2.0), ("model", 1.0), ("imports", 0.5)):
        clock[0] += seconds
        times.reach(phase)
    clock[0], compiled[0] = clock[0] + 4.0, 6.5  # of which 3.5 are this run's
    assert not times.is_over
    times.finish("first step")
    assert times.is_over
    assert times.phases == {"imports": 2.5, "model": 1.0, "compilation": 3.5, "first step": 0.5}
    assert times.total_s == sum(times.phases.values())
    told = "7.5 s (imports 2.5, model 1.0, compilation 3.5, first step 0.5)"
    assert times.describe() == told


def test_without_compilation_there_is_no_such_phase(clock, compiled):
    times = StartTimes()
    clock[0] += 1.0
    times.finish("first step")
    assert list(times.phases) == ["first step"]


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell")
def test_it_counts_from_the_start_of_the_process():
    code = (
        "from headway.engine.start_times import StartTimes, clock\n"
        "own = clock(); times = StartTimes.of_process(); times.reach('x'); print(times.total_s)"
    )
    began_s = time.monotonic()
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    passed_s = time.monotonic() - began_s
    assert 0 < float(told.stdout) <= passed_s + 0.05  # the system counts in hundredths


def test_a_trainer_tells_it_of_each_training(tmp_path, caplog):
    caplog.set_level("INFO", "headway")
    trainer = tiny_trainer(tmp_path, max_steps=1)
    trainer.train()
    first = trainer.start_times
    assert list(first.phases) == ["model", "set-up", "first step"]
    assert f"first step after {first.describe()}" in caplog.messages
    trainer.args.max_steps = 2
    trainer.train()
    assert trainer.start_times is not first and trainer.start_times.is_over
