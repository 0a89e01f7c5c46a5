"""Memory of ranks: peaks, monitors, snapshots, with and without CUDA."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway import TrainerCallback
from headway.callbacks import GPUMemoryMonitorCallback, MemorySnapshotCallback, PeakMemory
from headway.callbacks.watch.host_memory import GIB, peak_rss_bytes
from headway.engine.state import TrainerControl, TrainerState
from headway.engine.timing import LoopTiming
from headway.errors import ConfigError
from headway.testing import tiny_trainer

CUDA = SimpleNamespace(
    strategy=SimpleNamespace(device=torch.device("cuda", 0)), timing=LoopTiming()
)


class Writer:
    """As much of a SummaryWriter as is used."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[str] = []
        self.num_flushes = 0

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts.append(f"{tag}: {text}")

    def flush(self) -> None:
        self.num_flushes += 1


class Records(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, logs: dict[str, Any]) -> None:
        self.logs.append(dict(logs))


# PeakMemory


def test_host_memory_without_cuda(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    writer, seen = Writer(), Records()
    peak = PeakMemory(summary_writer=writer, do_log=True, enable_memory_snapshot=True)
    tiny_trainer(tmp_path, [peak, seen], max_steps=2).train()
    told = [logs["peak_mem_host"] for logs in seen.logs if "peak_mem_host" in logs]
    assert len(told) == 2 and all(len(ranks) == 1 for ranks in told)
    assert 10 * 2**20 < told[1][0] <= peak.max_allocated <= peak_rss_bytes()
    assert [(tag, step) for tag, _, step in writer.scalars] == [
        ("peak_memory_rank0", 1),
        ("peak_memory_rank0", 2),
    ]
    assert writer.scalars[1][1] == told[1][0] and writer.num_flushes == 2
    assert not peak.enabled
    assert caplog.text.count("peak host memory in GiB: rank 0: ") == 2
    assert caplog.text.count("most host memory of the run in GiB") == 1
    assert caplog.text.count("so no snapshot") == 1
    assert not list(tmp_path.rglob("*.pickle"))


class Fail(TrainerCallback):
    def on_step_end(self, state: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("power")


def test_a_resumed_run_shows_each_step_once_and_the_file_is_closed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "curves"
    common = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "num_samples": 32}
    first, second = PeakMemory(str(folder)), PeakMemory(str(folder))
    with pytest.raises(RuntimeError, match="power"):
        tiny_trainer(tmp_path, [Fail(), first], **common, logging_steps=1).train()
    # What came after the checkpoint but before the power went.
    first.summary_writer.add_scalar("peak_memory_rank0", 1.0, 3)
    first.summary_writer.close()
    tiny_trainer(tmp_path, [second], resume_from_checkpoint=True, **common).train()
    assert first.summary_writer.file_writer is second.summary_writer.file_writer is None
    found = EventAccumulator(str(folder))
    found.Reload()
    assert [event.step for event in found.Scalars("peak_memory_rank0")] == [1, 2, 3, 4, 5]


def fake_cuda(monkeypatch: pytest.MonkeyPatch, **stats: int) -> dict[str, int]:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: dict(stats_now))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 9 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    total = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    stats_now = dict(stats)
    return stats_now


def test_the_list_of_ranks_goes_to_the_writer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fake_cuda(monkeypatch, num_ooms=0)
    writer = Writer()
    peak = PeakMemory(summary_writer=writer, show_details=True, do_log=True)
    args = SimpleNamespace(process_index=1, world_size=2, output_dir="x")
    state, control = TrainerState(global_step=7), TrainerControl()
    peak.on_train_begin(args, state, control, CUDA)
    logs: dict[str, Any] = {"peak_mem_allocated": [3 * GIB, 5 * GIB]}
    peak.on_log_step(args, state, control, logs)
    peak.on_log(args, state, control, logs)
    assert writer.scalars == [("peak_memory_rank0", 3 * GIB, 7), ("peak_memory_rank1", 5 * GIB, 7)]
    assert writer.texts == ["peak_memory_details: num_ooms: 0"]
    assert "rank 0: 3.000, rank 1: 5.000" in caplog.text
    assert peak.max_allocated == 5 * GIB
    for other in ({"eval_loss": 1.0}, {"peak_mem_allocated": 3}, {"peak_mem_allocated": [1]}):
        peak.on_log(args, state, control, other)  # none of these is a record of this rank
    assert len(writer.scalars) == 2
    peak.on_train_end(args, state, control)
    assert peak.max_allocated == 9 * GIB


def history(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls to torch's record of allocations; a snapshot file holds the number of the call."""
    calls: list[Any] = []

    def dump(path: str) -> None:
        calls.append(Path(path).name)
        Path(path).write_text("snapshot")

    def record(enabled: str | None, max_entries: int = 0) -> None:
        calls.append((enabled, max_entries) if enabled else None)

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return calls


@pytest.mark.parametrize("ending", ["train_end", "error"])
def test_peak_memory_writes_its_snapshot_when_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    fake_cuda(monkeypatch)
    calls = history(monkeypatch)
    peak = PeakMemory(enable_memory_snapshot=True, file_prefix="mine")
    args = SimpleNamespace(process_index=3, world_size=4, output_dir=str(tmp_path / "out"))
    state, control = TrainerState(), TrainerControl()
    peak.on_train_begin(args, state, control, CUDA)
    if ending == "train_end":
        peak.on_train_end(args, state, control)
    peak.on_close()
    assert calls == [("all", 100_000), "mine_rank3.pickle", None]
    assert (tmp_path / "out" / "mine_rank3.pickle").exists()


@pytest.mark.parametrize(
    "options",
    [{"do_log": 1}, {"file_prefix": "../up"}, {"file_prefix": ""}, {"summary_writer": 3}],
)
def test_bad_options_of_peak_memory(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(options))}: .* given; allowed"):
        PeakMemory(**options)


