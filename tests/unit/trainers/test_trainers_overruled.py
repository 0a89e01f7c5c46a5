"""Settings that are configured and do not count: what is compared, and what is only state."""

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from headway.optim.in_force import InForce
from headway.trainers.overruled import find_overruled, is_told, join_overruled


def make(kind=torch.optim.AdamW, *, scheduler=None, **settings):
    parameters = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    groups = [{"params": [p], "group_name": name} for p, name in zip(parameters, "ab")]
    optimizer = kind(groups, **{"lr": 0.1, **settings})
    return optimizer, None if scheduler is None else scheduler(optimizer)


def step(optimizer, scheduler):
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(2, 2)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()


def found(before, after):
    told = find_overruled(InForce.read(*before), InForce.read(*after))
    return [(t.setting, t.groups, t.configured, t.in_force) for t in told]


def test_groups_that_changed_alike_share_an_entry():
    other = make(weight_decay=0.5, betas=(0.5, 0.9))
    other[0].param_groups[1]["eps"] = 1e-3
    other[0].param_groups[1]["fused"] = True
    fresh = make(weight_decay=0.1)
    assert found(fresh, other) == [
        ("betas", ["a", "b"], [0.9, 0.999], [0.5, 0.9]),
        ("weight_decay", ["a", "b"], 0.1, 0.5),
        ("eps", ["b"], 1e-8, 1e-3),
    ]
    _, decay, eps = find_overruled(InForce.read(*fresh), InForce.read(*other))
    assert "--set weight_decay=0.1`" in decay.advice, "for every group"
    assert "--set eps=1e-08 --param-group NUMBER`" in eps.advice


class Counting(torch.optim.SGD):
    """Keeps its progress in its groups, as optimizers without a schedule do."""

    def __init__(self, params, lr, momentum=0.5):
        super().__init__(params, lr, momentum)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["k"] += 1


@pytest.mark.parametrize(
    ("kind", "scheduler"),
    [
        (Counting, None),
        (torch.optim.AdamW, lambda o: StepLR(o, 1)),
        (torch.optim.AdamW, lambda o: OneCycleLR(o, 0.3, total_steps=9)),  # moves the betas too
    ],
)
def test_progress_is_no_setting(kind, scheduler):
    fresh, used = make(kind, scheduler=scheduler), make(kind, scheduler=scheduler)
    for _ in range(3):
        step(*used)
    assert found(fresh, used) == []


def test_numbers_of_a_scheduler_are_compared():
    fresh = make(scheduler=lambda o: StepLR(o, 5, gamma=0.5))
    used = make(scheduler=lambda o: StepLR(o, 5, gamma=0.1))
    assert found(fresh, used) == [("gamma", [], 0.5, 0.1)]
    [item] = find_overruled(InForce.read(*fresh), InForce.read(*used))
    assert "--component scheduler --set gamma=0.5" in item.advice
    assert is_told("lr_scheduler.init_args.gamma", [item])
    assert not is_told("lr_scheduler.init_args.step_size", [item])


def test_what_ranks_found_is_one_list():
    parts = [
        [
            vars(item)
            for item in find_overruled(
                InForce({name: {"lr": 0.1}}, {}), InForce({name: {"lr": 0.2}}, {})
            )
        ]
        for name in "aba"
    ]
    [item] = join_overruled(parts)
    assert item.groups == ["a", "b"] and "--scale lr=0.5" in item.advice


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("args.learning_rate", True),
        ("args.optim_args.adamw_lr", True),
        ("optimizer.init_args.lr", True),
        ("optimizer_groups.g.config.lr", True),
        ("optimizer_groups.other.config.lr", False),
        ("optimizer_groups.g.config.weight_decay", False),
        ("optimizer_groups.g.regex", False),
        ("args.weight_decay", False),
        ("args.max_steps", False),
    ],
)
def test_which_options_a_setting_stands_for(key, told):
    before, after = ({"g.no_decay (AdamW)": {"lr": rate}} for rate in (0.1, 0.2))
    assert is_told(key, find_overruled(InForce(before, {}), InForce(after, {}))) is told
