"""The kernel of AdamW in bfloat16 alone in Triton's interpreter, against the plain form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kernels_on_cpu import open_kernels
from torch import Tensor

from headway.optim import StochasticAdamW, stochastic_step
from headway.optim.stochastic_adamw import _update_plainly

open_kernels(stochastic_step)

SETTINGS: dict[str, Any] = {
    "seed": 3_000_000_000,
    "step": 3,
    "lr": 1e-2,
    "betas": (0.9, 0.98),
    "eps": 1e-8,
    "weight_decay": 0.1,
}
# Around the size of a block, and several in one tensor.
SHAPES = [(1,), (7, 3), (1024,), (1025,), (3, 3000), (0,)]
HALF, WIDE = torch.bfloat16, torch.float32


def make(
    shape: tuple[int, ...], moments: torch.dtype = HALF, grads: torch.dtype = HALF, seed: int = 0
) -> list[Tensor]:
    """Weight, gradient and moments as in the middle of a run."""
    generator = torch.Generator().manual_seed(seed)
    weight, grad, mean, square = torch.randn(4, *shape, generator=generator)
    return [weight.to(HALF), grad.to(grads), (mean * 0.1).to(moments), square.square().to(moments)]


def neighbours(exact: Tensor) -> tuple[Tensor, Tensor]:
    """The two values of bfloat16 around each of float32, towards 0 and away from it."""
    toward = (exact.view(torch.int32) & -(1 << 16)).view(WIDE)
    return toward, (toward.view(torch.int32) + (1 << 16)).view(WIDE)


def exact_update(tensors: list[Tensor], **settings: Any) -> list[Tensor]:
    """Weight and moments in float32: where nothing is rounded, the plain form is exact."""
    weight, grad, mean, square = (t.float().clone() for t in tensors)
    _update_plainly(weight, grad, mean, square, **settings)
    return [weight, mean, square]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("grads", [HALF, WIDE])
def test_its_update_is_that_of_the_plain_form_rounded_to_a_neighbour(
    shape: tuple[int, ...], grads: torch.dtype
) -> None:
    tensors = make(shape, grads=grads)
    wanted = exact_update(tensors, **SETTINGS)
    weight, grad, mean, square = tensors
    stochastic_step.update_(weight, grad, mean, square, **SETTINGS)
    for found, exact in zip((weight, mean, square), wanted):
        toward, away = neighbours(exact)
        # What is next to a value of bfloat16 may be on its other side by the last bit of float32.
        slack = 1e-5 * exact.abs()
        assert ((found.float() - toward).abs() <= (away - toward).abs() + slack).all()
        assert ((found.float() - exact).abs() <= (away - toward).abs() + slack).all()


@pytest.mark.parametrize("grads", [HALF, WIDE])
def test_moments_in_float32_are_not_rounded(grads: torch.dtype) -> None:
    tensors = make((1500,), WIDE, grads)
    wanted = exact_update(tensors, **SETTINGS)
    stochastic_step.update_(*tensors, **SETTINGS)
    for found, exact in zip(tensors[2:], wanted[1:]):
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-8)


def test_rounding_is_right_on_average_and_each_value_has_bits_of_its_own() -> None:
    size, draws = 3000, 60
    ups = torch.zeros(3, draws, size, dtype=torch.float64)
    tensors = make((size,))
    exact = exact_update(tensors, **SETTINGS)
    pairs = [neighbours(values) for values in exact]
    for number in range(draws):
        copies = [t.clone() for t in tensors]
        stochastic_step.update_(*copies, **{**SETTINGS, "seed": number * 70_000_001})
        for index, found in enumerate((copies[0], copies[2], copies[3])):
            ups[index, number] = (found.float() == pairs[index][1]).double()
    shares = torch.stack(
        [
            ((values - toward) / (away - toward)).double()
            for values, (toward, away) in zip(exact, pairs)
        ]
    )
    for index, name in enumerate(("weight", "mean", "square")):
        error = ups[index] - shares[index]
        assert error.mean().abs() < 5 * 0.5 / math.sqrt(size * draws), f"{name} is not biased"
        # The coins of one value in all steps, and of all values in one step.
        assert error.mean(0).abs().max() < 5 * 0.5 / math.sqrt(draws), name
        assert error.mean(1).abs().max() < 5 * 0.5 / math.sqrt(size), name
    errors = (ups - shares[:, None]).flatten(1)
    between = torch.corrcoef(errors).fill_diagonal_(0).abs().max()
    assert between < 5 / math.sqrt(size * draws), "weight and moments have other bits"
    neighbouring = torch.corrcoef(torch.stack([errors[0, :-1], errors[0, 1:]]))[0, 1].abs()
    assert neighbouring < 5 / math.sqrt(size * draws), "so have weights side by side"


def test_the_same_seed_rounds_alike() -> None:
    tensors = make((2000,))
    first, again, other = ([t.clone() for t in tensors] for _ in range(3))
    stochastic_step.update_(*first, **SETTINGS)
    stochastic_step.update_(*again, **SETTINGS)
    stochastic_step.update_(*other, **{**SETTINGS, "seed": 0})
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])


def test_what_is_not_finite_stays_so() -> None:
    weight, grad, mean, square = make((4,), grads=WIDE)
    grad.view(torch.int32)[0] = 0x7FFFFFFF  # what a GPU makes where there is no number
    grad[1], grad[2] = math.inf, -math.inf
    stochastic_step.update_(weight, grad, mean, square, **SETTINGS)
    assert mean[0].isnan() and weight[0].isnan() and square[0].isnan()
    assert mean[1] == math.inf and mean[2] == -math.inf and square[1] == math.inf
    assert all(t[3].isfinite() for t in (weight, mean, square))


def test_an_optimizer_trains_with_it_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates far below a unit of bfloat16, which only rounding by chance keeps."""
    ends = []
    for by_kernel in (False, True):
        monkeypatch.setattr(stochastic_step, "fits", lambda *tensors, take=by_kernel: take)
        weight = torch.nn.Parameter(torch.ones(2048, dtype=HALF))
        optimizer = StochasticAdamW([weight], lr=1e-3, weight_decay=0.0)
        for _ in range(100):
            (weight.float() - 0.5).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weight.detach().float().mean().item())
    assert ends[0] == pytest.approx(0.9, abs=0.003), "100 steps of 1e-3"
    assert ends[1] == pytest.approx(ends[0], abs=0.003)


def test_a_graph_that_holds_the_weights_finds_them_changed() -> None:
    weight = torch.nn.Parameter(torch.randn(5).to(HALF))
    loss = weight.square().sum()
    _, *others = make((5,))
    with torch.no_grad():
        stochastic_step.update_(weight, *others, **SETTINGS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_it_is_for_bfloat16_that_lies_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stochastic_step, "triton_works", lambda: True)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    fitting = make((4, 6))
    assert stochastic_step.fits(*fitting)
    assert stochastic_step.fits(*make((4, 6), WIDE, WIDE))
    for index in range(4):
        for spoilt in (fitting[index].t().contiguous().t(), fitting[index][:2]):
            assert not stochastic_step.fits(*fitting[:index], spoilt, *fitting[index + 1 :])
    for index in (0, 1):
        spoilt = fitting[index].double()
        assert not stochastic_step.fits(*fitting[:index], spoilt, *fitting[index + 1 :])
    monkeypatch.setattr(stochastic_step, "triton_works", lambda: False)
    assert not stochastic_step.fits(*fitting)
