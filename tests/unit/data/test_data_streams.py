import json
import logging
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from headway.data.jsonable import decode, encode
from headway.data.loader import WindowLoader
from headway.errors import ConfigError


class Plain:
    """An iterable without state."""

    def __init__(self, count=20):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


class Stateful:
    """Counts how many samples it really made."""

    def __init__(self, count=20):
        self.count, self.place, self.made = count, 0, 0

    def __iter__(self):
        while self.place < self.count:
            self.place += 1
            self.made += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self):
        return {"place": self.place, "extra": (np.arange(2), b"x")}

    def load_state_dict(self, state):
        assert isinstance(state["extra"], tuple)
        self.place = state["place"]


class TorchStream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(20))


def seen(windows):
    return [[batch.tolist() for batch in window.micro_batches] for window in windows]


def two_epochs(make, stop, **options):
    """All windows of two epochs, stopped and resumed after `stop` windows."""
    loader = WindowLoader(make(), **options)
    loader.start_epoch(0)
    got, resumed = [], stop is None
    while True:
        for window in loader.windows():
            got += seen([window])
            if not resumed and len(got) == stop:
                break
        else:
            if loader.epoch == 1:
                return got
            loader.start_epoch(loader.epoch + 1)
            continue
        resumed = True
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
        loader = WindowLoader(make(), **options)
        loader.load_state_dict(state)


@pytest.mark.parametrize("make", [Plain, Stateful, TorchStream])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_stop_and_resume(make, num_workers):
    options = {"batch_size": 3, "accumulation": 2, "num_workers": num_workers}
    expected = two_epochs(make, None, **options)
    assert [n for w in expected for b in w for n in b] == [*range(20), *range(20)]
    assert expected[3] == [[18, 19]]
    for stop in (1, 3, 4, 5, 8) if num_workers == 0 else (2, 4):
        assert two_epochs(make, stop, **options) == expected


