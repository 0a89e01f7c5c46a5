"""A factor for all learning rates reaches every number that they come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from headway.optim.build import follow_scheduler
from headway.optim.rate_scaling import scale_rates
from headway.optim.scheduler import create_scheduler


def optimizer(lr: Any = 0.4) -> SGD:
    other = torch.tensor(0.2) if isinstance(lr, torch.Tensor) else 0.2
    return SGD(
        [
            {"params": [torch.nn.Parameter(torch.ones(1))]},
            {"params": [torch.nn.Parameter(torch.ones(1))], "lr": other},
        ],
        lr=lr,
    )


SCHEDULERS = {
    "none": lambda o: None,
    "ours": lambda o: create_scheduler(o, "cosine", 20, 4),
    "steps": lambda o: StepLR(o, 3, 0.5),
    "exponential": lambda o: ExponentialLR(o, 0.9),
    "cosine": lambda o: CosineAnnealingLR(o, 20),
    "cycle": lambda o: OneCycleLR(o, [0.4, 0.2], total_steps=20),
    "sequence": lambda o: SequentialLR(
        o, [LinearLR(o, 0.1, total_iters=4), ExponentialLR(o, 0.9)], [4]
    ),
}


def curve(kind: str, factor_at: int | None, lr: Any = 0.4) -> list[list[float]]:
    optim = optimizer(lr)
    scheduler = SCHEDULERS[kind](optim)
    rates = []
    for step in range(15):
        if step == factor_at:
            scale_rates(optim, scheduler, 0.5)
        rates.append([float(group["lr"]) for group in optim.param_groups])
        optim.step()
        if scheduler is not None:
            scheduler.step()
    return rates


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_all_later_rates_are_scaled(kind: str) -> None:
    plain, scaled = curve(kind, None), curve(kind, 6)
    assert scaled[:6] == plain[:6]
    for ours, theirs in zip(scaled[6:], plain[6:], strict=True):
        assert ours == pytest.approx([rate / 2 for rate in theirs], rel=1e-6)


def test_rates_in_tensors_stay_in_their_tensors() -> None:
    assert curve("ours", 6, torch.tensor(0.4))[6:] == [
        pytest.approx(rates, rel=1e-6) for rates in curve("ours", 6)[6:]
    ]
    optim = optimizer(torch.tensor(0.4))
    held = [group["lr"] for group in optim.param_groups]
    scale_rates(optim, None, 0.5)
    assert all(group["lr"] is one for group, one in zip(optim.param_groups, held, strict=True))


def test_a_tensor_at_several_places_is_scaled_once() -> None:
    optim = optimizer(torch.tensor(0.4))
    scheduler = create_scheduler(optim, "constant", 20, 0)
    optim.step()
    scheduler.step()
    follow_scheduler(optim, scheduler)
    scale_rates(optim, scheduler, 0.5)
    assert [float(group["lr"]) for group in optim.param_groups] == pytest.approx([0.2, 0.1])
    assert [float(base) for base in scheduler.base_lrs] == pytest.approx([0.2, 0.1])
