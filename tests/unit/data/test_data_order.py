import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.order import SampleOrder, sample_rng
from headway.errors import ConfigError


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 3000), st.integers(-5, 2**70), st.integers(0, 10**6))
def test_each_epoch_is_a_bijection(num_samples, seed, epoch):
    order = SampleOrder(num_samples, seed).indices(epoch, 0, num_samples)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(num_samples))


@pytest.mark.parametrize("num_samples", [2**k + d for k in (1, 2, 5, 10, 16) for d in (-1, 0, 1)])
def test_bijection_around_powers_of_two(num_samples):
    order = SampleOrder(num_samples, 3).indices(2, 0, num_samples)
    assert np.array_equal(np.sort(order), np.arange(num_samples))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2**60), st.integers(0, 2**40), st.integers(0, 50), st.data())
def test_a_slice_equals_single_lookups(num_samples, seed, epoch, data):
    start = data.draw(st.integers(0, num_samples - 1))
    count = min(7, num_samples - start)
    order = SampleOrder(num_samples, seed)
    slice_ = order.indices(epoch, start, count)
    assert slice_.tolist() == [order.index(epoch, start + i) for i in range(count)]
    assert ((slice_ >= 0) & (slice_ < num_samples)).all()
    assert len(set(slice_.tolist())) == count


def test_epochs_and_seeds_differ_and_repeat():
    first = SampleOrder(1000, 1).indices(0, 0, 1000)
    assert np.array_equal(first, SampleOrder(1000, 1).indices(0, 0, 1000))
    for other in (
        SampleOrder(1000, 1).indices(1, 0, 1000),
        SampleOrder(1000, 2).indices(0, 0, 1000),
    ):
        assert np.mean(first == other) < 0.02


def test_the_order_never_changes_between_versions():
    # Old checkpoints store only a position: another permutation would silently reorder their data.
    assert SampleOrder(1000, 42).indices(3, 10, 6).tolist() == FROZEN


FROZEN = [420, 626, 497, 563, 552, 974]


def test_no_shuffle_is_the_identity():
    assert SampleOrder(10, 1, shuffle=False).indices(4, 3, 4).tolist() == [3, 4, 5, 6]


def test_seek_to_a_billion_is_instant():
    order = SampleOrder(10**12, 7)
    began = time.perf_counter()
    assert len(order.indices(0, 10**9, 4096)) == 4096
    assert time.perf_counter() - began < 0.5


def chi_square(counts):
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("num_samples", [3, 5, 16])
def test_small_orders_are_uniform(num_samples):
    # Where sample 0..n-1 lands, over many epochs: every (position, sample) pair equally often.
    num_epochs = 4000
    counts = np.zeros((num_samples, num_samples))
    order = SampleOrder(num_samples, 11)
    for epoch in range(num_epochs):
        counts[np.arange(num_samples), order.indices(epoch, 0, num_samples)] += 1
    freedom = (num_samples - 1) ** 2
    assert chi_square(counts) < freedom + 6 * np.sqrt(2 * freedom) + 10


def test_large_order_has_no_gross_pattern():
    num_samples = 100_003
    order = SampleOrder(num_samples, 5).indices(0, 0, num_samples)
    grid, *_ = np.histogram2d(np.arange(num_samples), order, bins=(50, 50))
    # Rows and columns are fixed by the bijection: 49 * 49 degrees of freedom.
    assert abs(chi_square(grid) - 49 * 49) < 6 * np.sqrt(2 * 49 * 49)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert np.mean(np.abs(np.diff(order)) == 1) < 1e-3


def test_bad_positions_and_sizes():
    for bad in (0, -1, 2**60 + 1):
        with pytest.raises(ConfigError, match="num_samples"):
            SampleOrder(bad, 0)
    with pytest.raises(IndexError):
        SampleOrder(10, 0).indices(0, 8, 3)
    with pytest.raises(IndexError):
        SampleOrder(10, 0).index(0, 10)


def test_sample_rng_depends_on_all_three():
    draws = {tuple(sample_rng(*key).integers(0, 2**62, 3).tolist()) for key in KEYS}
    assert len(draws) == len(KEYS)
    assert sample_rng(1, 2, 3).random() == sample_rng(1, 2, 3).random()


KEYS = [(s, e, i) for s in (0, 1, -1) for e in (0, 1) for i in (0, 1, 2**40)]
