"""Mistakes in a schedule are told by name, with what is allowed."""

import pytest

from headway import ConfigError
from headway.optim import resolve_warmup_steps
from headway.optim.schedules import ScheduleSpec, make_schedule

PIECES = [{"type": "linear", "length": 5}, {"type": "constant"}]


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("cosin", {}, "did you mean 'cosine'"),
        ("warmup_stable", {}, "did you mean 'warmup_stable_decay'"),
        ("reduce_lr_on_plateau", {}, "needs a metric at each step.*on_evaluate"),
        ("greedy", {}, "metric at each step"),
        ("cosine", {"total_steps": None}, "needs to know how many steps"),
        ("wsd", {"total_steps": None}, "needs to know how many steps"),
        ("linear", {"total_steps": 5, "warmup_steps": 6}, "warmup_steps=6 is longer than .* 5"),
        ("linear", {"warmup_steps": -1}, "must not be negative"),
        ("cosine", {"min_ration": 0.1}, "did you mean 'min_ratio'"),
        ("cosine", {"min_lr_ration": 0.1}, "did you mean 'min_lr_ratio'"),
        ("cosine", {"min_ratio": "low"}, "must be a number"),
        ("cosine", {"min_ratio": True}, "must be a number"),
        ("cosine", {"min_ratio": 1.5}, r"must lie in \[0, 1\], got 1.5"),
        ("cosine", {"min_ratio": 0.1, "min_lr": 0.1}, "give one of them"),
        ("cosine", {"min_ratio": 0.1, "min_lr_rate": 0.1}, "second spelling"),
        ("cosine", {"min_lr": 2.0}, "min_lr=2 is above the learning rate 1"),
        ("cosine", {"num_cycles": 0}, "must be above 0"),
        ("cosine_with_restarts", {"num_cycles": 1.5}, "must be whole"),
        ("cosine_with_min_lr", {}, "needs its floor: min_lr"),
        ("cosine_warmup_with_min_lr", {"min_lr": 0.1, "warmup_lr_rate": 0}, "must be above 0"),
        ("polynomial", {"power": float("nan")}, "must be a number"),
        ("constant", {"power": 1}, "unknown option of 'constant' 'power'"),
        ("linear", {"warmup_type": "cosin"}, "did you mean 'cosine'"),
        ("wsd", {"decay_type": "1-sqr"}, "did you mean '1-sqrt'"),
        ("wsd", {"decay_type": "exponential"}, "never reaches 0: give min_ratio"),
        ("wsd", {"decay_steps": 2.5}, "must be a whole number"),
        ("wsd", {"decay_steps": 200}, "longer than the training of 100 steps"),
        ("wsd", {"stable_steps": 80, "decay_steps": 30}, "stable 80 and decay 30 are longer"),
        ("wsd", {"decay_ratio": 0.9, "warmup_steps": 20}, "longer than the training"),
        ("infinite", {"cooldown_steps": 5}, "give both or neither"),
        ("infinite", {"constant_ratio": 0.5}, "give both or neither"),
        ("infinite", {"decay_start": 5, "warmup_steps": 10, "min_ratio": 0.1}, "must lie after"),
        ("infinite", {"decay_start": 5, "total_steps": None, "min_ratio": 0.1}, "unknown length"),
        ("infinite", {"num_cycles": 1}, "unknown option of 'infinite' 'num_cycles'"),
        ("infinite", {"cooldown_steps": 5, "constant_ratio": 0.5, "cooldown_type": "exponential"},
         "cooldown_type"),
        ("sequential", {}, "needs a list"),
        ("sequential", {"schedules": []}, "must be a list of schedules"),
        ("sequential", {"schedules": PIECES, "warmup_steps": 3}, "warm-ups of their own"),
        ("sequential", {"schedules": ["linear"]}, "schedules.0: must be a mapping with 'type'"),
        ("sequential", {"schedules": [{"type": "liner"}]}, "schedules.0.type: .*'linear'"),
        ("sequential", {"schedules": [{"type": "linear", "len": 5}]}, "did you mean 'length'"),
        ("sequential", {"schedules": [{"type": "linear"}, {"type": "constant"}]}, "only the last"),
        ("sequential", {"schedules": [{"type": "linear", "length": 101}]}, "longer than"),
        ("sequential", {"schedules": [{"type": "linear", "length": -1}]}, "must be a count"),
        ("sequential", {"schedules": [{"type": "linear", "length": 0.5}], "total_steps": None},
         "a part needs to know how many steps"),
        ("sequential", {"schedules": PIECES}, "ends at 0 and this one starts there"),
        ("sequential", {"schedules": [{"type": "sequential"}]}, "holds no other"),
        ("sequential", {"schedules": [{"type": "linear", "kwargs": {"min_rato": 0}}]},
         "schedules.0: .*did you mean 'min_ratio'"),
    ],
)  # fmt: skip
def test_mistakes_are_named(kind, given, message):
    with pytest.raises(ConfigError, match=message):
        make_schedule(kind, **{"total_steps": 100, **given})


def test_every_mistake_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        make_schedule("cosine", total_steps=10, min_ratio=2, num_cycle=1)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("kind", "options", "length", "message"),
    [
        (
            "wsd",
            {"decay_steps": 5},
            100,
            "lr_scheduler_unit='tokens' counts tokens; give decay_tok",
        ),
        ("wsd", {"num_decay_steps": 5}, 100, "give num_decay_tokens"),
        ("cosine", {}, None, "how many tokens .* train_for in tokens"),
        ("inverse_sqrt", {}, None, "timescale"),
    ],
)
def test_mistakes_in_tokens(kind, options, length, message):
    with pytest.raises(ConfigError, match=message):
        ScheduleSpec(kind, length, 0, options, "tokens", 10).draw()


def test_the_length_of_a_warm_up():
    assert resolve_warmup_steps(5, 0.5, 100) == 5
    assert resolve_warmup_steps(0, 0.1, 105) == 10
    assert resolve_warmup_steps(0, 0.0, 100) == 0
    assert resolve_warmup_steps(0, 1.0, 100) == 100


@pytest.mark.parametrize(
    ("steps", "ratio", "total", "message"),
    [
        (-1, 0.0, 10, "warmup_steps must be a whole number and not negative, got -1"),
        (1.5, 0.0, 10, "whole number"),
        (0, 1.1, 10, r"warmup_ratio must lie in \[0, 1\], got 1.1"),
        (0, -0.1, 10, "warmup_ratio must lie"),
        (0, float("nan"), 10, "warmup_ratio must lie"),
        (11, 0.0, 10, "longer than the training of 10 steps"),
        (0, 0.1, None, "needs to know how many steps"),
    ],
)
def test_a_warm_up_that_cannot_be(steps, ratio, total, message):
    with pytest.raises(ConfigError, match=message):
        resolve_warmup_steps(steps, ratio, total)
