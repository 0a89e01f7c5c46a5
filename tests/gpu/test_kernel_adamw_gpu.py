"""AdamW in one pass: the updates of torch's own, with clipping and without."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from headway.optim.kernel_adamw import KernelAdamW
from headway.testing import count_host_syncs

pytestmark = pytest.mark.gpu
SIZES = [(1,), (7, 3), (4096,), (4097,), (300, 1000), (64, 64)]
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


def make(cls: type[torch.optim.Optimizer], dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(size, device="cuda", dtype=dtype)) for size in SIZES]
    groups = [{"params": weights[:2], "weight_decay": 0.0}, {"params": weights[2:]}]
    return weights, cls(groups, **SETTINGS)


def give_grads(weights, seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    for weight in weights:
        shape, dtype = weight.shape, weight.dtype
        weight.grad = torch.randn(shape, device="cuda", generator=generator).to(dtype)


def test_its_updates_are_those_of_torch() -> None:
    weights, optimizer = make(KernelAdamW)
    others, reference = make(torch.optim.AdamW)
    for step in range(30):
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] = 1e-2 / (1 + step)
        give_grads(weights, step)
        give_grads(others, step)
        optimizer.step()
        reference.step()
    for one, other in zip(weights, others):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            ours, theirs = optimizer.state[one][key], reference.state[other][key]
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_clipping_in_the_step_is_clipping_before_it_to_the_bit() -> None:
    weights, optimizer = make(KernelAdamW)
    others, before = make(KernelAdamW)
    for step in range(5):
        give_grads(weights, step)
        give_grads(others, step)
        norm = nn.utils.get_total_norm([w.grad for w in weights])
        optimizer.grad_factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        optimizer.step()
        assert optimizer.grad_factor is None
        nn.utils.clip_grads_with_norm_(others, 1.0, norm)
        before.step()
    assert all(torch.equal(one, other) for one, other in zip(weights, others))


def test_a_step_is_withheld_by_the_flag_alone() -> None:
    weights, optimizer = make(KernelAdamW)
    give_grads(weights, 0)
    optimizer.step()
    held = copy.deepcopy([weights, optimizer.state_dict()["state"]])
    give_grads(weights, 1)
    weights[3].grad[5] = float("nan")
    optimizer.found_inf = torch.ones((), device="cuda")
    with count_host_syncs() as syncs:
        optimizer.step()
    assert syncs.count == 0, syncs.report()
    for one, other in zip(weights, held[0]):
        assert torch.equal(one, other)
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, held[1][number][key]) for key, value in state.items())
    optimizer.found_inf = torch.zeros((), device="cuda")
    give_grads(weights, 2)
    optimizer.step()
    assert not torch.equal(weights[3], held[0][3])


def test_states_move_between_it_and_torchs_own() -> None:
    weights, optimizer = make(KernelAdamW)
    others, reference = make(torch.optim.AdamW)
    give_grads(weights, 0)
    optimizer.step()
    with torch.no_grad():
        for one, other in zip(weights, others):
            other.copy_(one)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in (1, 2):
        give_grads(weights, step)
        give_grads(others, step)
        optimizer.step()
        reference.step()
    for one, other in zip(weights, others):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_left_to_torch() -> None:
    weights, optimizer = make(KernelAdamW, torch.bfloat16)
    others, reference = make(torch.optim.AdamW, torch.bfloat16)
    for step in range(3):
        give_grads(weights, step)
        give_grads(others, step)
        optimizer.grad_factor = torch.tensor(0.5, device="cuda")
        optimizer.step()
        torch._foreach_mul_([w.grad for w in others], 0.5)
        reference.step()
    assert all(torch.equal(one, other) for one, other in zip(weights, others))
