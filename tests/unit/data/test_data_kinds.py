"""Which data ranks have to share, and how whole batches are dealt to them."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from headway.data.kinds import is_sharded
from headway.data.loader import WindowLoader


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


class OwnShare(Stream):
    is_sharded = True


def loader_with(num_replicas: int) -> DataLoader[int]:
    data = list(range(10))
    return DataLoader(data, sampler=DistributedSampler(data, num_replicas, 0))


def test_what_gives_each_rank_its_own_share() -> None:
    assert not is_sharded(Stream())
    assert not is_sharded(DataLoader(list(range(10)), shuffle=True))
    assert not is_sharded(loader_with(1))
    assert is_sharded(OwnShare())
    assert is_sharded(DataLoader(OwnShare()))
    assert is_sharded(loader_with(2))


def test_a_split_hugging_face_stream_is_known() -> None:
    datasets = pytest.importorskip("datasets")
    node = pytest.importorskip("datasets.distributed")
    stream = datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset(num_shards=2)
    assert not is_sharded(stream)
    assert is_sharded(node.split_dataset_by_node(stream, rank=0, world_size=2))


def samples_of(data: Any, num_ranks: int, **options: Any) -> list[list[list[list[int]]]]:
    loaders = [
        WindowLoader(data, rank=rank, world_size=num_ranks, **{"batch_size": 2, **options})
        for rank in range(num_ranks)
    ]
    lengths = {(loader.num_windows, loader.kind) for loader in loaders}
    assert len(lengths) == 1, "every rank plans the same number of steps"
    windows = [list(loader.windows()) for loader in loaders]
    return [[[b.tolist() for b in w.micro_batches] for w in own] for own in windows]


def test_batches_of_a_loader_are_dealt_in_contiguous_parts() -> None:
    data = DataLoader(list(range(20)), batch_size=2)
    assert samples_of(data, 2, accumulation=2) == [
        [[[0, 1], [2, 3]], [[8, 9], [10, 11]], [[16, 17]]],
        [[[4, 5], [6, 7]], [[12, 13], [14, 15]], [[18, 19]]],
    ]


def test_rounds_give_every_rank_what_it_would_have_read() -> None:
    for data in (list(range(23)), Stream(), DataLoader(list(range(9)), batch_size=2)):
        reader = WindowLoader(data, batch_size=2, accumulation=2, world_size=3)
        rounds = [
            [[b.tolist() for b in window.micro_batches] for window in windows]
            for windows in reader.rounds(range(3))
        ]
        assert [list(own) for own in zip(*rounds)] == samples_of(data, 3, accumulation=2)


def test_a_stream_read_for_one_rank_goes_on_for_all() -> None:
    loader = WindowLoader(Stream(), batch_size=1, world_size=2)
    assert next(loader.windows()).micro_batches[0].tolist() == [0]
    (first, second), *_ = list(loader.rounds(range(2)))
    assert (first.micro_batches[0].tolist(), second.micro_batches[0].tolist()) == ([2], [3])