# GPUMemoryMonitorCallback


def monitor_step(
    monitor: GPUMemoryMonitorCallback, step: int = 1
) -> dict[str, tuple[float, str | None]]:
    recorded: dict[str, tuple[float, str | None]] = {}
    trainer = SimpleNamespace(
        record_metric=lambda name, value, kind=None: recorded.update({name: (value, kind)})
    )
    monitor.on_step_end(None, TrainerState(global_step=step), TrainerControl(), trainer)
    return recorded


def test_gpu_memory_of_each_step_and_warnings_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stats = fake_cuda(monkeypatch, num_ooms=1)
    stats.update({"active_bytes.all.peak": 20 * GIB, "reserved_bytes.all.peak": 40 * GIB})
    monitor = GPUMemoryMonitorCallback()
    monitor.on_train_begin(None, TrainerState(), TrainerControl(), CUDA)
    assert monitor_step(monitor) == {
        "gpu_memory/GPU active mem (GiB)": (20, "max"),
        "gpu_memory/GPU active mem (%)": (25, "max"),
        "gpu_memory/GPU reserved mem (GiB)": (40, "max"),
        "gpu_memory/GPU reserved mem (%)": (50, "max"),
    }
    assert not caplog.records  # what was before the run is not the run's
    stats.update({"num_alloc_retries": 2, "num_ooms": 2})
    monitor_step(monitor, 2)
    monitor_step(monitor, 3)
    assert len(caplog.records) == 2
    assert "2 allocation(s)" in caplog.text and "ran out of memory 1 time(s)" in caplog.text


def test_gpu_monitor_without_cuda_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_trainer(tmp_path, [GPUMemoryMonitorCallback()], max_steps=3).train()
    told = [r.getMessage() for r in caplog.records if "GPUMemoryMonitor" in r.getMessage()]
    assert len(told) == 1 and "'cpu'" in told[0]
    caplog.clear()
    tiny_trainer(tmp_path, [GPUMemoryMonitorCallback(enabled=False)], max_steps=1).train()
    assert "GPUMemoryMonitor" not in caplog.text


def test_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    monitor = GPUMemoryMonitorCallback(device_id=5)
    with pytest.raises(ConfigError, match="device_id: 5 given; allowed: 0 to 1"):
        monitor.on_train_begin(None, TrainerState(), TrainerControl(), CUDA)
    with pytest.raises(ConfigError, match="device_id: -1 given"):
        GPUMemoryMonitorCallback(device_id=-1)


# MemorySnapshotCallback


def test_snapshots_at_steps_and_on_running_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = history(monkeypatch)
    callback = MemorySnapshotCallback(steps=[2, 4], max_entries=7)
    args = SimpleNamespace(process_index=1, world_size=2, output_dir=str(tmp_path))
    state, control = TrainerState(max_steps=9), TrainerControl()
    callback.on_train_begin(args, state, control, CUDA)
    for step in range(1, 6):
        state.global_step = step
        callback.on_step_end(args, state, control, CUDA)
    callback.on_error(torch.OutOfMemoryError("full"))
    callback.on_close()
    assert calls == [
        ("all", 7),
        "memory_snapshot_step2_rank1.pickle",
        "memory_snapshot_step4_rank1.pickle",
        "memory_snapshot_oom_step5_rank1.pickle",
        None,
    ]
    assert len(list((tmp_path / "memory_snapshots").iterdir())) == 3


def test_other_errors_leave_no_snapshot_and_recording_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = history(monkeypatch)
    args = SimpleNamespace(process_index=0, world_size=1, output_dir=str(tmp_path))
    state, control = TrainerState(max_steps=3), TrainerControl()
    callback = MemorySnapshotCallback(steps=5)
    callback.on_train_begin(args, state, control, CUDA)
    assert "[5] lie past the end of training (3)" in caplog.text
    callback.on_error(ValueError("no"))
    assert calls == [("all", 100_000), None]
    only_steps = MemorySnapshotCallback(steps=1, on_oom=False)
    only_steps.on_train_begin(args, state, control, CUDA)
    state.global_step = 1
    only_steps.on_step_end(args, state, control, CUDA)
    assert calls[2:] == [("all", 100_000), "memory_snapshot_step1_rank0.pickle", None]


def test_a_snapshot_that_cannot_be_written_tells_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    history(monkeypatch)
    (tmp_path / "memory_snapshots").write_text("a file is in the way")
    args = SimpleNamespace(process_index=0, world_size=1, output_dir=str(tmp_path))
    state, control = TrainerState(), TrainerControl()
    callback = MemorySnapshotCallback(steps=1)
    callback.on_train_begin(args, state, control, CUDA)
    state.global_step = 1
    callback.on_step_end(args, state, control, CUDA)
    assert "could not be written" in caplog.text and "FileExistsError" in caplog.text


def test_snapshots_without_cuda_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_trainer(tmp_path, [MemorySnapshotCallback(steps=1)], max_steps=2).train()
    told = [r.getMessage() for r in caplog.records if "MemorySnapshotCallback" in r.getMessage()]
    assert len(told) == 1 and "'cpu'" in told[0]
    assert not list(tmp_path.rglob("*.pickle"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": [0]}, "steps: 0 given"),
        ({"steps": None, "on_oom": False}, "nothing to write"),
        ({"max_entries": 0}, "max_entries: 0 given"),
        ({"ranks": "db"}, "unknown ranks 'db'. Allowed: all, cp, dp"),
        ({"file_prefix": "a/b"}, "file_prefix: 'a/b' given"),
    ],
)
def test_bad_options_of_snapshots(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MemorySnapshotCallback(**options)
