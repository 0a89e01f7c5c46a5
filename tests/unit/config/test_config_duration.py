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
