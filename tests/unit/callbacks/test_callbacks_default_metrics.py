"""Speed and memory in log records, on a clock that only work moves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from virtual_time import (
    EVAL_S,
    FETCH_S,
    STEP_S,
    TOKENS_PER_STEP,
    Aside,
    Seen,
    VirtualTime,
    Work,
    make_trainer,
)

from headway import TrainerCallback
from headway.callbacks import DefaultMetrics
from headway.callbacks.watch import default_metrics
from headway.callbacks.watch.device_peaks import peak_flops, working_dtype
from headway.callbacks.watch.training_time import TrainingTime
from headway.engine.state import TrainerControl, TrainerState
from headway.engine.timing import LoopTiming
from headway.errors import ConfigError

SPEED = round(TOKENS_PER_STEP / (FETCH_S + STEP_S))


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return VirtualTime().use(monkeypatch)


def train(folder: Path, time: VirtualTime, *callbacks: Any, **arguments: Any) -> list[Any]:
    seen = Seen()
    metrics = [] if any(isinstance(c, DefaultMetrics) for c in callbacks) else [DefaultMetrics()]
    make_trainer(folder, time, [Work(time), *metrics, *callbacks, seen], **arguments).train()
    return [logs for logs in seen.logs if "learning_rate" in logs]


@pytest.mark.parametrize("save_async", [False, True])
def test_speed_is_that_of_training_alone(
    tmp_path: Path, time: VirtualTime, save_async: bool
) -> None:
    logs = train(
        tmp_path,
        time,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=3,
        save_async=save_async,
    )
    assert "tok_per_sec" not in logs[0]  # the first step warms up
    assert [record["tok_per_sec"] for record in logs[1:]] == [SPEED] * 5


def test_speed_between_sparse_records_counts_every_fetch(tmp_path: Path, time: VirtualTime) -> None:
    logs = train(
        tmp_path,
        time,
        max_steps=9,
        logging_steps=3,
        speed_metrics_start_step=0,
        eval_strategy="steps",
        eval_steps=2,
    )
    assert [record["tok_per_sec"] for record in logs] == [SPEED] * 3


def test_what_handlers_of_a_log_do_is_not_training(tmp_path: Path, time: VirtualTime) -> None:
    class Generates(TrainerCallback):
        def on_metrics(self) -> None:
            time.now_s += 33.0

        def on_log(self) -> None:
            time.now_s += 77.0

    logs = train(tmp_path, time, Generates(), max_steps=3)
    assert [record["tok_per_sec"] for record in logs[1:]] == [SPEED] * 2


def test_a_rollback_starts_measuring_anew(tmp_path: Path, time: VirtualTime) -> None:
    class Return(TrainerCallback):
        done = False

        def on_step_end(self, state: Any, control: Any) -> None:
            if state.global_step == 4 and not self.done:
                self.done = control.rollback = True

    logs = train(tmp_path, time, Return(), max_steps=6, save_strategy="steps", save_steps=2)
    speeds = [record["tok_per_sec"] for record in logs if "tok_per_sec" in record]
    assert set(speeds) == {SPEED} and len(speeds) >= 5


def test_mfu_against_the_sum_of_all_peaks(tmp_path: Path, time: VirtualTime) -> None:
    logs = train(tmp_path, time, DefaultMetrics(peak_hardware_flops=1e9), max_steps=3)
    per_step = logs[2]["total_flos"] - logs[1]["total_flos"]
    assert logs[2]["mfu"] == pytest.approx(per_step / (FETCH_S + STEP_S) / 1e9)


def test_peak_is_found_by_the_name_of_the_device(
    tmp_path: Path, time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_metrics, "device_name", lambda device: "NVIDIA H200")
    logs = train(tmp_path, time, max_steps=3)
    per_step = logs[2]["total_flos"] - logs[1]["total_flos"]
    assert logs[2]["mfu"] == pytest.approx(per_step / (FETCH_S + STEP_S) / 67e12)


def test_unknown_device_has_no_mfu_and_is_told_once(
    tmp_path: Path,
    time: VirtualTime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(default_metrics, "device_name", lambda device: "ACME Z9")
    logs = train(tmp_path, time, max_steps=3)
    assert not any("mfu" in record for record in logs)
    assert len([r for r in caplog.records if "ACME Z9" in r.getMessage()]) == 1


def test_peak_memory_is_one_number_from_the_list_of_ranks() -> None:
    metrics, logs = DefaultMetrics(), {"peak_mem_allocated": [3, 7, 5]}
    metrics.on_log_step(None, TrainerState(), TrainerControl(), logs)
    assert logs == {"peak_mem_allocated": [3, 7, 5], "peak_mem": 7}


@pytest.mark.parametrize("given", [0, -1.0, float("nan"), "fast", True])
def test_bad_peak_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"peak_hardware_flops: .*allowed"):
        DefaultMetrics(peak_hardware_flops=given)


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "float8", 1979),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100-PCIE-40GB", "float16", 312),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("Tesla T4", "float16", 65),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A1000", "bf16", None),
        ("NVIDIA A100 80GB PCIe MIG 1g.10gb", "bf16", None),
        ("some other device", "bf16", None),
    ],
)
def test_peaks_by_name(name: str, dtype: str, tera: float | None) -> None:
    assert peak_flops(name, dtype) == (None if tera is None else pytest.approx(tera * 1e12))


def test_unknown_dtype_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        peak_flops("NVIDIA H200", "bfloat61")


def test_dtype_of_the_products() -> None:
    class Args:
        mixed_precision: str | None = None

    model = torch.nn.Linear(2, 2)
    assert working_dtype(Args(), model) == "float32"
    assert working_dtype(Args(), model.to(torch.bfloat16)) == "bfloat16"
    args = Args()
    args.mixed_precision = "fp16"
    assert working_dtype(args, model) == "float16"


def test_waiting_for_the_device_is_training_and_what_comes_after_is_not(time: VirtualTime) -> None:
    training = TrainingTime()

    def run_step() -> None:
        training.begin_step()
        time.now_s += STEP_S
        training.end_step()

    run_step()
    time.now_s += 3.0  # the device catches up
    training.deliver(7, global_step=7)
    time.now_s += EVAL_S
    training.interrupt()
    run_step()
    assert training.excluded_s == EVAL_S and training.was_interrupted
    time.now_s += 3.0  # metrics of the step before: the device is still at work
    training.deliver(7, global_step=8)
    time.now_s += 5.0
    run_step()
    assert training.excluded_s == EVAL_S and not training.was_interrupted


def test_an_update_that_goes_on_after_its_metrics_is_training(time: VirtualTime) -> None:
    class Loop(LoopTiming):
        """With a device that has the update of the newest step to do until `ends_s`."""

        ends_s, took_s = 0.0, 0.0

        @property
        def is_updating(self) -> bool:
            return time.now_s < self.ends_s

        @property
        def update_s(self) -> float:
            return math.inf if self.is_updating else self.took_s

    loop, training = Loop(), TrainingTime()
    training.begin(loop)

    def run_step(update_s: float, host_s: float) -> float:
        before_s = training.excluded_s
        training.begin_step()
        time.now_s += STEP_S
        training.end_step()
        loop.took_s, loop.ends_s = update_s, time.now_s + update_s
        training.deliver(1, global_step=1)
        time.now_s += host_s
        training.begin_step()
        return training.excluded_s - before_s

    assert run_step(update_s=4.0, host_s=10.0) == 6.0
    assert run_step(update_s=4.0, host_s=3.0) == 0.0
    assert run_step(update_s=0.0, host_s=10.0) == 10.0


def test_what_another_rank_sets_aside_is_not_training_either(
    tmp_path: Path, time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(measure: Any) -> Any:
        own = measure()
        # The other one wrote a trace while this one waited for it, in its second step.
        return [own, [own[0], 20.0 if own[0] > 20 else 0.0, own[2]]]

    monkeypatch.setattr(default_metrics, "on_all_ranks", ask)
    seen = Seen()
    work = Work(time, {2: STEP_S + 20.0})
    make_trainer(tmp_path, time, [DefaultMetrics(), work, seen], max_steps=4).train()
    assert {record["tok_per_sec"] for record in seen.logs if "tok_per_sec" in record} == {SPEED}


@pytest.mark.parametrize("logging_steps", [1, 2, 3])
def test_what_a_callback_sets_aside_is_not_training(
    tmp_path: Path, time: VirtualTime, logging_steps: int
) -> None:
    seen = Seen()
    callbacks = [DefaultMetrics(), Work(time), Aside(time, [2, 3, 4]), seen]
    options = {
        "max_steps": 6,
        "logging_steps": logging_steps,
        "eval_strategy": "steps",
        "eval_steps": 4,
    }
    make_trainer(tmp_path, time, callbacks, **options).train()
    speeds = {record["tok_per_sec"] for record in seen.logs if "tok_per_sec" in record}
    assert speeds == {SPEED}
