from collections import Counter

import numpy as np
import pytest

from headway.data.datasets import SyntheticDataset
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
