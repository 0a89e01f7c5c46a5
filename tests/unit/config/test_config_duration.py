"""Durations: what is read, what is refused, that text reads back."""

import pytest

from headway.config import Duration
from headway.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        (500, 500, "steps"),
        ("500", 500, "steps"),
        ("500 steps", 500, "steps"),
        ("3k steps", 3000, "steps"),
        ("1 epoch", 1, "epochs"),
        ("1.5 epochs", 1.5, "epochs"),
        ("500 tokens", 500, "tokens"),
        ("3t tokens", 3 * 10**12, "tokens"),
        ("2B tokens", 2 * 10**9, "tokens"),
        ("2Btokens", 2 * 10**9, "tokens"),
        ("1.5b tokens", 1_500_000_000, "tokens"),
        ("30M tokens", 30_000_000, "tokens"),
        ("300s", 300, "seconds"),
        ("20min", 1200, "seconds"),
        ("30m", 1800, "seconds"),
        ("71h", 255_600, "seconds"),
        ("1h30m", 5400, "seconds"),
        ("1h 30 min 5s", 5405, "seconds"),
        ("2 days", 172_800, "seconds"),
        ("0.5s", 0.5, "seconds"),
    ],
)
def test_reads_and_round_trips(text, value, unit):
    duration = Duration.parse(text)
    assert (duration.value, duration.unit) == (value, unit)
    assert Duration.parse(str(duration)) == duration


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("5 stps", "did you mean 'steps'"),
        ("2B", "2B tokens"),
        ("30M", "does not say what it counts"),
        ("", "empty"),
        ("soon", "cannot read"),
        ("-3", "cannot read"),
        ("1.5", "cannot read"),
        ("1.5 steps", "whole"),
        (True, "whole number or text"),
        (1.5, "whole number or text"),
        (-1, "negative"),
        ("1e999 tokens", "unknown unit"),
        ("1h 2 epochs", "cannot read"),
    ],
)
def test_refuses(text, part):
    with pytest.raises(ConfigError, match=part):
        Duration.parse(text)


def test_builders():
    assert Duration.steps(3) == Duration(3, "steps")
    assert Duration.epochs(0.5).value == 0.5
    assert Duration.seconds(60) == Duration.parse("1min")
    assert Duration.chinchilla_tokens(1.5, 1_000_000) == Duration.tokens(30_000_000)
    with pytest.raises(ConfigError, match="did you mean 'tokens'"):
        Duration(1, "token")


@pytest.mark.parametrize(
    ("duration", "so_far", "due"),
    [
        (Duration.steps(3), {"step": 2, "tokens": 99}, False),
        (Duration.steps(3), {"step": 3}, True),
        (Duration.tokens(100), {"step": 500, "tokens": 99}, False),
        (Duration.tokens(100), {"tokens": 130}, True),
        (Duration.epochs(0.3), {"epoch": 0.1 + 0.2 - 1e-12}, True),
        (Duration.epochs(1), {"epoch": 0.99, "step": 7}, False),
        (Duration.seconds(60), {"seconds": 60.5}, True),
        (Duration.seconds(60), {"step": 61}, False),
        (Duration.chinchilla_tokens(0.5, model_params=1000), {"tokens": 10_000}, True),
        (Duration.chinchilla_tokens(0.5, model_params=1000), {"tokens": 9_999}, False),
    ],
)
def test_due(duration, so_far, due):
    assert duration.due(**so_far) is due


def test_arithmetic_and_order():
    assert Duration.steps(3) + Duration.steps(4) == Duration.steps(7)
    assert Duration.epochs(2) - Duration.epochs(0.5) == Duration.epochs(1.5)
    assert 1.5 * Duration.tokens(3) == Duration.tokens(4)  # whole
    assert Duration.seconds(3) * 0.5 == Duration.seconds(1.5)
    assert Duration.steps(2) < Duration.steps(3) <= Duration.steps(3)
    assert max(Duration.parse("1h"), Duration.parse("90min")) == Duration.parse("1h30m")


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda: Duration.steps(1) + Duration.tokens(1), "cannot be added: one is in steps"),
        (lambda: Duration.steps(1) < Duration.epochs(1), "cannot be compared"),
        (lambda: Duration.steps(1) - Duration.steps(2), "negative"),
        (lambda: Duration.steps(1) * float("inf"), "finite"),
        (lambda: Duration.chinchilla_tokens(0, model_params=5), "multiple must be above 0"),
        (lambda: Duration.chinchilla_tokens(1, model_params=-5), "model_params must be above 0"),
    ],
)
def test_arithmetic_refuses(act, told):
    with pytest.raises(ConfigError, match=told):
        act()
