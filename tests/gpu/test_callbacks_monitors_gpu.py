"""Monitors, snapshots and traces on one CUDA device."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.callbacks import (
    DefaultMetrics,
    GPUMemoryMonitorCallback,
    MemorySnapshotCallback,
    PeakMemory,
    ProfilerCallback,
    SpeedMonitorCallback,
)
from headway.callbacks.watch.device_peaks import peak_flops
from headway.testing import count_host_syncs, tiny_dataset, tiny_decoder

pytestmark = pytest.mark.gpu


class Seen(TrainerCallback):
    """What sinks get, and the host syncs of steps between two log records."""

    priority = -100

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.metrics: dict[int, dict[str, float]] = {}
        self.syncs: Any = None

    def on_step_end(self, state: Any) -> None:
        if state.global_step == 11:
            self.counting = count_host_syncs()
            self.syncs = self.counting.__enter__()
        if state.global_step == 19:
            self.counting.__exit__(None, None, None)

    def on_log(self, logs: dict[str, Any]) -> None:
        self.logs.append(dict(logs))

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics[step] = dict(metrics)


def train(folder: Path, callbacks: list[Any], **arguments: Any) -> None:
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "logging_steps": 10,
        "save_strategy": "no",
        "seed": 0,
        **arguments,
    }
    Trainer(
        args=TrainingArguments(**settings),
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(256, sequence_length=32),
        callbacks=callbacks,
        default_callbacks=False,
    ).train()


def test_monitors_do_not_wait_between_records(tmp_path: Path) -> None:
    seen = Seen()
    monitors = [DefaultMetrics(), SpeedMonitorCallback(), GPUMemoryMonitorCallback(), PeakMemory()]
    train(tmp_path, [*monitors, seen], max_steps=30, mixed_precision="bf16")
    assert seen.syncs.count == 0, seen.syncs.report()
    last = seen.metrics[30]
    assert last["throughput/device/TPS"] > 0
    assert last["gpu_memory/GPU active mem (GiB)"] > 0
    record = [logs for logs in seen.logs if "tok_per_sec" in logs][-1]
    assert record["peak_mem"] == max(record["peak_mem_allocated"]) > 0
    if peak_flops(torch.cuda.get_device_name()) is not None:
        assert 0 < record["mfu"] < 1 and 0 < last["throughput/device/MFU"] < 100


def test_trace_has_kernels_and_snapshots_are_written(tmp_path: Path) -> None:
    callbacks = [
        ProfilerCallback(start_step=2, num_steps=2, with_stack=False),
        MemorySnapshotCallback(steps=3),
    ]
    train(tmp_path, callbacks, max_steps=6)
    (trace,) = tmp_path.rglob("*.chrome_trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert "own time on the device" in trace.with_name("rank-0-step-4.tables.txt").read_text()
    snapshot = tmp_path / "memory_snapshots" / "memory_snapshot_step3_rank0.pickle"
    assert snapshot.stat().st_size > 0


def test_running_out_of_memory_leaves_a_snapshot(tmp_path: Path) -> None:
    class Greedy(TrainerCallback):
        def on_gradients(self, state: Any) -> None:
            if state.global_step == 2:
                torch.empty(2**50, device="cuda")

    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, [MemorySnapshotCallback(), Greedy()], max_steps=4)
    assert (tmp_path / "memory_snapshots" / "memory_snapshot_oom_step2_rank0.pickle").exists()
