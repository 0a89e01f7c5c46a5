"""The same curves as those of torch and transformers, where they offer them.

Theirs divide the step by the warm-up, so that the first update has rate 0; ours have s + 1 there.
With that the warm-up is equal too, and after it all are equal step by step.
"""

import pytest
import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from headway.config.rules_values import REFUSED_SCHEDULES
from headway.optim.schedules import SCHEDULES, make_schedule

RATE = 0.5


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)


def theirs_of(kind, total, warmup, options):
    made = get_scheduler(
        kind,
        optimizer(),
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs=options,
    )
    return made.lr_lambdas[0]


CURVES = [
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.25}),
    ("cosine_with_restarts", {"num_cycles": 4}),
    ("polynomial", {"lr_end": 0.05, "power": 2.0}),
    ("polynomial", {"lr_end": 1e-7}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 7}),
    ("cosine_with_min_lr", {"min_lr": 0.1}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.3, "num_cycles": 0.5}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_lr": 0.1, "warmup_lr_rate": 0.25}),
    ("warmup_stable_decay", {"num_decay_steps": 16, "min_lr_ratio": 0.1}),
    ("warmup_stable_decay", {"num_decay_steps": 16, "decay_type": "linear"}),
    ("warmup_stable_decay", {"num_decay_steps": 16, "decay_type": "1-sqrt", "min_lr_ratio": 0.2}),
    ("warmup_stable_decay", {"num_decay_steps": 8, "num_stable_steps": 24, "num_cycles": 0.5}),
    *(
        ("warmup_stable_decay", {"num_decay_steps": 16, "warmup_type": kind, "min_lr_ratio": 0.1})
        for kind in ("linear", "cosine", "1-sqrt")
    ),
]


@pytest.mark.filterwarnings("ignore:Both num_training_steps")
@pytest.mark.parametrize("warmup", [0, 1, 8])
@pytest.mark.parametrize(("kind", "options"), CURVES, ids=[f"{k}-{'-'.join(o)}" for k, o in CURVES])
def test_the_curves_of_transformers(kind, options, warmup):
    total = 72
    theirs = theirs_of(kind, total, warmup, options)
    ours = make_schedule(kind, total_steps=total, warmup_steps=warmup, base_lr=RATE, **options)
    if kind != "constant":  # theirs leaves the warm-up out
        # This one starts above 0 in theirs, so that nothing is shifted.
        shift = 0 if kind == "cosine_warmup_with_min_lr" else 1
        climb = [float(theirs(step)) for step in range(shift, warmup + shift)]
        if shift and warmup:
            climb[-1] = 1.0  # what comes after their warm-up is of the decay
        assert [ours(step) for step in range(warmup)] == pytest.approx(climb)
    # Their restart of a cycle is lost now and then to rounding; 72 and 4 cycles divide exactly.
    # Past the last update this one of theirs climbs again, which ours does not.
    rest = range(warmup, total + (kind != "cosine_warmup_with_min_lr"))
    assert [ours(step) for step in rest] == pytest.approx(
        [float(theirs(step)) for step in rest], abs=1e-12
    )


def test_every_schedule_of_transformers_is_taken_or_refused_with_a_reason():
    names = {kind.value for kind in SchedulerType}
    assert names - set(SCHEDULES) == set(REFUSED_SCHEDULES) & names


def rates_of(scheduler, num_steps):
    rates = []
    for _ in range(num_steps):
        rates.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("make", "kind", "options"),
    [
        (
            lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40, eta_min=0.1),
            "cosine",
            {"min_lr": 0.1},
        ),
        (
            lambda opt: torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.25, 40),
            "linear",
            {"min_ratio": 0.25},
        ),
        (
            lambda opt: torch.optim.lr_scheduler.PolynomialLR(opt, 40, power=2.0),
            "polynomial",
            {"power": 2.0},
        ),
        (
            lambda opt: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 10, eta_min=0.1),
            "cosine_with_restarts",
            {"num_cycles": 4, "min_lr": 0.1},
        ),
        (
            lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.01 ** (1 / 40)),
            "wsd",
            {"decay_steps": 40, "decay_type": "exponential", "min_ratio": 0.01},
        ),
        (lambda opt: torch.optim.lr_scheduler.ConstantLR(opt, 1.0), "constant", {}),
    ],
    ids=["cosine", "linear", "polynomial", "restarts", "exponential", "constant"],
)
def test_the_curves_of_torch(make, kind, options):
    ours = make_schedule(kind, total_steps=40, base_lr=RATE, **options)
    assert [RATE * ours(step) for step in range(40)] == pytest.approx(
        rates_of(make(optimizer()), 40), abs=1e-9
    )


def test_a_sequence_is_torch_s_sequence_where_its_pieces_meet():
    opt = optimizer()
    parts = [
        torch.optim.lr_scheduler.LinearLR(opt, 0.25, 1.0, 3),
        torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20, eta_min=0.1),
    ]
    theirs = torch.optim.lr_scheduler.SequentialLR(opt, parts, milestones=[3])
    ours = make_schedule(
        "sequential",
        total_steps=23,
        base_lr=RATE,
        schedules=[
            {"type": "constant", "length": 3, "warmup_steps": 3, "kwargs": {"warmup_start": 0.0}},
            {"type": "cosine", "kwargs": {"min_lr": 0.1}},
        ],
    )
    wanted = rates_of(theirs, 23)
    # Theirs climbs by 0.25 a step from 0.25; ours ends its climb one step before.
    assert [RATE * ours(step) for step in range(3, 23)] == pytest.approx(wanted[3:])
