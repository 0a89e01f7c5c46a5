import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway import ConfigError
from headway.optim.schedules import SCHEDULES, make_schedule


@given(
    kind=st.sampled_from(SCHEDULES),
    total=st.integers(1, 500),
    warmup=st.integers(0, 500),
    step=st.integers(0, 1000),
)
def test_factor_is_never_negative_never_above_one_and_moves_from_the_first_step(
    kind, total, warmup, step
):
    warmup = min(warmup, total)
    schedule = make_schedule(kind, total_steps=total, warmup_steps=warmup)
    assert 0 <= schedule(step) <= 1
    assert schedule(0) > 0
    if warmup:
        assert schedule(warmup - 1) == 1.0
        assert schedule(warmup) <= schedule(warmup - 1)


@given(kind=st.sampled_from(["linear", "cosine", "polynomial"]), total=st.integers(2, 300))
def test_decay_never_rises_and_stays_down_past_the_end(kind, total):
    schedule = make_schedule(kind, total_steps=total)
    values = [schedule(step) for step in range(total + 20)]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(values))
    assert values[total] == pytest.approx(0.0, abs=1e-12) == values[-1]


def test_closed_forms():
    assert make_schedule("linear", total_steps=100, warmup_steps=10)(55) == pytest.approx(0.5)
    cosine = make_schedule("cosine", total_steps=100)
    assert cosine(25) == pytest.approx((1 + math.cos(math.pi * 0.25)) / 2)
    assert make_schedule("polynomial", total_steps=10, power=2.0)(5) == pytest.approx(0.25)
    assert make_schedule("inverse_sqrt", total_steps=None, warmup_steps=4)(12) == pytest.approx(
        math.sqrt(4 / 12)
    )
    assert make_schedule("cosine", total_steps=10, min_ratio=0.1)(10) == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_same_curve_as_transformers_without_warmup(kind):
    from transformers import get_scheduler

    parameter = torch.nn.Parameter(torch.zeros(1))
    theirs = get_scheduler(
        kind, torch.optim.SGD([parameter], lr=1.0), num_warmup_steps=0, num_training_steps=50
    )
    ours = make_schedule(kind, total_steps=50)
    assert [ours(s) for s in range(50)] == pytest.approx(
        [theirs.lr_lambdas[0](s) for s in range(50)]
    )


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kind": "cosin", "total_steps": 5}, "did you mean 'cosine'"),
        ({"kind": "cosine", "total_steps": None}, "needs to know how many steps"),
        ({"kind": "linear", "total_steps": 5, "warmup_steps": 6}, "longer than the training"),
        ({"kind": "linear", "total_steps": 5, "warmup_steps": -1}, "must not be negative"),
        ({"kind": "cosine", "total_steps": 5, "min_ration": 0.1}, "did you mean 'min_ratio'"),
        ({"kind": "cosine", "total_steps": 5, "min_ratio": "low"}, "must be a number"),
        ({"kind": "constant", "total_steps": 5, "power": 1}, "takes no options"),
    ],
)
def test_mistakes_are_named(kwargs, message):
    kind = kwargs.pop("kind")
    with pytest.raises(ConfigError, match=message):
        make_schedule(kind, **kwargs)
