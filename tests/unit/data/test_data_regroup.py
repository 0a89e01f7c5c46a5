"""Windows whose number of samples is changed on the way."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from headway.data.dealing import Deal
from headway.data.loader import WindowLoader
from headway.errors import ConfigError
from headway.testing import tiny_dataset


def loader(num_samples: int = 40, **options: Any) -> WindowLoader:
    settings = {"batch_size": 4, "accumulation": 2, "seed": 5, **options}
    return WindowLoader(tiny_dataset(num_samples, sequence_length=4), **settings)


def read(source: WindowLoader, changes: dict[int, Deal]) -> list[list[int]]:
    """The samples of every window; `changes` come after so many windows."""
    found = []
    for number, window in enumerate(source.windows(), start=1):
        found.append(list(map(int, window.sample_ids)))
        if number in changes:
            source.group(changes[number])
    return found


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_order_of_samples_is_that_of_a_run_without_changes(
    drop_last: bool, num_workers: int
) -> None:
    plain = [n for ids in read(loader(), {}) for n in ids]
    source = loader(
        drop_last=drop_last, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    smaller, larger = (
        replace(source.deal, batch_size=3, accumulation=1),
        Deal(4, 3, 0, 1, drop_last),
    )
    found = read(source, {2: smaller, 4: larger})
    source.close()
    assert [len(ids) for ids in found] == [8, 8, 3, 3, 12, 4 if drop_last else 6]
    assert [n for ids in found for n in ids] == plain[: sum(map(len, found))]
    assert source.at_end and source.epoch_fraction == 1.0
    source.start_epoch(1)
    assert not source.at_end and source.position == 0


def test_ranks_together_get_what_one_gets() -> None:
    alone = loader(batch_size=4, accumulation=1)
    whole = read(
        alone, {2: replace(alone.deal, accumulation=3), 4: replace(alone.deal, batch_size=2)}
    )
    parts = []
    for rank in (0, 1):
        one = loader(batch_size=2, accumulation=1, rank=rank, world_size=2)
        parts.append(
            read(one, {2: replace(one.deal, accumulation=3), 4: replace(one.deal, batch_size=1)})
        )
    assert [a + b for a, b in zip(*parts, strict=True)] == whole


def test_a_stored_position_goes_on_with_windows_of_any_size() -> None:
    source = loader()
    expected = read(source, {1: replace(source.deal, batch_size=2)})
    again = loader()
    windows = again.windows()
    next(windows)
    again.group(replace(again.deal, batch_size=2))
    next(windows)
    resumed = loader()
    resumed.load_state_dict(again.state_dict())
    resumed.group(replace(resumed.deal, batch_size=2))
    assert read(resumed, {}) == expected[2:]


def test_evaluations_are_left_alone() -> None:
    source = loader()
    before = [len(batch["input_ids"]) for batch in source.batches()]
    windows = source.windows()
    next(windows)
    source.group(replace(source.deal, accumulation=4))
    assert [len(batch["input_ids"]) for batch in source.batches()] == before
    assert len(next(windows).micro_batches) == 4


def test_only_the_size_can_be_changed() -> None:
    source = loader()
    for name, value in (("rank", 1), ("world_size", 2), ("drop_last", True)):
        with pytest.raises(ConfigError, match=name):
            source.group(replace(source.deal, **{name: value}))
    stream = WindowLoader(iter(tiny_dataset(8, sequence_length=4)), batch_size=2)
    stream.group(replace(stream.deal, accumulation=3))
    with pytest.raises(ConfigError, match="batch_size"):
        stream.group(replace(stream.deal, batch_size=1))


def test_sizes_are_dealt_to_as_few_micro_batches_as_fit() -> None:
    draw = random.Random(0)
    for _ in range(300):
        world, largest, own = draw.randint(1, 8), draw.randint(1, 9), draw.randint(1, 60)
        deal = Deal(largest, 1, 0, world).resized(own * world, largest)
        assert deal.window_samples == own * world and deal.batch_size <= largest
        fewer = range(1, deal.accumulation)
        assert not [n for n in fewer if own % n == 0 and own // n <= largest]
    for wanted, told in ((7, "6 or 8"), (1, ": 2")):
        with pytest.raises(ConfigError, match=told):
            Deal(4, 1, 0, 2).resized(wanted, 4)
