"""The outer step: exact where that is claimed, and equal to what is computed by hand elsewhere."""

from __future__ import annotations

import itertools

import pytest
import torch

from headway.diloco.compression import decode, encode
from headway.diloco.outer import Mean, OuterOptimizer, Share
from headway.diloco.server_options import ServerOptions
from headway.errors import ConfigError
from headway.testing import assert_no_import


def random_floats(num: int, seed: int) -> torch.Tensor:
    """Finite floats of every size, with both zeros and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31 - 1, (num,), generator=generator, dtype=torch.int64)
    values = bits.to(torch.int32).view(torch.float32)
    values = torch.where(values.isfinite(), values, 0.0)
    values[:4] = torch.tensor([0.0, -0.0, 1e-45, -1e-45])
    return values[torch.randperm(num, generator=generator)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_one_worker_with_lr_1_gets_its_own_parameters_back_bit_for_bit(
    accumulate: str, nesterov: bool
) -> None:
    optimizer = OuterOptimizer(1.0, 0.0, nesterov, accumulate)
    parameter, local = random_floats(200_000, 1), random_floats(200_000, 2)
    local[::7] = -0.0
    mean = optimizer.mean(parameter, [Share(local, 1.0, True)])
    moved, velocity = optimizer.step(parameter, torch.zeros(200_000), mean)
    assert moved.dtype == torch.float32 and same_bits(moved, local)
    assert not velocity.any()


def test_a_pseudo_gradient_in_float32_cannot_do_that() -> None:
    # Why workers send their own parameters where bits count.
    parameter, local = torch.randn(10_000), 1e-3 * torch.randn(10_000)
    optimizer = OuterOptimizer(1.0, 0.0, accumulate="float64")
    mean = optimizer.mean(parameter, [Share(parameter - local, 1.0)])
    moved, _ = optimizer.step(parameter, torch.zeros(10_000).double(), mean)
    assert not same_bits(moved, local) and torch.allclose(moved, local, atol=1e-6)


def test_a_pseudo_gradient_of_nearby_values_is_exact_too() -> None:
    # Within a factor of two the difference of two floats is one (Sterbenz).
    parameter = 1 + torch.rand(10_000)
    local = parameter * (0.75 + 0.5 * torch.rand(10_000))
    optimizer = OuterOptimizer(1.0, 0.0, accumulate="float64")
    mean = optimizer.mean(parameter, [Share(parameter - local, 1.0)])
    assert same_bits(optimizer.step(parameter, torch.zeros(1).double(), mean)[0], local)


def test_two_workers_are_averaged_as_by_hand() -> None:
    parameter = torch.tensor([1.0, 2.0, -4.0])
    one, two = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([0.25, 3.0, -1.0])
    optimizer = OuterOptimizer(1.0, 0.0)
    mean = optimizer.mean(parameter, [Share(one, 1.0), Share(two, 1.0)])
    assert mean.gradient.tolist() == [0.375, 1.0, 0.5] and mean.local is None
    assert optimizer.step(parameter, torch.zeros(3), mean)[0].tolist() == [0.625, 1.0, -4.5]
    weighted = optimizer.mean(parameter, [Share(one, 3.0), Share(two, 1.0)])
    assert weighted.gradient.tolist() == [0.4375, 0.0, 1.25]


def test_local_parameters_and_pseudo_gradients_mix() -> None:
    parameter = torch.tensor([1.0, 2.0])
    optimizer = OuterOptimizer(0.5, 0.0, accumulate="float64")
    shares = [Share(torch.tensor([0.5, 4.0]), 1.0, True), Share(torch.tensor([1.0, 1.0]), 3.0)]
    mean = optimizer.mean(parameter, shares)
    assert mean.gradient.tolist() == [(0.5 + 3) / 4, (-2.0 + 3) / 4] and mean.local is None
    both = optimizer.mean(parameter, [s._replace(is_local=True) for s in shares])
    assert both.local is not None and both.local.tolist() == [(0.5 + 3) / 4, (4.0 + 3) / 4]
    moved, _ = optimizer.step(parameter, torch.zeros(2).double(), both)
    assert moved.tolist() == [0.5 + 0.4375, 1 + 0.875]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("local", [True, False])
def test_the_step_is_that_of_torch(nesterov: bool, local: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(50, generator=generator)
    other = torch.nn.Parameter(start.double())
    reference = torch.optim.SGD([other], lr=0.7, momentum=0.9, nesterov=nesterov)
    optimizer = OuterOptimizer(0.7, 0.9, nesterov, "float64")
    parameter, velocity = start, torch.zeros(50).double()
    for _ in range(6):
        gradient = torch.randn(50, generator=generator)
        other.grad = gradient.double()
        reference.step()
        share = Share(parameter - gradient, 1.0, True) if local else Share(gradient, 1.0)
        mean = optimizer.mean(parameter, [share])
        parameter, velocity = optimizer.step(parameter, velocity, mean)
    assert torch.allclose(parameter.double(), other, atol=1e-5)


def test_the_exact_rule_is_that_of_the_documentation() -> None:
    # Operation by operation in double precision, rounded to float32 once.
    optimizer = OuterOptimizer(0.7, 0.9, True, "float64")
    p, v, g1, g2 = 0.3, 0.11, 0.0625, 0.7
    as32 = torch.tensor([p, g1, g2]).tolist()
    parameter = torch.tensor([p])
    mean = optimizer.mean(parameter, [Share(torch.tensor([g]), 1.0) for g in (g1, g2)])
    moved, velocity = optimizer.step(parameter, torch.tensor([v]).double(), mean)
    g = (as32[1] + as32[2]) / 2
    wanted_v = torch.tensor([v]).double().item() * 0.9 + g
    assert velocity.item() == wanted_v
    wanted = (as32[0] - g * 0.7) - (wanted_v * 0.9) * 0.7
    assert moved.item() == torch.tensor(wanted, dtype=torch.float64).float().item()


@pytest.mark.parametrize("comm", ["bf16", "int8", "float32"])
def test_means_of_what_travelled_are_exact_in_float64(comm: str) -> None:
    gradients = [torch.randn(300, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    sent = [decode(encode({"w": g}, comm).payloads["w"]) for g in gradients]
    optimizer = OuterOptimizer(1.0, 0.0, accumulate="float64")
    found = optimizer.mean(torch.zeros(300), [Share(s, 1.0) for s in sent]).gradient
    wanted = torch.tensor([sum(column) / 4 for column in zip(*(s.tolist() for s in sent))])
    exact = torch.tensor(
        [sum(column) / 4 for column in zip(*(s.tolist() for s in sent))], dtype=torch.float64
    )
    assert torch.equal(found, exact) and torch.equal(found.float(), wanted)
    if comm == "bf16":
        # Eight bits each: their sum fits into a double whole, so that no order matters.
        for order in itertools.permutations(sent):
            again = optimizer.mean(torch.zeros(300), [Share(s, 1.0) for s in order]).gradient
            assert torch.equal(again, found)


def run_delayed(optimizer: OuterOptimizer, gradients: list[float]) -> list[float]:
    parameter = torch.zeros(1)
    velocity, buffer = torch.zeros(1).double(), torch.zeros(1).double()
    history = []
    for number, gradient in enumerate(gradients, 1):
        mean = Mean(torch.tensor([gradient]).double(), None)
        parameter, velocity, buffer = optimizer.step_delayed(
            parameter, velocity, buffer, mean, number
        )
        history.append(parameter.item())
    return history


def test_delayed_nesterov_as_by_hand() -> None:
    # lr 1, momentum 1/2, two updates to a turn: v' = v/2 + (g1 + g2)/2.
    optimizer = OuterOptimizer(1.0, 0.5, True, "float64", delay=2)
    # 1: -(1/2). 2: v = (1+3)/2 = 2; -(3/2 + 2/2) = -3. 3: -(2/2) = -4.
    # 4: v = 2/2 + (2+4)/2 = 4; -(4/2 + 4/2) = -8.
    assert run_delayed(optimizer, [1.0, 3.0, 2.0, 4.0]) == [-0.5, -3.0, -4.0, -8.0]
    spread = OuterOptimizer(1.0, 0.5, True, "float64", delay=2, spread=0.25)
    # 2: factor 1 - 1/2 + 1/4 = 3/4: -0.5 - (1.5 + 0.75*0.5*2) = -2.75.
    # 3: -(1 + 0.25*0.5*2) = -4. 4: v = 4: -(2 + 0.75*0.5*4) = -7.5.
    assert run_delayed(spread, [1.0, 3.0, 2.0, 4.0]) == [-0.5, -2.75, -4.0, -7.5]


def test_delay_1_is_plain_nesterov_and_without_momentum_plain_sgd() -> None:
    gradients = [1.0, -0.5, 0.25, 2.0]
    optimizer = OuterOptimizer(0.5, 0.5, True, "float64", delay=1)
    parameter, velocity = torch.zeros(1), torch.zeros(1).double()
    history = []
    for gradient in gradients:
        mean = Mean(torch.tensor([gradient]).double(), None)
        parameter, velocity = optimizer.step(parameter, velocity, mean)
        history.append(parameter.item())
    assert run_delayed(optimizer, gradients) == history
    plain = OuterOptimizer(0.5, 0.0, True, "float64", delay=2)
    assert run_delayed(plain, gradients) == [-0.25, -0.125, -0.1875, -0.6875]


def test_nothing_that_is_given_is_changed() -> None:
    optimizer = OuterOptimizer(0.7, 0.9, delay=2)
    given = [torch.randn(5) for _ in range(4)]
    before = [tensor.clone() for tensor in given]
    mean = optimizer.mean(given[0], [Share(given[1], 1.0), Share(given[2], 1.0)])
    optimizer.step(given[0], given[3], mean)
    optimizer.step_delayed(given[0], given[3], given[2], mean, 2)
    assert all(torch.equal(a, b) for a, b in zip(given, before))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_workers": 0}, "num_workers=0: allowed is a whole number of 1 or more"),
        ({"min_workers": 3}, "min_workers=3: allowed is 1 to num_workers=2"),
        ({"min_workers": 0}, "min_workers=0"),
        ({"mode": "asynch"}, "did you mean 'async'"),
        ({"sync_every": 0}, "sync_every=0: allowed is a whole number of 1 or more"),
        ({"num_fragments": 0}, "num_fragments=0"),
        ({"deadline_s": 0}, "deadline_s=0: allowed is a number above 0"),
        ({"heartbeat_s": float("nan")}, "heartbeat_s=nan"),
        ({"outer_lr": 0.0}, "outer_lr=0.0: allowed is a number above 0"),
        ({"outer_lr": float("inf")}, "outer_lr=inf"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0: allowed is a number from 0 to below 1"),
        ({"accumulate": "bf16"}, "unknown accumulate 'bf16'"),
        ({"async_delay": 0}, "async_delay=0"),
        ({"async_spread": 0.6}, "async_spread=0.6: allowed is a number from 0 to 1/2"),
        ({"max_update_norm": -1.0}, "max_update_norm=-1.0"),
        ({"num_workers": 2.0}, "num_workers=2.0"),
        ({"async_spread": "much"}, "async_spread='much'"),
        ({"nesterov": "no"}, "nesterov='no': allowed is true or false"),
    ],
)
def test_a_servers_options_are_checked(options: dict, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerOptions(**{"num_workers": 2, **options})
    assert words in str(caught.value)


def test_all_mistakes_are_told_at_once_and_without_torch() -> None:
    with pytest.raises(ConfigError) as caught:
        ServerOptions(num_workers=0, sync_every=0, deadline_s=-1, mode="x")
    assert len(caught.value.problems) == 4
    assert_no_import(
        "from headway.diloco.server_options import ServerOptions\nServerOptions(num_workers=1)"
    )