class Restarting(Stateful):
    """Stands at its beginning again when it was read to its end; each epoch is another."""

    def __init__(self):
        super().__init__(7)
        self.told = self.epoch = 0

    def set_epoch(self, epoch):
        self.told = epoch

    def __iter__(self):
        if self.place == 0:
            self.epoch = self.told
        return (100 * self.epoch + n for n in super().__iter__())

    def state_dict(self):
        return {**super().state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.epoch = state["epoch"]


@pytest.mark.parametrize("epoch_batches", [None, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_that_was_read_to_its_end_is_not_read_again(num_workers, epoch_batches):
    """Whatever state its dataset has then, and though nobody has looked whether there is more."""
    options = {"batch_size": 3, "num_workers": num_workers, "epoch_batches": epoch_batches}
    expected = two_epochs(Restarting, None, **options)
    if epoch_batches is None:
        assert expected == [[[0, 1, 2]], [[3, 4, 5]], [[6]], [[100, 101, 102]], [[103, 104, 105]],
                            [[106]]]  # fmt: skip
    for stop in range(1, len(expected) + 1):
        assert two_epochs(Restarting, stop, **options) == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_evaluation_that_is_cut_short_leaves_the_data_where_it_was(num_workers):
    loader = WindowLoader(Stateful(20), batch_size=2, num_workers=num_workers)
    cut = [[batch.tolist() for batch in islice(loader.batches(), 3)] for _ in range(2)]
    whole = [[batch.tolist() for batch in loader.batches()] for _ in range(2)]
    assert cut == [[[0, 1], [2, 3], [4, 5]]] * 2
    assert whole == [[[n, n + 1] for n in range(0, 20, 2)]] * 2


def hugging_face_stream():
    datasets = pytest.importorskip("datasets")
    return datasets.IterableDataset.from_generator(lambda: ({"x": i} for i in range(12)))


def columns(batches):
    return [batch["x"].tolist() for batch in batches]


def test_each_evaluation_of_a_hugging_face_stream_that_is_cut_short_has_the_same_samples():
    loader = WindowLoader(hugging_face_stream().take(6), batch_size=2)
    passes = [columns(islice(loader.batches(), 2)) for _ in range(4)]
    assert passes == [[[0, 1], [2, 3]]] * 4


@pytest.mark.parametrize("among", ["the same", "made of the same"])
@pytest.mark.parametrize("most", [1, None], ids=["cut", "whole"])
def test_a_hugging_face_stream_goes_on_after_an_evaluation_of_its_source(among, most):
    source = hugging_face_stream()
    train, held_out = (source, source)
    if among == "made of the same":
        train, held_out = source.skip(2), source.take(2)
    first = 2 * (train is not source)
    loader, evaluated = (WindowLoader(one, batch_size=2) for one in (train, held_out))
    windows = loader.windows()
    got = [columns(next(windows).micro_batches) for _ in range(2)]
    assert columns(islice(evaluated.batches(), most))[0] == [0, 1]
    resumed = WindowLoader(train, batch_size=2)
    got.append(columns(next(windows).micro_batches))
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    got += [columns(window.micro_batches) for window in resumed.windows()]
    assert got == [[[i, i + 1]] for i in range(first, 12, 2)]


@pytest.mark.parametrize("make", [Plain, Stateful, TorchStream])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_epochs_after_a_return_to_an_earlier_place_are_whole(make, num_workers):
    """As a rollback does it, on a dataset of which the same process has read before."""
    loader = WindowLoader(make(), batch_size=4, num_workers=num_workers)
    place, epoch = None, [[[n, n + 1, n + 2, n + 3]] for n in range(0, 20, 4)]
    for number, window in enumerate(loader.windows()):
        assert seen([window]) == [epoch[number]]
        place = loader.state_dict() if number == 0 else place
        if number == 2:
            break
    loader.load_state_dict(place)
    assert seen(loader.windows()) == epoch[1:]
    for number in (1, 2):
        loader.start_epoch(number)
        assert seen(loader.windows()) == epoch


def test_replay_is_announced_and_state_avoids_it(caplog):
    for make, replayed in ((Plain, True), (Stateful, False)):
        loader = WindowLoader(make(), batch_size=4)
        windows = loader.windows()
        next(windows), next(windows)
        fresh = WindowLoader(dataset := make(), batch_size=4)
        fresh.load_state_dict(loader.state_dict())
        caplog.clear()
        with caplog.at_level(logging.WARNING, "headway"):
            assert seen([next(fresh.windows())]) == [[[8, 9, 10, 11]]]
        assert ("dropping 8 samples" in caplog.text) == replayed
        if not replayed:
            assert dataset.made == 4


def test_hugging_face_stream():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"n": list(range(20))})

    def make():
        return table.to_iterable_dataset(num_shards=2).map(lambda row: row)

    def values(windows):
        return [b["n"].tolist() for w in windows for b in w.micro_batches]

    for num_workers in (0, 1):
        loader = WindowLoader(make(), batch_size=3, num_workers=num_workers)
        windows = loader.windows()
        got = values([next(windows), next(windows)])
        state = json.loads(json.dumps(loader.state_dict()))
        assert "dataset" in state["stream"]
        loader = WindowLoader(make(), batch_size=3, num_workers=num_workers)
        loader.load_state_dict(state)
        got += values(loader.windows())
        assert [n for batch in got for n in batch] == list(range(20))
        loader.start_epoch(1)
        assert [n for batch in values(loader.windows()) for n in batch] == list(range(20))


@pytest.mark.parametrize("buffered", [False, True])
def test_a_shuffle_buffer_is_announced_as_approximate(buffered, caplog):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": list(range(20))}).to_iterable_dataset()
    if buffered:
        data = data.shuffle(seed=1, buffer_size=4).map(dict)
    loader = WindowLoader(data, batch_size=2)
    next(loader.windows())
    state = json.loads(json.dumps(loader.state_dict()))
    again = WindowLoader(data, batch_size=2)
    again.load_state_dict(state)
    with caplog.at_level(logging.WARNING, logger="headway"):
        next(again.windows())
    assert ("shuffle buffer of 4 samples" in caplog.text) is buffered


def test_ranks_share_a_stream_in_order():
    loaders = [WindowLoader(Plain(19), batch_size=2, rank=r, world_size=3) for r in range(3)]
    steps = list(zip(*(loader.windows() for loader in loaders), strict=True))
    got = [n for step in steps for window in seen(step) for batch in window for n in batch]
    assert got == list(range(19))
    assert {loader.position for loader in loaders} == {19}


@pytest.mark.parametrize("epoch_batches", [None, 1, 3])
def test_after_a_resume_at_the_end_of_a_pass_the_next_one_has_its_own_order(epoch_batches):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"n": list(range(11))})

    def make():  # the order of its shards is another one in each epoch
        data = table.to_iterable_dataset(num_shards=3)
        return WindowLoader(data, batch_size=4, accumulation=2, epoch_batches=epoch_batches)

    def read(loader, note=lambda num_seen: None):
        seen = []
        while loader.epoch < 5:
            for window in loader.windows():
                seen.append([batch["n"].tolist() for batch in window.micro_batches])
                note(len(seen))
            loader.start_epoch(loader.epoch + 1)
            note(len(seen))
        return seen

    loader, states = make(), []
    whole = read(loader, lambda num: states.append((num, json.dumps(loader.state_dict()))))
    assert len({str(window) for window in whole}) > 3
    for num_seen, state in states:
        again = make()
        again.load_state_dict(json.loads(state))
        assert read(again) == whole[num_seen:], state


