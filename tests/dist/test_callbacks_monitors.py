"""Monitors on two ranks: one figure for all, every rank's memory, traces of the chosen ranks."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from headway import DDPTrainer, PipelineTrainer, TrainerCallback
from headway.args import PipelineTrainingArguments
from headway.callbacks import (
    DefaultMetrics,
    GPUMemoryMonitorCallback,
    MallocTraceCallback,
    MemorySnapshotCallback,
    PeakMemory,
    ProfilerCallback,
    SpeedMonitorCallback,
    StabilityMonitorCallback,
)
from headway.callbacks.watch import default_metrics
from headway.dist import init_distributed
from headway.engine import timing
from headway.testing import run_ranks, tiny_dataset, tiny_decoder

STEP_S, TOKENS_PER_STEP = (1.0, 3.0), 32  # rank 1 is the slow one


class Clock:
    """Moves with the steps of its rank alone."""

    def __init__(self, rank: int) -> None:
        self.now_s, self.step_s = 100.0 * rank, STEP_S[rank]

    def __call__(self) -> float:
        return self.now_s


class Work(TrainerCallback):
    priority = -100

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.logs: list[dict[str, Any]] = []
        self.metrics: dict[int, dict[str, float]] = {}

    def on_optimizer_step(self) -> None:
        self.clock.now_s += self.clock.step_s

    def on_log(self, logs: dict[str, Any]) -> None:
        self.logs.append({**logs})

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics[step] = dict(metrics)


class Listening(logging.Handler):
    """Keeps what a rank says, of our callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        logger = logging.getLogger("headway.callbacks")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def watch(folder: str) -> dict[str, Any]:
    rank = init_distributed(use_cpu=True).rank
    listening = Listening()
    timing.clock = Clock(rank)
    default_metrics.device_name = lambda device: "NVIDIA H200"
    work = Work(timing.clock)
    fast = {"with_stack": False, "with_flops": False, "record_shapes": False, "table_rows": 3}
    common = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 5,
        "logging_steps": 2,
        "save_strategy": "no",
        "seed": 0,
        "use_cpu": True,
    }
    monitors = [
        DefaultMetrics(),
        StabilityMonitorCallback(window_size=2, rolling_window=3),
        SpeedMonitorCallback(),
        GPUMemoryMonitorCallback(),
        PeakMemory(do_log=True),
        ProfilerCallback(start_step=1, num_steps=2, ranks=[1], **fast),
        MallocTraceCallback(start_step=4, ranks="all"),
        MemorySnapshotCallback(steps=2),
        work,
    ]
    data = {"model_init": tiny_decoder, "train_dataset": tiny_dataset(64, sequence_length=8)}
    DDPTrainer(
        args={"output_dir": folder, **common}, callbacks=monitors, default_callbacks=False, **data
    ).train()
    pipelined = Work(timing.clock)
    arguments = PipelineTrainingArguments(
        output_dir=f"{folder}/pipeline", pipe_schedule="GPipe", n_microbatches=2, **common
    )
    PipelineTrainer(
        args=arguments,
        callbacks=[
            SpeedMonitorCallback(),
            ProfilerCallback(start_step=1, num_steps=1, ranks="dp", **fast),
            pipelined,
        ],
        default_callbacks=False,
        **data,
    ).train()
    return {
        "logs": work.logs,
        "metrics": work.metrics,
        "said": listening.said,
        "pipelined": pipelined.metrics,
    }


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("watched")
    return folder, run_ranks(watch, 2, str(folder), timeout_s=120)


def test_speed_is_the_slow_rank_s_and_the_same_on_all(watched: Any) -> None:
    records = [[logs for logs in rank["logs"] if "learning_rate" in logs] for rank in watched[1]]
    for first, second in zip(*records, strict=True):
        for name in ("tok_per_sec", "mfu"):
            assert first.get(name) == second.get(name)
    expected = round(TOKENS_PER_STEP / STEP_S[1])
    assert [logs["tok_per_sec"] for logs in records[0]] == [expected] * 3
    flops = records[0][1]["total_flos"] - records[0][0]["total_flos"]
    assert records[0][1]["mfu"] == pytest.approx(flops / (2 * STEP_S[1]) / (2 * 67e12))


def test_figures_of_devices_are_joined_over_ranks(watched: Any) -> None:
    zero, one = (rank["metrics"] for rank in watched[1])
    assert zero.keys() == one.keys() == {1, 2, 3, 4, 5}
    tokens = TOKENS_PER_STEP / 2
    for step in (2, 3, 4, 5):
        assert zero[step] == one[step]
        mean = (tokens / STEP_S[0] + tokens / STEP_S[1]) / 2
        assert zero[step]["throughput/device/TPS"] == pytest.approx(mean)
        assert zero[step]["throughput/total tokens"] == TOKENS_PER_STEP * step
    assert zero[3]["spike/SpikeScore (total)"] == one[3]["spike/SpikeScore (total)"]
    assert "spike/SpikeScore" in zero[5]


def test_memory_of_every_rank_is_known_to_all(watched: Any) -> None:
    peaks = [
        [logs["peak_mem_host"] for logs in rank["logs"] if "peak_mem_host" in logs]
        for rank in watched[1]
    ]
    assert peaks[0] == peaks[1] and len(peaks[0]) == 3
    assert all(len(ranks) == 2 and min(ranks) > 0 for ranks in peaks[0])


def test_only_the_first_rank_speaks(watched: Any) -> None:
    zero, one = (rank["said"] for rank in watched[1])
    assert sum("peak host memory in GiB: rank 0: " in text for text in zero) == 3
    assert any("GPUMemoryMonitorCallback records nothing" in text for text in zero)
    assert any("MemorySnapshotCallback writes nothing" in text for text in zero)
    assert one == []


def test_chosen_ranks_write_traces_under_their_rank(watched: Any) -> None:
    folder = watched[0]
    names = sorted(path.name for path in (folder / "benchmarks" / "profiles").iterdir())
    assert names == ["rank-1-step-3.chrome_trace.json.gz", "rank-1-step-3.tables.txt"]
    text = gzip.decompress((folder / "benchmarks" / "profiles" / names[0]).read_bytes())
    assert json.loads(text)["traceEvents"]
    for rank in (0, 1):
        assert "host memory at step 5" in (folder / f"malloc_trace_rank{rank}.txt").read_text()


def test_pipeline_knows_operations_and_groups(watched: Any) -> None:
    folder, ranks = watched
    zero, one = (rank["pipelined"][5] for rank in ranks)
    names = ("throughput/device/flopsPS", "throughput/chinchilla multiple")
    assert all(zero[name] == one[name] > 0 for name in names)
    # One pipeline: all of its ranks are the first of their data-parallel group.
    traces = sorted(path.name for path in (folder / "pipeline").rglob("*.chrome_trace.json.gz"))
    assert traces == [f"rank-{rank}-step-2.chrome_trace.json.gz" for rank in (0, 1)]
