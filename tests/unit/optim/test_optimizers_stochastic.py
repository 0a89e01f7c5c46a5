"""AdamW in bfloat16 alone: rounding is unbiased, the same everywhere, and keeps small updates."""

import copy

import pytest
import torch
from torch import nn

from headway import ConfigError
from headway.optim import StochasticAdamW, round_stochastically


def test_rounding_takes_one_of_the_two_neighbours_and_is_right_on_average():
    torch.manual_seed(0)
    exact = torch.randn(500) * 10.0 ** torch.randint(-20, 20, (500,))
    num_draws = 4000
    rounded = round_stochastically(exact.repeat(num_draws, 1)).float()
    toward_zero = (exact.view(torch.int32) & -(1 << 16)).view(torch.float32)
    away = (toward_zero.view(torch.int32) + (1 << 16)).view(torch.float32)
    assert ((rounded == toward_zero) | (rounded == away)).all()
    ulp = (away - toward_zero).abs().double()
    error = (rounded.double().mean(0) - exact.double()) / ulp
    # The mean of a coin with p is off by no more than 0.5 / sqrt(n) in one standard deviation.
    limit = 0.5 / num_draws**0.5
    assert error.abs().max() < 5 * limit, "no value is biased"
    assert error.mean().abs() < 5 * limit / 500**0.5, "nor are all together"


def test_exact_and_special_values_stay():
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf])
    for _ in range(20):
        rounded = round_stochastically(values)
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(rounded.float(), values)
    nan = torch.full((1000,), -1, dtype=torch.int32).view(torch.float32)
    assert round_stochastically(nan).isnan().all(), "no carry runs through to the sign"


def settle(make, steps=400, size=512):
    """Weights that start at 1, with a minimum at 0.5, by steps below half a unit of bfloat16."""
    weight = nn.Parameter(torch.ones(size, dtype=torch.bfloat16))
    optimizer = make([weight])
    for _ in range(steps):
        (weight.float() - 0.5).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weight.detach().float(), optimizer


@pytest.mark.parametrize("moment_dtype", ["parameter", "float32"])
def test_updates_too_small_for_bfloat16_are_not_lost(moment_dtype):
    settings = {"lr": 1e-3, "weight_decay": 0.0}
    plain, _ = settle(lambda params: torch.optim.AdamW(params, **settings))
    assert (plain == 1).all(), "rounding to the nearest loses every one of them"
    exact = nn.Parameter(torch.ones(1))
    reference = torch.optim.AdamW([exact], **settings)
    for _ in range(400):
        exact.grad = 2 * (exact.detach() - 0.5)
        reference.step()
    kept, optimizer = settle(
        lambda params: StochasticAdamW(params, moment_dtype=moment_dtype, **settings)
    )
    assert kept.mean().item() == pytest.approx(exact.item(), abs=0.01)
    assert (kept - exact.item()).abs().max() < 0.15, "each weight has other bits in every step"
    state = next(iter(optimizer.state.values()))
    assert state["exp_avg"].dtype == (
        torch.bfloat16 if moment_dtype == "parameter" else torch.float32
    )


def test_a_slow_second_moment_in_bfloat16_grows_as_it_should():
    weight = nn.Parameter(torch.zeros(2048, dtype=torch.bfloat16))
    optimizer = StochasticAdamW([weight], lr=0.0, betas=(0.9, 0.999))
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    found = optimizer.state[weight]["exp_avg_sq"].float().mean().item()
    assert found == pytest.approx(1 - 0.999**1000, rel=0.02)


def test_float32_weights_are_updated_as_by_torch():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8))
    twin = nn.Parameter(weight.detach().clone())
    settings = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}
    first, second = StochasticAdamW([weight], **settings), torch.optim.AdamW([twin], **settings)
    for _ in range(20):
        weight.grad = torch.randn(8, 8)
        twin.grad = weight.grad.clone()
        first.step()
        second.step()
    torch.testing.assert_close(weight, twin, rtol=1e-5, atol=1e-7)


def groups(model, order=1):
    pairs = list(model.named_parameters())[::order]
    return [{"params": [p for _, p in pairs], "param_names": [name for name, _ in pairs]}]


def test_rounding_is_that_of_the_seed_the_step_and_the_name_alone():
    torch.manual_seed(0)
    model = nn.Linear(16, 16).to(torch.bfloat16)
    twin, other = copy.deepcopy(model), copy.deepcopy(model)
    optimizers = [
        StochasticAdamW(groups(model), lr=1e-3),
        StochasticAdamW(groups(twin, order=-1), lr=1e-3),
        StochasticAdamW(groups(other), lr=1e-3, seed=1),
    ]
    for step in range(5):
        x = torch.randn(4, 16, dtype=torch.bfloat16)
        for number, (net, optimizer) in enumerate(zip((model, twin, other), optimizers)):
            net(x).square().mean().backward()
            torch.manual_seed(100 * step + number)
            before = torch.get_rng_state()
            optimizer.step()
            assert torch.equal(before, torch.get_rng_state()), "torch's generator is not used"
            optimizer.zero_grad()
    assert torch.equal(model.weight, twin.weight) and torch.equal(model.bias, twin.bias)
    assert not torch.equal(model.weight, other.weight)
    model.weight.grad = torch.zeros_like(model.weight)
    first = optimizers[0].state[model.weight]["exp_avg"].clone()
    optimizers[0].step()
    assert not torch.equal(first, optimizers[0].state[model.weight]["exp_avg"])


def test_bad_settings_are_refused_together():
    with pytest.raises(ConfigError) as raised:
        StochasticAdamW([nn.Parameter(torch.ones(2))], lr=-1.0, betas=(0.9, 1.0), eps=-1.0)
    assert len(raised.value.problems) == 3
