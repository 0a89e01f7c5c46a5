"""Retention never loses the newest, the best, the pinned; metrics compare as they should."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.checkpoint.best import is_better, lookup_metric
from headway.checkpoint.retention import Entry, choose_deletions
from headway.errors import ConfigError

metrics = st.none() | st.floats(allow_nan=True) | st.sampled_from([0.0, 1.0, 2.0])
entry_facts = st.tuples(
    st.integers(0, 50),
    metrics,
    st.booleans(),
    st.booleans(),
    st.sampled_from(["training", "training", "training", "merged", "export"]),
)


def entries(*metric_values, first=1):
    return [
        Entry(id=f"c{i}", save_counter=i, step=i, metric=m)
        for i, m in enumerate(metric_values, start=first)
    ]


@settings(max_examples=1000, deadline=None)
@given(
    st.lists(entry_facts, max_size=10),
    st.none() | st.integers(1, 4),
    st.integers(0, 4),
    st.booleans(),
)
def test_rule(facts, limit, num_best, greater_is_better):
    checkpoints = [
        Entry(f"c{i}", i, step, metric, permanent, pinned, kind)
        for i, (step, metric, permanent, pinned, kind) in enumerate(facts)
    ]
    options = {"limit": limit, "num_best": num_best, "greater_is_better": greater_is_better}
    deleted = choose_deletions(checkpoints[::-1], **options)
    assert deleted == choose_deletions(checkpoints, **options), "order of the list must not matter"
    assert len(deleted) == len(set(deleted))
    gone = [c for c in checkpoints if c.id in deleted]
    kept = [c for c in checkpoints if c.id not in deleted]
    training = [c for c in checkpoints if c.kind == "training"]

    assert all(c.kind == "training" and not c.permanent and not c.pinned for c in gone)
    if training:
        assert training[-1] in kept
    scored = [c for c in training if c.metric is not None and not math.isnan(c.metric)]
    scored.sort(key=lambda c: (-c.metric if greater_is_better else c.metric, c.save_counter))
    best = scored[:num_best]
    assert all(c in kept for c in best)
    ordinary = [c for c in training if not (c.permanent or c.pinned or c in best)]
    expected = len(ordinary) if limit is None else min(limit, len(ordinary))
    ordinary_kept = [c for c in ordinary if c in kept]
    assert ordinary_kept == ordinary[len(ordinary) - expected :]


def test_second_best_enters_the_list():
    assert choose_deletions(entries(3.0, 2.0, 2.5, None), limit=1, num_best=2) == ["c1"]


def test_best_do_not_push_out_the_newest():
    assert choose_deletions(entries(1.0, 2.0, 9.0), limit=2, num_best=2) == []


def test_zero_is_a_metric_and_nan_is_none():
    assert choose_deletions(entries(0.0, 1.0, math.nan, None), limit=1, num_best=1) == ["c2", "c3"]


def test_order_is_the_save_counter_not_the_step():
    rolled_back = [Entry("late", 1, 900), Entry("early", 2, 100), Entry("now", 3, 200)]
    assert choose_deletions(rolled_back, limit=2) == ["late"]


@pytest.mark.parametrize("options", [{"limit": 0}, {"limit": -1}, {"limit": 1, "num_best": -1}])
def test_impossible_limits_are_refused(options):
    with pytest.raises(ConfigError, match="allowed"):
        choose_deletions([], **options)


def test_metric_lookup():
    assert lookup_metric({"eval_loss": 0.0}, "loss") == 0.0
    assert lookup_metric({"loss": 1, "eval_loss": 2.0}, "loss") == 1.0
    assert lookup_metric({"loss": 3.0}, "eval_loss") == 3.0
    assert lookup_metric({"eval_loss": 3.0}, "accuracy") is None


def test_is_better():
    assert is_better(0.0, 1.0, greater_is_better=False)
    assert not is_better(1.0, 1.0, greater_is_better=False)
    assert is_better(2.0, 1.0, greater_is_better=True)
    assert is_better(5.0, None, greater_is_better=False)
    assert is_better(5.0, math.nan, greater_is_better=False)
    assert not is_better(math.nan, None, greater_is_better=True)
