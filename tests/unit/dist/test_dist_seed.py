"""One seed reaches every generator; a drawn seed disturbs none of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from headway.dist import draw_seed, seed_all
from headway.errors import ConfigError


def draw_everywhere() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_same_seed_gives_the_same_draws() -> None:
    seed_all(7)
    first = draw_everywhere()
    seed_all(7)
    assert draw_everywhere() == first
    seed_all(8)
    assert all(a != b for a, b in zip(draw_everywhere(), first))


def test_seeds_that_differ_beyond_32_bits_differ_in_numpy() -> None:
    seed_all(1)
    low = draw_everywhere()[1]
    seed_all(1 + 2**40)
    assert draw_everywhere()[1] != low


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match="seed"):
        seed_all(seed)


def test_drawing_a_seed_leaves_the_generators_alone() -> None:
    seed_all(3)
    expected = draw_everywhere()
    seed_all(3)
    seeds = {draw_seed() for _ in range(20)}
    assert draw_everywhere() == expected
    assert len(seeds) > 1
    assert all(0 <= seed < 2**31 for seed in seeds)
