import logging
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway import ConfigError
from headway.engine.flushing import Flusher
from headway.engine.metrics import GRAD_NORM, TRAIN_LOSS, MetricBuffer, ReduceType
from headway.testing import count_host_syncs


def flushed(buffer):
    return dict(Flusher(buffer).flush())


def test_every_step_is_delivered_in_order():
    buffer = MetricBuffer()
    for step in (3, 1, 2):
        buffer.record(step, "x", torch.tensor(float(step)))
    assert list(flushed(buffer)) == [1, 2, 3]
    assert flushed(buffer) == {}


def test_recording_does_not_sync_and_a_flush_syncs_once():
    buffer = MetricBuffer()
    with count_host_syncs() as syncs:
        for step in range(50):
            buffer.record(step, "a", torch.tensor(1.0))
            buffer.record(step, "b", torch.tensor(2), namespace="n")
    assert syncs.count == 0
    copies = []

    class CountCopies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket.__name__ == "copy_":
                copies.append((args[1].numel(), kwargs))
            return func(*args, **(kwargs or {}))

    flusher = Flusher(buffer)
    flusher.flush()  # the memory on the host is made with the first one
    for step in range(50):
        buffer.record(step, "a", torch.tensor(1.0))
        buffer.record(step, "b", torch.tensor(2), namespace="n")
    with count_host_syncs() as syncs, CountCopies():
        flusher.flush()
    assert syncs.count == 0
    assert [number for number, _ in copies] == [100], "both kinds, all steps, in one transfer"


def test_large_counters_keep_their_digits():
    buffer = MetricBuffer()
    for name, number in (("small", 2**24 + 1), ("large", 2**53 - 1)):
        buffer.record(1, name, torch.tensor(number))
        buffer.record(1, f"host {name}", number)
        buffer.record(1, f"summed {name}", torch.tensor(number - 2), merge_strategy="sum")
        buffer.record(1, f"summed {name}", 2, merge_strategy="sum")
    buffer.record(1, "half", torch.tensor(0.5, dtype=torch.bfloat16))  # beside it, in one copy
    numbers = flushed(buffer)[1]
    assert numbers.pop("half") == 0.5
    for name, number in numbers.items():
        assert number == (2**24 + 1 if "small" in name else 2**53 - 1), name


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
        buffer.record(2, "x", 1.0)
        buffer.record(2, "x", 2.0)
    assert caplog.text.count("'x' was recorded twice") == 1  # not at every step


def test_one_reduce_type_for_the_whole_run():
    buffer = MetricBuffer()
    buffer.record(1, "x", 1.0, ReduceType.mean)
    with pytest.raises(ConfigError, match="'x' was recorded with reduce type mean"):
        buffer.record(2, "x", 1.0, "sum")


def test_bad_values_are_named():
    buffer = MetricBuffer()
    with pytest.raises(ConfigError, match="one number, got a tensor of shape"):
        buffer.record(1, "x", torch.ones(2))
    for wrong in ("1.0", None, [1.0, 2.0]):
        with pytest.raises(ConfigError, match="'x' must be one number, got"):
            buffer.record(1, "x", wrong)
    for wrong in ("", " ", "/", None, 3):
        with pytest.raises(ConfigError, match="name must be a text that is not empty"):
            buffer.record(1, wrong, 1.0)
        with pytest.raises(ConfigError, match="name must be a text that is not empty"):
            buffer.record(1, wrong, 1.0, namespace="optim")
    with pytest.raises(ConfigError, match="reduce_type 'men'; did you mean 'mean'"):
        buffer.record(1, "x", 1.0, "men")
    with pytest.raises(ConfigError, match="merge_strategy"):
        buffer.record(1, "x", 1.0, merge_strategy="lattest")


class Channel:
    """Two ranks that brought the same, as one of them sees it; says what it was asked."""

    rank, world_size, timeout_s = 0, 2, 10.0

    def __init__(self):
        self.asked = []

    def reduce(self, values, operation):
        self.asked.append((operation, len(values)))
        return [2 * value for value in values] if operation == "sum" else list(values)


def test_values_are_joined_over_ranks_in_one_go():
    buffer, channel = MetricBuffer(), Channel()
    for step in (1, 2):
        buffer.record(step, "mine", 1.0)
        buffer.record(step, "ours", float(step), "sum")
        buffer.record(step, "average", float(step), "mean")
        buffer.record(step, "norm", 3.0, "l2_norm")
        buffer.record(step, "peak", -float(step), "max")
        buffer.record(step, "broken", math.nan, "max")
        buffer.record_step(step, {TRAIN_LOSS: torch.tensor(3.0), GRAD_NORM: 5.0})
    first, second = (metrics for _, metrics in Flusher(buffer, channel).flush())
    assert math.isnan(first.pop("broken"))
    assert first == {
        "mine": 1.0,
        "ours": 2.0,
        "average": 1.0,
        "norm": pytest.approx(math.sqrt(18)),
        "peak": -1.0,
        TRAIN_LOSS: 6.0,
        GRAD_NORM: 5.0,
        "train/PPL": pytest.approx(math.exp(6.0)),
    }
    assert second["ours"] == 4.0
    # Whether both brought the same; then all sums, then all maxima.
    assert channel.asked == [("max", 4), ("sum", 14), ("max", 6)]


def test_a_norm_of_one_rank_is_its_size():
    buffer = MetricBuffer()
    buffer.record(1, "norm", -3.0, "l2_norm")
    assert flushed(buffer)[1]["norm"] == 3.0


def test_a_flush_may_begin_now_and_be_read_later():
    buffer = MetricBuffer()
    counter = torch.tensor(1)
    buffer.record(1, "x", counter)
    flusher = Flusher(buffer)
    flusher.start()
    counter += 1  # the flush has its own copy
    buffer.record(2, "x", counter)
    assert list(flusher.pending()) == [1, 2]
    assert flusher.finish() == [(1, {"x": 1.0})]
    assert not flusher.busy and list(flusher.pending()) == [2]
    assert flusher.flush() == [(2, {"x": 2.0})]
    assert flusher.pending() == {}


def test_many_numbers_of_many_kinds_keep_their_places():
    buffer = MetricBuffer()
    kinds = (torch.float32, torch.int64, torch.float16, torch.float64)
    expected = {}
    for number in range(700):
        value = torch.tensor(number, dtype=kinds[number % 4])
        buffer.record(1, str(number), value.reshape(1) if number % 3 else value)
        expected[str(number)] = float(number)
    assert flushed(buffer)[1] == expected


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


def test_only_the_loops_own_tensors_are_computed_before_the_update():
    buffer, mark = MetricBuffer(), object()
    buffer._mark = mark  # as on a device
    own = {TRAIN_LOSS: torch.tensor(1.0), GRAD_NORM: torch.tensor(2.0), "optim/LR (group 0)": 0.1}
    buffer.record_step(1, own)
    buffer.record(1, "a number", 1.0)
    assert buffer.computed is mark
    buffer.record(1, "a tensor", torch.tensor(1.0))
    assert buffer.computed is None
    buffer.take()
    assert buffer.computed is mark
    buffer.record_step(2, own | {"optim/LR (group 0)": torch.tensor(0.1)})
    assert buffer.computed is None
