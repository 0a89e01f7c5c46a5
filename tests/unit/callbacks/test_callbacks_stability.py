"""Spikes in loss and gradient norm."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from headway.callbacks import StabilityMonitorCallback
from headway.callbacks.watch.stability_monitor import CalmWindow
from headway.errors import ConfigError
from headway.testing import tiny_trainer

LOSS, NORM = "train/CE loss", "optim/total grad norm"
SCORE, TOTAL = "spike/SpikeScore", "spike/SpikeScore (total)"


def feed(monitor: StabilityMonitorCallback, values: list[dict[str, float]]) -> list[dict]:
    given = [dict(metrics) for metrics in values]
    for step, metrics in enumerate(given, start=1):
        monitor.on_metrics(step, metrics)
    return given


def calm(count: int, seed: int = 0) -> list[dict[str, float]]:
    draw = random.Random(seed)
    return [{LOSS: 2 + draw.gauss(0, 0.1), NORM: 1 + draw.gauss(0, 0.1)} for _ in range(count)]


def test_scores_appear_when_their_windows_are_full() -> None:
    monitor = StabilityMonitorCallback(window_size=4, rolling_window=6)
    found = feed(monitor, calm(8))
    assert [TOTAL in metrics for metrics in found] == [False] * 3 + [True] * 5
    assert [SCORE in metrics for metrics in found] == [False] * 5 + [True] * 3
    assert found[-1][SCORE] == found[-1][TOTAL] == 0


def test_a_spike_of_either_metric_counts_and_leaves_the_rolling_window() -> None:
    monitor = StabilityMonitorCallback(window_size=8, rolling_window=10)
    values = calm(30)
    values[9][LOSS] = 50.0
    values[12][NORM] = 50.0
    values[15][LOSS] = -50.0  # down is no spike
    found = feed(monitor, values)
    assert found[12][SCORE] == 2 / 10
    assert found[18][SCORE] == 2 / 10
    assert found[19][SCORE] == 1 / 10
    assert found[22][SCORE] == 0
    assert found[29][TOTAL] == 2 / 30


def test_spikes_do_not_mask_later_ones() -> None:
    monitor = StabilityMonitorCallback(window_size=8, rolling_window=12)
    values = calm(12)
    values[9][LOSS], values[10][LOSS] = 100.0, 10.0
    assert feed(monitor, values)[11][SCORE] == 2 / 12


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_not_finite_is_a_spike_from_the_first_step_on_and_never_enters(bad: float) -> None:
    monitor = StabilityMonitorCallback(window_size=4, rolling_window=6)
    values = [{LOSS: bad, NORM: 1.0}, *calm(5)]
    found = feed(monitor, values)
    assert found[5][SCORE] == 1 / 6
    state = monitor.state_dict()
    assert all(math.isfinite(value) and abs(value) < 10 for value in state["loss_history"])
    json.dumps(state, allow_nan=False)


def test_a_new_level_stops_being_a_spike_after_a_window() -> None:
    monitor = StabilityMonitorCallback(window_size=8, rolling_window=4)
    values = [*calm(10), *({LOSS: 9.0 + n % 2, NORM: 1.0 + n % 2} for n in range(30))]
    found = feed(monitor, values)
    assert found[17][SCORE] == 1
    assert found[-1][SCORE] == 0


def test_steps_without_either_metric_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    monitor = StabilityMonitorCallback(window_size=2, rolling_window=3, loss_metric_name="lost")
    feed(monitor, [{LOSS: 1.0}, {LOSS: 1.0}, {"other": 3.0}])
    assert monitor.state_dict()["total_step_count"] == 0
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "'lost'" in told[0] and LOSS in told[0]


@pytest.mark.parametrize("names", [("loss", "grad_norm"), (LOSS, NORM)])
def test_both_names_of_the_metrics_work_in_a_run(tmp_path: Path, names: tuple[str, str]) -> None:
    monitor = StabilityMonitorCallback(
        window_size=2, rolling_window=3, loss_metric_name=names[0], grad_norm_metric_name=names[1]
    )
    tiny_trainer(tmp_path, [monitor], max_steps=4, logging_steps=2).train()
    state = monitor.state_dict()
    assert state["total_step_count"] == 4
    assert len(state["loss_history"]) == len(state["grad_norm_history"]) == 2


def test_state_goes_on_where_it_was() -> None:
    values = calm(60)
    for place in (20, 33, 47):
        values[place][LOSS] = 99.0
    whole = StabilityMonitorCallback(window_size=8, rolling_window=16)
    expected = feed(whole, values)
    first = StabilityMonitorCallback(window_size=8, rolling_window=16)
    feed(first, values[:35])
    saved = json.loads(json.dumps(first.state_dict()))
    second = StabilityMonitorCallback(window_size=8, rolling_window=16)
    second.load_state_dict(saved)
    assert second.state_dict() == saved
    assert feed(second, values[35:]) == expected[35:]


def test_state_of_another_shape_loads() -> None:
    monitor = StabilityMonitorCallback(window_size=2, rolling_window=3)
    monitor.load_state_dict({})
    assert monitor.state_dict()["total_step_count"] == 0
    monitor.load_state_dict(
        {
            "loss_history": [1.0, 2.0, 3.0],
            "spike_history": [True, False, True, False, False],
            "total_spike_count": 2,
            "total_step_count": 5,
        }
    )
    state = monitor.state_dict()
    assert state["loss_history"] == [2.0, 3.0]  # the window has become shorter
    assert state["spike_history"] == [3]  # steps 1 and 3 spiked; the last three are 3, 4, 5


def test_running_sums_stay_true_over_many_steps() -> None:
    draw = random.Random(1)
    window, kept = CalmWindow(32, 1e9), deque(maxlen=32)
    for number in range(5_000):
        value = (1e8 if number % 1000 < 40 else 0.0) + draw.random()
        window.spikes(value)
        kept.append(value)
    assert window._mean == pytest.approx(statistics.fmean(kept))
    assert math.sqrt(window._squares / 32) == pytest.approx(statistics.pstdev(kept))


def test_off_means_off() -> None:
    monitor = StabilityMonitorCallback(window_size=2, rolling_window=2, enabled=False)
    assert feed(monitor, calm(5)) == calm(5)


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("window_size", 1),
        ("rolling_window", 0),
        ("threshold_std", 0.0),
        ("threshold_std", math.nan),
        ("enabled", "yes"),
        ("loss_metric_name", ""),
    ],
)
def test_bad_values_are_refused(option: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{option}: .* given; allowed"):
        StabilityMonitorCallback(**{option: given})


def test_a_second_run_of_one_object_begins_anew(tmp_path: Path) -> None:
    monitor = StabilityMonitorCallback(window_size=2, rolling_window=3)
    alone = StabilityMonitorCallback(window_size=2, rolling_window=3)
    tiny_trainer(tmp_path / "one", [monitor], num_samples=32, max_steps=7).train()
    for name, one in (("two", monitor), ("alone", alone)):
        tiny_trainer(tmp_path / name, [one], num_samples=32, max_steps=4).train()
    assert monitor.state_dict() == alone.state_dict()
