"""When a loss curve has diverged, and when it has not: replayed curves and simulated runs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from typing import Any

import pytest

from headway.callbacks import DivergenceDetector
from headway.callbacks.guard.divergence_rule import DivergenceRule


def rule(**changes: Any) -> DivergenceRule:
    """The rule of a detector that is made without arguments, but for changes."""
    return DivergenceDetector(**changes).rule


def detect(curve: Iterable[float], **changes: Any) -> int | None:
    """The number of the observation, from 0, at which a curve is found to have diverged."""
    judge = rule(**changes)
    return next((n for n, value in enumerate(curve) if judge.observe(value)), None)


def healthy(seed: int) -> list[float]:
    """A loss as runs have it: a fast fall, a slow one, noise, a hard batch now and then."""
    dice = random.Random(seed)
    start, floor = dice.uniform(9.0, 12.0), dice.uniform(1.5, 4.0)
    pace, noise = dice.uniform(0.3, 0.9), dice.uniform(0.0, 0.25)
    length = dice.randint(60, 250)
    curve = []
    for n in range(length):
        value = floor + (start - floor) * (1 + n) ** -pace + dice.gauss(0.0, noise)
        if dice.random() < 0.01:
            value += dice.uniform(0.5, 2.5)
        if n == length // 2 and dice.random() < 0.3:
            floor += 0.4  # another mixture of data from here on
        curve.append(value)
    return curve


def falling(length: int = 60) -> list[float]:
    """From about 10 to 3.8."""
    return [3.8 + 6.2 * math.exp(-n / 12) for n in range(length)]


def test_a_healthy_curve_is_left_alone() -> None:
    assert detect(falling(400)) is None


@pytest.mark.parametrize("level", [9.7, 7.5, 20.0, 1e4])
def test_a_spike_that_stays_is_found_within_three_observations(level: float) -> None:
    calm = falling()
    assert detect([*calm, *[level] * 10]) == len(calm) + 2


def test_a_noisy_spike_is_found_within_three_observations() -> None:
    for seed in range(200):
        dice = random.Random(seed)
        calm = [value + dice.gauss(0, 0.1) for value in falling()]
        spike = [9.7 + dice.gauss(0, 0.5) for _ in range(10)]
        assert detect([*calm, *spike]) == len(calm) + 2


def test_a_slow_rise_is_found_soon_after_it_passed_the_limit() -> None:
    calm = falling()
    rise = [calm[-1] + 0.05 * n for n in range(1, 200)]
    found = detect([*calm, *rise])
    assert found is not None
    passed = next(n for n, value in enumerate([*calm, *rise]) if n > 40 and value > calm[-1] + 1)
    # The average lags by (1 - 0.3) / 0.3 observations; then it takes three in a row.
    assert 0 < found - passed <= 3 + 3


def test_a_single_hard_batch_is_no_divergence() -> None:
    curve = falling()
    curve[40] += 5.0
    assert detect(curve) is None


def test_no_false_alarm_in_a_thousand_healthy_runs() -> None:
    found = {seed: detect(healthy(seed)) for seed in range(1000)}
    assert [seed for seed, number in found.items() if number is not None] == []


def test_a_thousand_runs_that_break_are_all_found() -> None:
    late = []
    for seed in range(1000):
        curve = healthy(seed)
        at = random.Random(-seed).randrange(20, len(curve))
        broken = [*curve[:at], *[max(curve[:at]) + 1.0] * 3]
        if detect(broken) is None:
            late.append(seed)
    # A curve that is still falling steeply has a best not far below the level it breaks to.
    assert late == []


def test_warm_up_is_not_judged_but_counts_for_the_best() -> None:
    assert detect([1.0] * 5 + [50.0] * 5, warmup=10) is None
    assert detect([1.0] * 5 + [50.0] * 8, warmup=10) == 12
    assert detect([1.0] * 5 + [50.0] * 8, warmup=0) == 7


def test_patience_of_one_acts_at_once() -> None:
    assert detect([2.0] * 12 + [9.0], patience=1) == 12


def test_the_average_is_corrected_for_its_start() -> None:
    judge = rule(smoothing=0.1)
    for value in (9.0, 3.0, 3.0):
        judge.observe(value)
    weights = [0.9**2, 0.9, 1.0]
    expected = (9 * weights[0] + 3 * weights[1] + 3 * weights[2]) / sum(weights)
    assert judge.smoothed == pytest.approx(expected)


def test_relative_limit() -> None:
    calm = [2.0] * 20
    assert detect([*calm, *[2.9] * 30], threshold=None, relative_threshold=1.5) is None
    assert detect([*calm, *[3.2] * 30], threshold=None, relative_threshold=1.5) is not None
    # Either limit is enough.
    assert detect([*calm, *[3.2] * 30], threshold=5.0, relative_threshold=1.5) is not None


def test_metrics_below_zero_and_at_zero() -> None:
    assert detect([-5.0] * 20 + [-4.0] * 30, threshold=None, relative_threshold=1.5) is None
    assert detect([-5.0] * 20 + [-1.0] * 30, threshold=None, relative_threshold=1.5) is not None
    # Half as much again of nothing is nothing: such a limit says nothing then.
    assert detect([0.0] * 20 + [0.0] * 30, threshold=None, relative_threshold=1.5) is None


def test_a_metric_that_should_rise() -> None:
    rising = [0.1 + 0.02 * n for n in range(40)]
    better = {"threshold": 0.3, "greater_is_better": True}
    assert detect(rising, **better) is None
    assert detect([*rising, *[0.2] * 10], **better) == 43
    assert detect([*rising, *[2.0] * 10], **better) is None


def test_after_a_divergence_there_is_a_pause() -> None:
    judge = rule(cooldown=5)
    curve = [2.0] * 15 + [9.0] * 20
    found = []
    for number, value in enumerate(curve):
        if judge.observe(value):
            found.append(number)
            judge.settle()
    assert found == [17, 17 + 5 + 3, 17 + 2 * (5 + 3)]


def test_a_state_at_its_limit_does_not_act_again() -> None:
    before = rule()
    for value in [2.0] * 15 + [9.0] * 3:
        diverged = before.observe(value)
    assert diverged
    after = rule()
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert not after.observe(9.0)
    assert after.smoothed == pytest.approx(
        before.smoothed + 0.3 * (9.0 - before.smoothed), rel=0.01
    )


def test_any_state_can_be_loaded() -> None:
    for state in ({}, {"smoothed_loss": None}, {"smoothed_loss": 1.0}, {"best_smoothed_loss": "x"}):
        judge = rule()
        judge.load_state_dict(state)
        assert judge.observation_count == 0 and not judge.observe(3.0)
    judge = rule()
    judge.observe(1e308)
    judge.observe(-1e308)
    json.dumps(judge.state_dict(), allow_nan=False)


def test_calm_ends_before_the_limit_is_reached() -> None:
    judge = rule()
    for value in [2.0] * 15:
        judge.observe(value)
        assert judge.is_calm
    judge.observe(3.5)  # the average is at 2.45: below the limit, but not what it was
    assert not judge.is_calm
