"""A step of AdamW in one pass: the updates of torch's own, with clipping and without."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from headway.optim.adamw_step import KernelStep
from headway.testing import count_host_syncs

pytestmark = pytest.mark.gpu
SIZES = [(1,), (7, 3), (4096,), (4097,), (300, 1000), (64, 64)]
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}


def make(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[list[nn.Parameter], AdamW]:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(size, device="cuda", dtype=dtype)) for size in SIZES]
    groups = [{"params": weights[:2], "weight_decay": 0.0}, {"params": weights[2:]}]
    return weights, AdamW(groups, **{**SETTINGS, "fused": True, **settings})


def give_grads(weights: Sequence[nn.Parameter], seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    for weight in weights:
        shape, dtype = weight.shape, weight.dtype
        weight.grad = torch.randn(shape, device="cuda", generator=generator).to(dtype)


def step_of(optimizer: AdamW) -> KernelStep:
    step = KernelStep.of(optimizer)
    assert step is not None
    return step


def test_its_updates_are_those_of_torch() -> None:
    weights, optimizer = make()
    others, reference = make()
    for number in range(30):
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] = 1e-2 / (1 + number)
        give_grads(weights, number)
        give_grads(others, number)
        if number % 3 == 1:  # a parameter that had no part in this step
            weights[3].grad = others[3].grad = None
        step_of(optimizer).take()
        reference.step()
    for one, other in zip(weights, others):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            ours, theirs = optimizer.state[one][key], reference.state[other][key]
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_clipping_in_the_step_is_clipping_before_it_to_the_bit() -> None:
    weights, optimizer = make()
    others, before = make()
    for number in range(5):
        give_grads(weights, number)
        give_grads(others, number)
        norm = nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
        step = step_of(optimizer)
        step.grad_factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        step.take()
        nn.utils.clip_grads_with_norm_(others, 1.0, norm)
        step_of(before).take()
    assert all(torch.equal(one, other) for one, other in zip(weights, others))


def test_a_step_is_withheld_by_the_flag_alone() -> None:
    weights, optimizer = make()
    give_grads(weights, 0)
    step_of(optimizer).take()
    held = copy.deepcopy([weights, optimizer.state_dict()["state"]])
    give_grads(weights, 1)
    assert weights[3].grad is not None
    weights[3].grad[5] = float("nan")
    flag = torch.ones((), device="cuda")
    with count_host_syncs() as syncs:
        step_of(optimizer).take(flag)
    assert syncs.count == 0, syncs.report()
    for one, other in zip(weights, held[0]):
        assert torch.equal(one, other)
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, held[1][number][key]) for key, value in state.items())
    give_grads(weights, 2)
    step_of(optimizer).take(torch.zeros((), device="cuda"))
    assert not torch.equal(weights[3], held[0][3])


def test_torch_can_go_on_where_it_left_off() -> None:
    weights, optimizer = make()
    others, reference = make()
    for number in range(4):
        give_grads(weights, number)
        give_grads(others, number)
        if number % 2:
            optimizer.step()
        else:
            step_of(optimizer).take()
        reference.step()
    for one, other in zip(weights, others):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_left_to_torch() -> None:
    for settings in ({"amsgrad": True}, {"maximize": True}, {"fused": False}):
        weights, optimizer = make(**settings)
        give_grads(weights, 0)
        assert KernelStep.of(optimizer) is None, settings
    weights, optimizer = make(torch.bfloat16)
    give_grads(weights, 0)
    assert KernelStep.of(optimizer) is None
    weights, optimizer = make()
    give_grads(weights, 0)
    optimizer.step()
    assert KernelStep.of(optimizer) is not None
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert KernelStep.of(optimizer) is None
    handle.remove()
    # As a run that was continued with other weights than it was saved with.
    state = optimizer.state[weights[4]]
    state["exp_avg"] = state["exp_avg"].bfloat16()
    assert KernelStep.of(optimizer) is None


def test_a_scheduler_does_not_miss_the_step(recwarn: pytest.WarningsRecorder) -> None:
    weights, optimizer = make()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    give_grads(weights, 0)
    step_of(optimizer).take()
    scheduler.step()
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]
