"""The range test: which rates it tries, how it smooths, when it stops; what losses suggest."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.optim.lr_range import RangeOptions, RunningMean, run_range_test
from headway.optim.lr_suggest import suggest

RATES = np.logspace(-7, 0, 100)


def fall(centre: float, *, low: float = 1.0, blow_up: float = 0.3) -> list[float]:
    """Losses that fall from 3 around a rate and run away above `blow_up`."""
    curve = low + (3 - low) / (1 + (RATES / centre) ** 2)
    return list(curve + np.maximum(0, np.log10(RATES / blow_up)) * 50)


def test_rates_grow_by_one_factor_and_include_both_ends() -> None:
    seen: list[float] = []
    options = RangeOptions(start_lr=1e-5, end_lr=0.3, num_iterations=7)
    run_range_test(lambda lr: seen.append(lr) or 1.0, options)  # type: ignore[func-returns-value]
    assert (seen[0], seen[-1], len(seen)) == (1e-5, 0.3, 7)
    factors = [b / a for a, b in itertools.pairwise(seen)]
    assert factors == pytest.approx([(0.3 / 1e-5) ** (1 / 6)] * 6)


def test_the_running_mean_is_not_pulled_to_its_first_value() -> None:
    mean, values = RunningMean(0.05), [4.0, 2.0, 3.0, 1.0]
    means = [mean.add(value) for value in values]
    for count in range(1, len(values) + 1):
        weights = [0.05 * 0.95 ** (count - 1 - n) for n in range(count)]
        expected = sum(w * v for w, v in zip(weights, values)) / (1 - 0.95**count)
        assert means[count - 1] == pytest.approx(expected, rel=1e-12)
    assert means[1] < 3.0  # a mean that begins with its first value would still be at 3.9


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_stops_it(value: float) -> None:
    losses = iter([3.0, 2.0, 1.0, value, 1.0])
    test = run_range_test(lambda lr: next(losses), RangeOptions(num_iterations=50))
    assert (test.losses, test.stopped) == ([3.0, 2.0, 1.0], "nonfinite")
    assert test.stopped_lr == RangeOptions(num_iterations=50).rates()[3]


@pytest.mark.parametrize(
    ("losses", "num_steps"),
    [
        ([1.0, 1.0, 3.9, 1.0, 4.1, 1.0], 5),  # 4 times the best
        ([-5.0, -6.0, 2.0, 10.0, 13.0, 0.0], 5),  # below zero: a multiple says nothing
        ([2.0, 0.001, 0.1, 0.5, 0.7, 0.0], 5),  # next to zero: measured by the fall
    ],
)
def test_a_loss_that_runs_away_stops_it(losses: list[float], num_steps: int) -> None:
    values = iter(losses)
    options = RangeOptions(num_iterations=6, smoothing_factor=1.0)
    test = run_range_test(lambda lr: next(values), options)
    assert (len(test.lrs), test.stopped) == (num_steps, "diverged")
    assert test.stopped_lr == test.lrs[-1]


def test_all_ranks_stop_when_one_does() -> None:
    losses = iter([1.0] * 10)
    asked: list[bool] = []

    def agree(stop: bool) -> bool:
        asked.append(stop)
        return len(asked) == 3  # another rank wants to

    test = run_range_test(lambda lr: next(losses), RangeOptions(num_iterations=10), agree)
    assert (len(test.lrs), asked) == (3, [False] * 3)
    assert test.stopped is not None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"start_lr": 0.0}, "start_lr"),
        ({"start_lr": math.nan}, "start_lr"),
        ({"start_lr": 0.1, "end_lr": 0.1}, "end_lr"),
        ({"end_lr": math.inf}, "end_lr"),
        ({"num_iterations": 2}, "num_iterations"),
        ({"smoothing_factor": 0.0}, "smoothing_factor"),
        ({"smoothing_factor": 1.5}, "smoothing_factor"),
        ({"divergence_threshold": 1.0}, "divergence_threshold"),
    ],
)
def test_options_without_sense_are_refused(given: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}: .*allowed"):
        RangeOptions(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("centre", [1e-5, 1e-3, 1e-2])
def test_rules_find_a_fall_where_it_is(centre: float) -> None:
    """Of 1 / (1 + (rate / centre) ** 2) the steepest and the middle point are at the centre."""
    found = suggest(RATES, fall(centre))
    assert found.by_rule["steepest"] == pytest.approx(centre, rel=0.35)
    assert found.by_rule["valley"] == pytest.approx(centre, rel=0.35)
    assert 3 * centre < 10 * found.by_rule["minimum/10"] < 0.4  # between fall and blow-up
    assert found.suggested_lr == sorted(found.by_rule.values())[1]


def test_one_noisy_drop_does_not_win() -> None:
    losses = fall(1e-3)
    losses[20] += 1.0  # and so the largest drop of all is from point 20 to 21
    assert suggest(RATES, losses).by_rule["steepest"] == pytest.approx(1e-3, rel=0.35)


def test_how_far_a_loss_runs_away_moves_nothing() -> None:
    mild, wild = fall(1e-3), fall(1e-3)
    wild[-1] = 1e6
    assert suggest(RATES, wild).by_rule == suggest(RATES, mild).by_rule


@pytest.mark.parametrize(
    "losses",
    [
        [3.0] * 100,
        list(3.0 + np.maximum(0, np.log10(RATES) + 3)),
        list(3.0 - 1e-6 * np.arange(100)),
    ],
    ids=["flat", "rising", "next to nothing"],
)
def test_no_suggestion_where_the_loss_never_fell(losses: list[float]) -> None:
    found = suggest(RATES, losses)
    assert found.suggested_lr is None and not found.by_rule
    assert found.reason is not None and "never fell" in found.reason


@pytest.mark.parametrize(
    "losses",
    [
        [5.0, 2.0, 1.0, *[0.9] * 60],
        [5.0, 3.0, 2.0, 1.0, 1.0, 1.1, 2.0, 4.0, 9.0],
        [*np.linspace(5, 1, 5), 30.0],
        [*[5.0] * 5, 4.9, 4.5, 3.0, 1.0, 2.0, 5.0, 13.0],
        [3.0, 2.0, 1.0, *np.linspace(2, 99, 97)],
    ],
    ids=["at once", "nine rates", "and runs away", "late and steep", "to one loss"],
)
def test_a_fall_of_few_points_is_a_fall(losses: list[float]) -> None:
    found = suggest(RATES[: len(losses)], losses)
    assert found.reason is None and found.suggested_lr is not None
    assert RATES[0] <= found.suggested_lr <= RATES[int(np.argmin(losses))]


def unimodal(generator: np.random.Generator, num_points: int) -> list[float]:
    """Losses that may be level for a while, fall by a factor of 1.5 to 100, and may rise again."""
    first, length = generator.integers(0, num_points // 2), generator.integers(4, num_points // 3)
    part = np.clip((np.arange(num_points) - first) / length, 0, 1)
    height = 10 ** generator.uniform(math.log10(1.5), 2)
    losses = height - (height - 1) * part ** generator.choice([0.5, 1.0, 2.0])
    bottom = first + length + generator.integers(1, num_points // 4)
    away = np.exp(np.maximum(0, np.arange(num_points) - bottom) * generator.uniform(0.1, 1)) - 1
    losses += away * generator.integers(0, 2)
    scale = 10 ** generator.uniform(-3, 3)
    return list(scale * losses[: max(bottom + 2, np.count_nonzero(losses < 4 * height))])


@pytest.mark.parametrize("num_points", [20, 40, 100])
def test_every_clear_fall_gets_a_suggestion(num_points: int) -> None:
    generator, rates = np.random.default_rng(0), np.logspace(-7, 0, num_points)
    for _ in range(150):
        losses = unimodal(generator, num_points)
        found = suggest(rates[: len(losses)], losses)
        assert found.suggested_lr is not None, (losses, found.reason)
        assert found.suggested_lr <= rates[max(np.flatnonzero(losses == np.min(losses)))]


@pytest.mark.parametrize("num_points", [5, 10, 40, 100])
def test_no_rise_gets_a_suggestion(num_points: int) -> None:
    generator, rates = np.random.default_rng(0), np.logspace(-7, 0, num_points)
    for _ in range(150):
        steps = np.where(generator.random(num_points) < generator.random(), 0.0, 1.0)
        steps *= 10 ** generator.uniform(-3, 3, num_points)
        found = suggest(rates, generator.uniform(-5, 5) + np.cumsum(steps))
        assert found.suggested_lr is None and "never fell" in str(found.reason)


def test_noise_is_not_taken_for_a_fall() -> None:
    generator = np.random.default_rng(0)
    normal = [suggest(RATES, 3 + 0.3 * generator.standard_normal(100)) for _ in range(200)]
    heavy = [suggest(RATES, 3 + 0.2 * generator.standard_t(3, 100)) for _ in range(200)]
    assert sum(found.suggested_lr is not None for found in normal) == 0
    assert sum(found.suggested_lr is not None for found in heavy) <= 4
    noisy = np.asarray(fall(1e-3)) + 0.2 * generator.standard_normal(100)
    assert suggest(RATES, noisy).suggested_lr == pytest.approx(1e-3, rel=1.0)


def test_too_few_points_suggest_nothing() -> None:
    found = suggest([1e-3, 1e-2, 1e-1], [3.0, 2.0, 1.0])
    assert found.suggested_lr is None
    assert found.reason is not None and "start_lr" in found.reason
