"""A scheduler's state that comes from another grouping of the parameters."""

import logging

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, StepLR

from headway.errors import ConfigError
from headway.optim.schedule_state import ScheduleState


def make(*rates, kind=LambdaLR):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    optimizer = torch.optim.SGD(groups)
    given = (lambda step: 0.5**step) if kind is LambdaLR else 1
    return optimizer, kind(optimizer, given)


def advance(optimizer, scheduler, num_steps):
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()


def load(saved, *rates, kind=LambdaLR):
    optimizer, scheduler = make(*rates, kind=kind)
    ScheduleState(scheduler).load_state_dict(saved)
    return optimizer, scheduler


def saved_after(num_steps, *rates, kind=LambdaLR):
    optimizer, scheduler = make(*rates, kind=kind)
    advance(optimizer, scheduler, num_steps)
    return ScheduleState(scheduler).state_dict()


def test_the_same_groups_take_the_state_as_it_is():
    optimizer, scheduler = load(saved_after(2, 0.4, 0.8), 1.0, 1.0)
    assert scheduler.base_lrs == [0.4, 0.8] and scheduler.get_last_lr() == [0.1, 0.2]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (3, 2)])
def test_one_rate_goes_to_every_group(before, after):
    optimizer, scheduler = load(saved_after(2, *[0.4] * before), *[1.0] * after)
    assert scheduler.last_epoch == 2 and scheduler.base_lrs == [0.4] * after
    advance(optimizer, scheduler, 1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05] * after


def test_a_state_of_partials_is_taken():
    # As other tools' functions with attributes are saved.
    saved = {**saved_after(1, 0.4, 0.4), "lr_lambdas": [{}, {}]}
    optimizer, scheduler = load(saved, 1.0)
    advance(optimizer, scheduler, 1)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_rates_of_their_own_come_from_the_groups(caplog):
    with caplog.at_level(logging.WARNING):
        optimizer, scheduler = load(saved_after(1, 0.4, 0.8), 0.2)
    assert scheduler.base_lrs == [0.2] and "2 param groups" in caplog.text
    advance(optimizer, scheduler, 1)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_schedule_with_more_state_is_not_guessed_at():
    with pytest.raises(ConfigError, match=r"2 param groups.*has 1"):
        load(saved_after(1, 0.4, 0.4, kind=StepLR), 1.0, kind=StepLR)
