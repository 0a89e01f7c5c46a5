import math
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from headway.data.datasets import SyntheticDataset
from headway.data.loader import WindowLoader
from headway.data.mixing import MixedDataset
from headway.errors import ConfigError


def sources_of(mixture, count, start=0):
    return np.array([mixture.locate(i)[0] for i in range(start, start + count)])


def test_proportions_hold_over_every_prefix():
    weights = [0.6, 0.3, 0.1]
    mixture = MixedDataset([range(50), range(70), range(90)], weights, num_samples=3000)
    chosen = sources_of(mixture, 3000)
    for source, weight in enumerate(weights):
        counts = np.cumsum(chosen == source)
        assert np.abs(counts - weight * np.arange(1, 3001)).max() <= 2
    assert Counter(chosen.tolist()) == {0: 1800, 1: 900, 2: 300}
    assert mixture.proportions == {"source 0": 0.6, "source 1": 0.3, "source 2": 0.1}


def test_awkward_weights_are_close_and_none_is_lost():
    mixture = MixedDataset({"a": range(9), "b": range(9)}, {"a": 3.14159265, "b": 1e-9})
    assert mixture.proportions["b"] > 0
    assert mixture.proportions["a"] == pytest.approx(1, abs=1e-5)


def test_without_weights_every_sample_comes_once():
    parts = [["a0", "a1", "a2"], ["b0", "b1", "b2", "b3", "b4"]]
    mixture = MixedDataset(parts)
    assert sorted(mixture[i] for i in range(len(mixture))) == sorted(parts[0] + parts[1])


@pytest.mark.parametrize("sizes", [(1,), (1, 1), (3, 5), (2, 4, 8), (7, 7, 1), (97, 31, 1, 55, 12)])
def test_sources_are_spread_as_evenly_as_can_be(sizes):
    mixture = MixedDataset([range(size) for size in sizes], seed=1)
    found = [mixture.locate(i)[0] for i in range(sum(sizes))]
    # Draw k of a source that comes n times belongs in the middle of its n-th part.
    places = sorted((Fraction(2 * k + 1, 2 * n), s) for s, n in enumerate(sizes) for k in range(n))
    assert found == [source for _, source in places]
    assert [mixture._turns._compute(i)[0] for i in range(sum(sizes))] == found


@pytest.mark.parametrize("sizes", [(3_000_017, 1_500_007, 11), (10**12 + 39, 10**12 - 11)])
def test_many_samples_without_weights_come_once_each(sizes):
    """More than a table could hold: each draw stands where as many others stand before it."""
    mixture = MixedDataset([SyntheticDataset(size, 4, 9) for size in sizes])
    total = sum(sizes)
    assert mixture.proportions["source 0"] == sizes[0] / total
    rng = random.Random(0)
    for index in [0, 1, total // 2, total - 1] + [rng.randrange(total) for _ in range(300)]:
        source, draw = mixture._turns.at(index)
        place = Fraction(2 * draw + 1, 2 * sizes[source])
        before = 0
        for other, size in enumerate(sizes):
            earlier = size * place - Fraction(1, 2)
            before += math.ceil(earlier) + (earlier.denominator == 1 and other < source)
        assert before == index


class Noisy:
    """Draws from the generator it is given."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        raise AssertionError("asked for without the generator")

    def get(self, index, rng):
        return {"x": torch.tensor([index, int(rng.integers(1 << 30))])}


class Loud(Noisy):
    """Draws from the generators of the process."""

    get = None

    def __getitem__(self, index):
        return {"x": torch.tensor([index, random.getrandbits(30)])}


class Drawing(Noisy):
    """Draws from the generator it is given, else from those of the process."""

    def __getitem__(self, index):
        return {"x": torch.tensor([index, random.getrandbits(30)])}


def test_a_source_in_a_mixture_is_given_the_generator_of_its_sample():
    def read(batch_size, workers):
        mixture = MixedDataset(
            [Noisy(6), MixedDataset([Noisy(3), Loud(4)]), [{"x": torch.tensor([-1, -1])}]]
        )
        loader = WindowLoader(mixture, batch_size=batch_size, num_workers=workers)
        rows = [tuple(row.tolist()) for batch in loader.batches() for row in batch["x"]]
        assert len(set(rows)) == len(rows) == 14
        return rows

    state = random.getstate()
    first = read(4, 0)
    assert first == read(7, 0) == read(4, 2)
    assert random.getstate() == state


def test_a_part_of_a_mixture_draws_the_same_numbers_again():
    """Its samples come by index alone, and so from the generators of the process."""

    def read(batch_size):
        part = Subset(MixedDataset([Drawing(6), Loud(4)]), range(7))
        loader = WindowLoader(part, batch_size=batch_size)
        return [tuple(row.tolist()) for batch in loader.batches() for row in batch["x"]]

    state = random.getstate()
    assert read(3) == read(7)
    assert random.getstate() == state


def test_a_used_up_source_starts_again_in_another_order():
    mixture = MixedDataset(
        [list(range(20)), list(range(100, 200))], [1, 1], num_samples=120, seed=4
    )
    small = [mixture[i] for i in range(120) if mixture.locate(i)[0] == 0]
    passes = [small[0:20], small[20:40], small[40:60]]
    assert all(sorted(one) == list(range(20)) for one in passes)
    assert passes[0] != passes[1] != passes[2]


def test_the_next_epoch_goes_on():
    mixture = MixedDataset([list(range(100)), list(range(1000, 1100))], [3, 1], num_samples=100)
    first = [mixture[i] for i in range(100)]
    mixture.set_epoch(1)
    second = [mixture[i] for i in range(100)]
    big = [value for value in first + second if value >= 1000]
    assert len(big) == len(set(big)) == 50


def test_seek_far_and_many_at_once():
    mixture = MixedDataset(
        [SyntheticDataset(10**12, 4, 9, 1), MixedDataset([SyntheticDataset(7, 4, 9), [{"x": 1}]])],
        [0.9, 0.1],
        num_samples=10**12,
    )
    indices = [10**11 + i for i in range(12)]
    many = mixture.__getitems__(indices)
    for index, item in zip(indices, many):
        assert str(item) == str(mixture[index])
    assert mixture.vocab_size_needed == 9


def test_mistakes():
    for sources, weights, message in (
        ([], None, "nothing to mix"),
        ([[], [1]], None, "is empty"),
        ([[1], [2]], [1], "1 weights for 2 sources"),
        ([[1], [2]], [1, 0], "must be above 0"),
        ([[1], [2]], [1, float("nan")], "must be above 0"),
        ({"code": [1]}, {"cod": 1}, "did you mean 'code'"),
        ({"code": [1], "web": [2]}, {"code": 1}, "no weight for web"),
        ([[1]], {"a": 1}, "without names"),
        ([iter([1])], None, "only map-style"),
    ):
        with pytest.raises(ConfigError, match=message):
            MixedDataset(sources, weights)
    with pytest.raises(IndexError):
        MixedDataset([[1]])[1]
