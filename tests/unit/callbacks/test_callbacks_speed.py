"""Throughput per step, on a clock that only work moves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_time import (
    ASIDE_S,
    EVAL_S,
    FETCH_S,
    GENERATE_S,
    STEP_S,
    TOKENS_PER_STEP,
    Aside,
    Seen,
    VirtualTime,
    Work,
    make_trainer,
)

from headway.callbacks import SpeedMonitorCallback
from headway.callbacks.watch import speed_monitor
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError
from headway.testing import count_host_syncs

DEVICE = "throughput/device"
WHOLE_S = FETCH_S + STEP_S


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return VirtualTime().use(monkeypatch)


def train(
    folder: Path,
    time: VirtualTime,
    monitor: SpeedMonitorCallback,
    step_s: dict[int, float] | None = None,
    **arguments: Any,
) -> dict[int, dict[str, float]]:
    seen = Seen()
    make_trainer(folder, time, [Work(time, step_s), monitor, seen], **arguments).train()
    return seen.metrics


@pytest.mark.parametrize("logging_steps", [1, 3])
def test_figures_of_each_step(tmp_path: Path, time: VirtualTime, logging_steps: int) -> None:
    monitor = SpeedMonitorCallback(
        num_flops_per_token=10, num_params=100, device_peak_flops_per_second=320
    )
    found = train(
        tmp_path, time, monitor, {4: 2 * STEP_S}, max_steps=5, logging_steps=logging_steps
    )
    assert not any(name.startswith("throughput") for name in found[1])
    seconds = {2: WHOLE_S, 3: WHOLE_S, 4: FETCH_S + 2 * STEP_S, 5: WHOLE_S}
    for step, expected in seconds.items():
        metrics = found[step]
        assert metrics[f"{DEVICE}/data loading (s)"] == pytest.approx(FETCH_S)
        assert metrics[f"{DEVICE}/data loading (%)"] == pytest.approx(100 * FETCH_S / expected)
        assert metrics[f"{DEVICE}/TPS"] == pytest.approx(TOKENS_PER_STEP / expected)
        assert metrics[f"{DEVICE}/BPS"] == pytest.approx(1 / expected)
        assert metrics[f"{DEVICE}/flopsPS"] == pytest.approx(10 * TOKENS_PER_STEP / expected)
        assert metrics[f"{DEVICE}/MFU"] == pytest.approx(50 * TOKENS_PER_STEP / 16 / expected)
        assert metrics["throughput/total tokens"] == TOKENS_PER_STEP * step
        assert metrics["throughput/total petaflops"] == pytest.approx(160 * step / 1e15)
        assert metrics["throughput/chinchilla multiple"] == pytest.approx(16 * step / 2000)
    whole = sum(seconds.values())
    last = found[5]
    assert last[f"{DEVICE}/TPS (actual avg)"] == pytest.approx(4 * TOKENS_PER_STEP / whole)
    assert last[f"{DEVICE}/BPS (actual avg)"] == pytest.approx(4 / whole)
    assert last[f"{DEVICE}/flopsPS (actual avg)"] == pytest.approx(640 / whole)
    assert last[f"{DEVICE}/MFU (actual avg)"] == pytest.approx(200 / whole)
    assert last["throughput/goodput (%)"] == pytest.approx(100)
    assert monitor.tps_avg == pytest.approx(4 * TOKENS_PER_STEP / whole)
    assert monitor.bps_avg == pytest.approx(4 / whole)
    assert monitor.mfu_avg == pytest.approx(200 / whole)


def test_evaluations_are_in_the_average_and_not_in_a_step(
    tmp_path: Path, time: VirtualTime
) -> None:
    found = train(
        tmp_path,
        time,
        SpeedMonitorCallback(),
        max_steps=5,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=3,
    )
    steps = {metrics[f"{DEVICE}/TPS"] for step, metrics in found.items() if step > 1}
    assert steps == {TOKENS_PER_STEP / WHOLE_S}
    elsewhere_s = 2 * (EVAL_S + FETCH_S) + GENERATE_S
    whole = 4 * WHOLE_S + elsewhere_s
    last = found[5]
    assert last[f"{DEVICE}/TPS (actual avg)"] == pytest.approx(4 * TOKENS_PER_STEP / whole)
    assert last["throughput/goodput (%)"] == pytest.approx(100 * 4 * WHOLE_S / whole)


@pytest.mark.parametrize("logging_steps", [1, 2, 10])
def test_what_a_callback_sets_aside_is_in_the_average_and_not_in_a_step(
    tmp_path: Path, time: VirtualTime, logging_steps: int
) -> None:
    seen, monitor = Seen(), SpeedMonitorCallback()
    callbacks = [Work(time), monitor, Aside(time, [2, 3]), seen]
    options = {"max_steps": 5, "logging_steps": logging_steps}
    make_trainer(tmp_path, time, callbacks, **options).train()
    steps = {metrics[f"{DEVICE}/TPS"] for step, metrics in seen.metrics.items() if step > 1}
    assert steps == {TOKENS_PER_STEP / WHOLE_S}
    whole = 4 * WHOLE_S + 2 * ASIDE_S
    assert seen.metrics[5]["throughput/goodput (%)"] == pytest.approx(100 * 4 * WHOLE_S / whole)


def test_operations_and_parameters_are_found_out(tmp_path: Path, time: VirtualTime) -> None:
    found = train(tmp_path, time, SpeedMonitorCallback(), max_steps=3)
    assert found[3][f"{DEVICE}/flopsPS"] > 0
    assert found[3]["throughput/chinchilla multiple"] > 0
    assert f"{DEVICE}/MFU" not in found[3]  # a CPU has no peak that is known


def test_peak_of_a_known_device(
    tmp_path: Path, time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_monitor, "device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    found = train(tmp_path, time, SpeedMonitorCallback(), max_steps=2)
    share = 100 * found[2][f"{DEVICE}/flopsPS"] / 19.5e12
    assert found[2][f"{DEVICE}/MFU"] == pytest.approx(share)


class Behind:
    """Stamps of a device that is `lag` steps behind the host, as a GPU is."""

    waits = True

    def __init__(self, time: VirtualTime) -> None:
        self.time, self.done_s = time, 0.0

    def take(self) -> float:
        return self.time()

    def is_over(self, stamp: float) -> bool:
        return stamp <= self.done_s

    def seconds(self, first: float, second: float) -> float:
        assert second <= self.done_s, "asking for it would wait for the device"
        return second - first


def test_a_device_behind_the_host_is_not_waited_for(time: VirtualTime) -> None:
    device = Behind(time)
    monitor = SpeedMonitorCallback(num_params=1)
    recorded: dict[str, float] = {}
    trainer = SimpleNamespace(
        record_metric=lambda name, value, reduce_type=None: recorded.update({name: value})
    )
    state, control = TrainerState(), TrainerControl()
    monitor._stamps = device

    def step(seconds: float) -> dict[str, float]:
        recorded.clear()
        monitor.on_step_begin(None, state, control)
        time.now_s += seconds
        state.global_step += 1
        state.num_input_tokens_seen += 10
        monitor.on_step_end(None, state, control, trainer)
        return dict(recorded)

    step(1.0)
    # Before a flush ranks may differ in what is done, so none records it.
    assert f"{DEVICE}/TPS" not in step(2.0) and f"{DEVICE}/TPS (actual avg)" in step(4.0)
    device.done_s = time()
    monitor.on_metrics(None, state, control, 2)
    assert f"{DEVICE}/TPS" not in step(4.0)  # of step 2, the first with figures, the end may wait
    device.done_s = time()
    monitor.on_metrics(None, state, control, 4)
    assert step(5.0)[f"{DEVICE}/TPS"] == pytest.approx(10 / 4.0)  # the newest that is done
    assert step(1.0)[f"{DEVICE}/TPS"] == pytest.approx(10 / 4.0)
    device.done_s = time()
    assert step(1.0)[f"{DEVICE}/TPS"] == pytest.approx(10 / 1.0)


def test_reset_forgets_all_averages(tmp_path: Path, time: VirtualTime) -> None:
    monitor = SpeedMonitorCallback(device_peak_flops_per_second=1e12)
    train(tmp_path, time, monitor, max_steps=3)
    assert None not in (monitor.bps_avg, monitor.tps_avg, monitor.mfu_avg)
    monitor.reset()
    assert (monitor.bps_avg, monitor.tps_avg, monitor.mfu_avg) == (None, None, None)


def test_recording_waits_for_nothing(tmp_path: Path, time: VirtualTime) -> None:
    monitor = SpeedMonitorCallback()
    with count_host_syncs(device_type="cpu") as syncs:
        train(tmp_path, time, monitor, max_steps=4, logging_steps=4)
    assert not [sync for sync in syncs.records if "callbacks" in sync.file], syncs.report()


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("num_flops_per_token", 0),
        ("num_params", 1.5),
        ("num_params", 0),
        ("device_peak_flops_per_second", -1),
    ],
)
def test_bad_numbers_are_refused(option: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=f"{option}: {given} given; allowed"):
        SpeedMonitorCallback(**{option: given})
