import logging
import math

import pytest
import torch

from headway import ConfigError
from headway.engine.metrics import GRAD_NORM, TRAIN_LOSS, MetricBuffer, ReduceType
from headway.testing import count_host_syncs


def flushed(buffer):
    return dict(buffer.flush())


def test_every_step_is_delivered_in_order():
    buffer = MetricBuffer()
    for step in (3, 1, 2):
        buffer.record(step, "x", torch.tensor(float(step)))
    assert [step for step, _ in buffer.flush()] == [1, 2, 3]
    assert buffer.flush() == []


def test_recording_does_not_sync_and_a_flush_syncs_once():
    buffer = MetricBuffer()
    with count_host_syncs() as syncs:
        for step in range(50):
            buffer.record(step, "a", torch.tensor(1.0))
            buffer.record(step, "b", torch.tensor(2), namespace="n")
    assert syncs.count == 0
    with count_host_syncs() as syncs:
        buffer.flush()
    assert syncs.count <= 1


def test_large_counters_keep_their_digits():
    buffer = MetricBuffer()
    buffer.record(1, "tokens", torch.tensor(2**24 + 1))
    buffer.record(1, "host", 2**53 - 1)
    assert flushed(buffer)[1] == {"tokens": 2**24 + 1, "host": 2**53 - 1}


def test_namespace_and_get():
    buffer = MetricBuffer()
    buffer.record(7, "LR", 0.5, namespace="optim")
    assert buffer.get(7, "optim/LR") == 0.5 == buffer.get(7, "LR", namespace="optim")
    assert buffer.get(8, "optim/LR") is None


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("latest", 6.0), ("oldest", 1.0), ("mean", 3.0), ("sum", 9.0), ("max", 6.0), ("min", 1.0)],
)
def test_merging_repeats_in_one_step(strategy, expected):
    buffer = MetricBuffer()
    for value in (1.0, torch.tensor(2.0), 6):
        buffer.record(1, "x", value, merge_strategy=strategy)
    assert flushed(buffer)[1]["x"] == expected


def test_a_repeat_warns_by_default_and_keeps_the_first(caplog):
    buffer = MetricBuffer()
    with caplog.at_level(logging.WARNING):
        buffer.record(1, "x", 1.0)
        buffer.record(1, "x", 2.0)
    assert flushed(buffer)[1]["x"] == 1.0
    assert "'x' was recorded twice" in caplog.text


def test_one_reduce_type_for_the_whole_run():
    buffer = MetricBuffer()
    buffer.record(1, "x", 1.0, ReduceType.mean)
    with pytest.raises(ConfigError, match="'x' was recorded with reduce type mean"):
        buffer.record(2, "x", 1.0, "sum")


def test_bad_values_are_named():
    buffer = MetricBuffer()
    with pytest.raises(ConfigError, match="one number, got a tensor of shape"):
        buffer.record(1, "x", torch.ones(2))
    with pytest.raises(ConfigError, match="reduce_type 'men'; did you mean 'mean'"):
        buffer.record(1, "x", 1.0, "men")
    with pytest.raises(ConfigError, match="merge_strategy"):
        buffer.record(1, "x", 1.0, merge_strategy="lattest")


def test_values_are_joined_over_ranks_in_one_go_for_each_type():
    asked = []

    def reduce(value, kind):
        if kind != "max":  # the ranks' question whether they brought the same
            asked.append((kind, value.numel()))
        return value * 2 if kind == "sum" else value

    buffer = MetricBuffer(reduce)
    for step in (1, 2):
        buffer.record(step, "mine", 1.0)
        buffer.record(step, "ours", float(step), "sum")
        buffer.record_step(step, {TRAIN_LOSS: torch.tensor(3.0), GRAD_NORM: 5.0})
    steps = flushed(buffer)
    assert steps[1] == {"mine": 1.0, "ours": 2.0, TRAIN_LOSS: 6.0, GRAD_NORM: 5.0} | {
        "train/PPL": pytest.approx(math.exp(6.0))
    }
    assert steps[2]["ours"] == 4.0
    assert asked == [("sum", 4)]


def test_ranks_that_bring_different_metrics_are_told_so():
    buffer = MetricBuffer(lambda value, kind: value + (kind == "max"))
    buffer.record(1, "ours", 1.0, "sum")
    with pytest.raises(ConfigError, match=r"different metrics.*ours"):
        buffer.flush()


def test_perplexity_is_derived_when_it_is_meaningful():
    buffer = MetricBuffer()
    buffer.record(1, "train/CE loss", 2.0)
    buffer.record(2, "train/CE loss", 11.0)
    result = flushed(buffer)
    assert result[1]["train/PPL"] == pytest.approx(math.exp(2))
    assert "train/PPL" not in result[2]


def test_short_names_mean_the_namespaced_ones():
    buffer = MetricBuffer()
    buffer.record(1, "loss", 2.0)
    assert buffer.get(1, "train/CE loss") == 2.0 == buffer.get(1, "loss")
    buffer.record(1, "grad_norm", 3.0)
    buffer.record(1, "loss", 5.0, namespace="mine")
    assert flushed(buffer)[1] == {
        "train/CE loss": 2.0,
        "optim/total grad norm": 3.0,
        "mine/loss": 5.0,
        "train/PPL": pytest.approx(math.exp(2)),
    }