def test_unsized_lengths_and_assumed_epochs():
    loader = WindowLoader(Plain(), batch_size=3)
    assert loader.num_windows is None
    with pytest.raises(TypeError, match="epoch_batches"):
        len(loader)
    # Three batches make an epoch; the stream goes on until it ends, then starts again.
    got = []
    loader = WindowLoader(Plain(18), batch_size=3, accumulation=2, epoch_batches=3)
    assert (len(loader), loader.num_windows) == (3, 2)
    for epoch in range(3):
        loader.start_epoch(epoch)
        got.append(seen(loader.windows()))
        fresh = WindowLoader(Plain(18), batch_size=3, accumulation=2, epoch_batches=3)
        fresh.load_state_dict(loader.state_dict())
        loader = fresh
    assert got[0] == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8]]]
    assert got[1] == [[[9, 10, 11], [12, 13, 14]], [[15, 16, 17]]]
    assert got[2] == got[0]


def test_drop_last_in_a_stream():
    loader = WindowLoader(Plain(8), batch_size=3, drop_last=True)
    assert seen(loader.windows()) == [[[0, 1, 2]], [[3, 4, 5]]]


def test_a_generator_can_be_read_once_only():
    loader = WindowLoader((n for n in range(4)), batch_size=2)
    assert len(list(loader.windows())) == 2
    assert list(loader.windows()) == []
    loader.start_epoch(1)
    with pytest.raises(ConfigError, match="only once"):
        list(loader.windows())
    with pytest.raises(ConfigError, match="empty"):
        list(WindowLoader(Plain(0), batch_size=2).windows())


def make_loader(**options):
    return DataLoader(list(range(20)), batch_size=3, shuffle=True, **options)


def test_ready_made_loader_is_used_as_it_is():
    loader = WindowLoader(DataLoader(list(range(8)), batch_size=3), batch_size=99, accumulation=2)
    assert seen(loader.windows()) == [[[0, 1, 2], [3, 4, 5]], [[6, 7]]]
    assert (len(loader), loader.num_windows, loader.position) == (3, 2, 8)
    assert [b.tolist() for b in loader.batches()] == [[0, 1, 2], [3, 4, 5], [6, 7]]


@pytest.mark.parametrize(
    "make",
    [
        make_loader,
        lambda: make_loader(generator=torch.Generator().manual_seed(4)),
        lambda: make_loader(num_workers=1),
    ],
)
def test_shuffled_ready_made_loader_resumes(make):
    options = {"batch_size": 1, "accumulation": 2}
    expected = two_epochs(make, None, **options)
    assert sorted(n for w in expected[:4] for b in w for n in b) == list(range(20))
    assert expected[:4] != expected[4:]
    for stop in (2, 4, 6):
        torch.manual_seed(stop)
        assert two_epochs(make, stop, **options) == expected


class StatefulBatches:
    batch_size = 2

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < 10:
            self.place += 2
            yield torch.arange(self.place - 2, self.place)
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def test_any_loader_with_state():
    expected = two_epochs(StatefulBatches, None, batch_size=1, accumulation=2)
    assert expected[0] == [[0, 1], [2, 3]]
    for stop in (1, 3, 4):
        assert two_epochs(StatefulBatches, stop, batch_size=1, accumulation=2) == expected


def test_foreign_state_survives_json():
    state = {"a": [1, (2, 3)], 4: np.arange(3), "b": b"\0", "t": torch.arange(4).view(2, 2)}
    back = decode(json.loads(json.dumps(encode(state))))
    assert back["a"] == [1, (2, 3)] and back["b"] == b"\0"
    assert back[4].tolist() == [0, 1, 2]
    assert torch.equal(back["t"], state["t"])
    with pytest.raises(ConfigError, match="object"):
        encode({"x": object()})
