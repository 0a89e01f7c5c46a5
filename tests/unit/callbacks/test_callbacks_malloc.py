"""Reports of where the host's memory grows."""

from __future__ import annotations

import logging
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from headway import TrainerCallback
from headway.callbacks import MallocTraceCallback
from headway.callbacks.profile import malloc_trace
from headway.errors import ConfigError
from headway.testing import tiny_trainer


class Leak(TrainerCallback):
    """Keeps 100 KiB more with each step."""

    def __init__(self) -> None:
        self.kept: list[bytearray] = []
        self.traced: list[bool] = []

    def on_step_begin(self) -> None:
        self.kept.append(bytearray(100 * 1024))  # the line that leaks
        self.traced.append(tracemalloc.is_tracing())


LINE = next(
    number
    for number, line in enumerate(Path(__file__).read_text().splitlines(), start=1)
    if "the line that leaks" in line
)


@pytest.fixture(autouse=True)
def ends_safely(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As with a Python that can end tracing; no other thread is traced in these tests."""
    monkeypatch.setattr(malloc_trace, "_CAN_STOP", True)
    yield
    assert not tracemalloc.is_tracing()


def reports(folder: Path) -> list[str]:
    return (folder / "out" / "malloc_trace_rank0.txt").read_text().strip().split("\n\n")


def test_the_line_that_leaks_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    leak = Leak()
    callback = MallocTraceCallback(start_step=2, interval=2, top=3)
    tiny_trainer(tmp_path, [leak, callback], max_steps=7, num_samples=32).train()
    assert leak.traced == [False, False, True, True, True, True, True]
    at_4, at_6, at_7 = reports(tmp_path)
    assert at_4.startswith("host memory at step 4")
    assert at_4.count("grown since") == 1 and at_4.count(f":{LINE}") == 1
    since_last, since_first = at_6.split("grown since step 2:")
    assert "grown since step 4:" in since_last
    for part, grown_kib in ((since_last, 200), (since_first, 400)):
        first = next(line for line in part.splitlines() if f"{Path(__file__).name}:{LINE}" in line)
        assert float(first.split()[0]) == pytest.approx(grown_kib, rel=0.05)
    assert at_7.startswith("host memory at step 7")  # the rest, at the end
    assert "host memory at step 4" in caplog.text


def test_a_report_goes_through_all_blocks_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    statistics = tracemalloc.Snapshot.statistics

    def count(self: Any, kind: str, cumulative: bool = False) -> Any:
        counted.append(kind)
        return statistics(self, kind, cumulative)

    monkeypatch.setattr(tracemalloc.Snapshot, "statistics", count)
    for name in ("compare_to", "filter_traces"):
        monkeypatch.delattr(tracemalloc.Snapshot, name)
    callback = MallocTraceCallback(start_step=1, interval=2)
    trainer = tiny_trainer(tmp_path, [Leak(), callback], max_steps=5)
    trainer.train()
    assert len(reports(tmp_path)) == 2 and len(counted) == 3
    assert trainer.timing.aside_s > 0


def test_tracing_ends_after_its_steps(tmp_path: Path) -> None:
    leak = Leak()
    callback = MallocTraceCallback(start_step=0, interval=10, num_steps=2)
    tiny_trainer(tmp_path, [leak, callback], max_steps=4).train()
    assert leak.traced == [True, True, False, False]
    assert len(reports(tmp_path)) == 1


def test_a_python_that_may_crash_at_the_end_of_tracing_goes_on_tracing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(malloc_trace, "_CAN_STOP", False)
    leak = Leak()
    callback = MallocTraceCallback(start_step=0, interval=10, num_steps=2)
    try:
        tiny_trainer(tmp_path / "first", [leak, callback], max_steps=4).train()
        assert leak.traced == [True] * 4
        assert len(reports(tmp_path / "first")) == 1
        held = tracemalloc.get_traced_memory()[0]
        assert held < 3.5 * 100 * 1024  # what was traced before is forgotten
        callback = MallocTraceCallback(start_step=0, interval=2, frames=3)
        tiny_trainer(tmp_path / "second", [Leak(), callback], max_steps=2).train()
        assert len(reports(tmp_path / "second")) == 1
        assert "frames=3, but tracing was begun before with 1" in caplog.text
    finally:
        tracemalloc.stop()
        monkeypatch.setattr(malloc_trace, "_began_tracing", False)


def test_callers_are_told_when_asked_for(tmp_path: Path) -> None:
    callback = MallocTraceCallback(start_step=0, interval=2, frames=3)
    tiny_trainer(tmp_path, [Leak(), callback], max_steps=2).train()
    line = next(line for line in reports(tmp_path)[0].splitlines() if f":{LINE} < " in line)
    assert "events.py" in line


def test_an_error_ends_tracing(tmp_path: Path) -> None:
    class Break(TrainerCallback):
        def on_step_end(self) -> None:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        tiny_trainer(tmp_path, [MallocTraceCallback(start_step=0), Break()], max_steps=2).train()


def test_tracing_of_somebody_else_goes_on(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        tiny_trainer(tmp_path, [MallocTraceCallback(start_step=0)], max_steps=1).train()
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


def test_off_and_too_late_trace_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leak = Leak()
    callbacks = [leak, MallocTraceCallback(start_step=0, enabled=False)]
    tiny_trainer(tmp_path, callbacks, max_steps=2).train()
    assert not caplog.records
    tiny_trainer(tmp_path, [leak, MallocTraceCallback(start_step=9)], max_steps=2).train()
    assert not any(leak.traced)
    assert "start_step=9 lies past the end of training (2)" in caplog.text
    assert not list(tmp_path.rglob("malloc_trace*"))


@pytest.mark.parametrize("option", ["interval", "num_steps", "top", "frames"])
def test_bad_numbers_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}: 0 given; allowed"):
        MallocTraceCallback(**{option: 0})
