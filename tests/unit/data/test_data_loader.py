import json
import random
import time
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch

from headway.data.datasets import SyntheticDataset
from headway.data.fetch import pin
from headway.data.loader import WindowLoader
from headway.data.mixing import MixedDataset
from headway.errors import ConfigError
from headway.strategies.movement import move_batch


class Numbers:
    """Sample i is i; map-style, nothing random."""

    is_deterministic = True

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"input_ids": np.full(3, index)}


class Noisy(torch.utils.data.Dataset):
    """Draws from every global generator."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item(), index])


class WithRng:
    def __len__(self):
        return 20

    def __getitem__(self, index):
        raise AssertionError("get(index, rng) comes first")

    def get(self, index, rng):
        return torch.tensor([index, rng.random()])


def seen(windows):
    return [[batch["input_ids"][:, 0].tolist() for batch in w.micro_batches] for w in windows]


def flat(windows):
    return [sample for window in seen(windows) for batch in window for sample in batch]


def restored(loader, **options):
    state = json.loads(json.dumps(loader.state_dict()))
    fresh = WindowLoader(Numbers(loader.num_samples), **options)
    fresh.load_state_dict(state)
    return fresh


def test_one_epoch_every_sample_once_and_the_last_window_is_partial():
    loader = WindowLoader(Numbers(23), batch_size=4, accumulation=2, seed=1)
    windows = list(loader.windows())
    assert sorted(flat(windows)) == list(range(23))
    assert [[len(batch) for batch in window] for window in seen(windows)] == [
        [4, 4],
        [4, 4],
        [4, 3],
    ]
    assert (len(loader), loader.num_windows, loader.position) == (6, 3, 23)
    for window in windows:
        assert window.sample_ids.tolist() == flat([window])
        assert window.num_samples == len(window.sample_ids)
        assert window.num_target_tokens == 2 * window.num_samples
        assert window.num_tokens == 3 * window.num_samples
    assert list(loader.windows()) == []
    loader.start_epoch(1)
    again = flat(loader.windows())
    assert sorted(again) == list(range(23)) and again != flat(windows)


def test_drop_last_drops_only_the_incomplete_batch():
    loader = WindowLoader(Numbers(23), batch_size=4, accumulation=2, drop_last=True)
    assert [[len(b) for b in w] for w in seen(loader.windows())] == [[4, 4], [4, 4], [4]]
    assert (len(loader), loader.num_windows) == (5, 3)
    assert list(loader.windows()) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stop_anywhere_and_resume(num_workers):
    options = {"batch_size": 3, "accumulation": 2, "seed": 5, "num_workers": num_workers}
    whole = WindowLoader(Numbers(20), **options)
    expected = []
    for epoch in range(2):
        whole.start_epoch(epoch)
        expected += seen(whole.windows())
    stops = range(len(expected) + 1) if num_workers == 0 else (0, 2, 4, 6)
    for stop in stops:
        first = WindowLoader(Numbers(20), **options)
        got = []
        first.start_epoch(0)
        while len(got) < stop:
            for window in first.windows():
                got += seen([window])
                if len(got) == stop:
                    break
            else:
                first.start_epoch(first.epoch + 1)
        second = restored(first, **(options | {"seed": 99}))
        while True:
            got += seen(second.windows())
            if second.epoch == 1:
                break
            second.start_epoch(second.epoch + 1)
        assert got == expected


def test_resume_with_another_batch_size_and_worker_count():
    reference = flat(WindowLoader(Numbers(50), batch_size=50, seed=2).windows())
    loader = WindowLoader(Numbers(50), batch_size=4, accumulation=2, seed=2)
    windows = loader.windows()
    got = flat([next(windows), next(windows)])
    loader = restored(loader, batch_size=7, num_workers=2)
    windows = loader.windows()
    got += flat([next(windows)])
    assert loader.position == 23
    loader = restored(loader, batch_size=3)
    assert got + flat(loader.windows()) == reference


def test_global_order_is_independent_of_the_world_size():
    reference = flat(WindowLoader(Numbers(41), batch_size=8, seed=3).windows())
    for world_size, batch_size, accumulation in ((2, 4, 1), (4, 2, 1), (2, 2, 2), (8, 1, 1)):
        loaders = [
            WindowLoader(
                Numbers(41),
                batch_size=batch_size,
                accumulation=accumulation,
                seed=3,
                rank=rank,
                world_size=world_size,
            )
            for rank in range(world_size)
        ]
        steps = list(zip(*(loader.windows() for loader in loaders), strict=True))
        assert [s for step in steps for s in flat(step)] == reference
        assert {loader.position for loader in loaders} == {41}


def test_resume_under_another_world_size():
    reference = flat(WindowLoader(Numbers(30), batch_size=30, seed=3).windows())
    loaders = [
        WindowLoader(Numbers(30), batch_size=3, seed=3, rank=r, world_size=2) for r in range(2)
    ]
    iterators = [loader.windows() for loader in loaders]
    got = []
    for _ in range(2):
        got += flat([next(iterator) for iterator in iterators])
    assert loaders[0].state_dict() == loaders[1].state_dict()
    assert got + flat(restored(loaders[0], batch_size=5).windows()) == reference


@pytest.mark.parametrize("num_samples", range(1, 40))
def test_ragged_windows_keep_the_ranks_in_step(num_samples):
    for world_size, batch_size, accumulation in ((2, 3, 2), (3, 2, 3), (4, 4, 1)):
        loaders = [
            WindowLoader(
                Numbers(num_samples),
                batch_size=batch_size,
                accumulation=accumulation,
                rank=rank,
                world_size=world_size,
                shuffle=False,
            )
            for rank in range(world_size)
        ]
        steps = list(zip(*(loader.windows() for loader in loaders), strict=True))
        assert [s for step in steps for s in flat(step)] == list(range(num_samples))
        for rank, loader in enumerate(loaders):
            counts = [len(step[rank].micro_batches) for step in steps]
            assert sum(counts) == len(loader)
            assert len(counts) == loader.num_windows
        for step in steps:
            sizes = [len(b) for window in seen(step) for b in window]
            assert all(1 <= size <= batch_size for size in sizes)
            shares = [window.num_samples for window in step]
            assert max(shares) - min(shares) <= 1
            micro = {len(window.micro_batches) for window in step}
            if min(shares) >= -(-max(shares) // batch_size):
                assert len(micro) == 1


def test_randomness_in_a_sample_does_not_depend_on_workers_or_batch_size():
    def rows(**options):
        loader = WindowLoader(Noisy(), seed=7, **options)
        loader.start_epoch(1)
        return torch.cat([b for w in loader.windows() for b in w.micro_batches])

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = rows(batch_size=4)
    untouched = (random.random(), np.random.rand(), torch.rand(()).item())
    for options in ({"batch_size": 4, "num_workers": 2}, {"batch_size": 7, "num_workers": 1}):
        assert torch.equal(rows(**options), expected)
    assert len(expected[:, 0].unique()) == 20
    # The training's own generators did not move.
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    assert untouched == (random.random(), np.random.rand(), torch.rand(()).item())


def test_random_collator_does_not_depend_on_workers():
    def rows(num_workers):
        loader = WindowLoader(
            list(range(12)), batch_size=4, collate_fn=noisy_collate, num_workers=num_workers
        )
        return torch.cat([b for w in loader.windows() for b in w.micro_batches])

    assert torch.equal(rows(0), rows(2))


def noisy_collate(items):
    return torch.tensor(items) + torch.rand(len(items))


def test_get_with_rng_and_epochs():
    def rows(epoch, num_workers):
        loader = WindowLoader(WithRng(), batch_size=4, num_workers=num_workers, shuffle=False)
        loader.start_epoch(epoch)
        return torch.cat([b for w in loader.windows() for b in w.micro_batches])

    assert torch.equal(rows(0, 0), rows(0, 2))
    assert not torch.equal(rows(0, 0), rows(1, 0))


def test_set_epoch_reaches_persistent_workers():
    def run(num_workers):
        mixture = MixedDataset([list(range(50)), list(range(100, 150))], [1, 1], num_samples=10)
        loader = WindowLoader(
            mixture, batch_size=5, num_workers=num_workers, persistent_workers=True
        )
        got = []
        for epoch in range(3):
            loader.start_epoch(epoch)
            got += [b.tolist() for w in loader.windows() for b in w.micro_batches]
        loader.close()
        return got

    assert run(2) == run(0)
    assert len({n for batch in run(0) for n in batch}) == 30


def test_persistent_workers_go_back_after_an_early_stop():
    options = {"batch_size": 2, "num_workers": 2, "persistent_workers": True, "seed": 1}
    loader = WindowLoader(Numbers(16), **options)
    expected = flat(WindowLoader(Numbers(16), batch_size=2, seed=1).windows())
    windows = loader.windows()
    next(windows)
    state = loader.state_dict()
    next(windows), next(windows)
    loader.load_state_dict(state)
    assert flat(loader.windows()) == expected[2:]
    loader.close()


def test_start_at_a_billion_is_instant():
    loader = WindowLoader(SyntheticDataset(10**12, 16, 100), batch_size=8, seed=1)
    state = loader.state_dict() | {"position": 10**9}
    began = time.perf_counter()
    loader.load_state_dict(state)
    window = next(loader.windows())
    assert time.perf_counter() - began < 1
    assert window.num_samples == 8 and loader.position == 10**9 + 8


def test_batches_for_evaluation_move_nothing():
    loader = WindowLoader(Numbers(10), batch_size=4, shuffle=False)
    next(loader.windows())
    before = loader.state_dict()
    for _ in range(2):
        assert [b["input_ids"][:, 0].tolist() for b in loader.batches()] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, 9],
        ]
    assert loader.state_dict() == before


def test_worker_errors_keep_their_type():
    loader = WindowLoader([{"x": [1]}, {"x": [1, 2]}], batch_size=2, num_workers=1)
    with pytest.raises(ConfigError, match="shape of 'x'"):
        list(loader.windows())


def test_a_hugging_face_dataset():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"input_ids": [[i] * (1 + i % 3) for i in range(11)]})
    loader = WindowLoader(data, batch_size=4, seed=1)
    assert sorted(flat(loader.windows())) == list(range(11))


def test_mistakes(caplog):
    for dataset, options, message in (
        ([], {}, "empty"),
        ([1], {"batch_size": 0}, "batch_size"),
        ([1], {"accumulation": 0}, "accumulation"),
        ([1], {"num_workers": -1}, "num_workers"),
        ([1], {"rank": 2, "world_size": 2}, "rank"),
        ([1], {"drop_last": True, "batch_size": 2}, "^drop_last leaves nothing"),
        ([1], {"drop_last": True, "batch_size": 2, "option": "eval_dataset"}, "^eval_dataset: "),
        ([], {"option": "train_dataset"}, "^train_dataset: the dataset is empty"),
        ({"train": [1]}, {}, "choose one"),
        ("text", {}, "no dataset"),
        (3, {}, "no dataset"),
    ):
        with pytest.raises(ConfigError, match=message):
            WindowLoader(dataset, **({"batch_size": 1} | options))
    loader = WindowLoader([1, 2, 3], batch_size=1)
    with pytest.raises(ConfigError, match="kind 'iterable'"):
        loader.load_state_dict(loader.state_dict() | {"kind": "iterable"})
    with pytest.raises(ConfigError, match="beyond the dataset"):
        loader.load_state_dict(loader.state_dict() | {"num_samples": 9, "position": 8})
    with caplog.at_level("WARNING", "headway"):
        loader.load_state_dict(loader.state_dict() | {"num_samples": 9})
    assert "3 samples, it had 9" in caplog.text


Pair = namedtuple("Pair", ["inputs", "labels"])


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(2), "name": "a"},
        UserDict(x=torch.ones(2), name="a"),  # BatchEncoding is one
        [torch.ones(2), {"x": torch.ones(2)}],
        Pair(torch.ones(2), torch.ones(2)),
    ],
    ids=["dict", "mapping", "list", "named tuple"],
)
def test_a_batch_of_any_form_is_pinned_and_moved(batch, monkeypatch):
    def tensors_of(value):
        if isinstance(value, torch.Tensor):
            return [value]
        inner = value.values() if isinstance(value, (dict, UserDict)) else value
        return [] if isinstance(value, str) else [t for one in inner for t in tensors_of(one)]

    moved = move_batch(batch, torch.device("meta"))
    assert all(t.is_meta for t in tensors_of(moved)) and len(tensors_of(moved)) > 0
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1)
    pinned = pin(batch)
    assert type(pinned) is type(batch)
    assert all((t == 2).all() for t in tensors_of(pinned))
    assert all((t == 1).all() for t in tensors_of(batch))
    assert len(tensors_of(pinned)) == len(tensors_of(moved)) == len(tensors_of(batch))


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        return map(Numbers(6).__getitem__, range(6))


@pytest.mark.parametrize(
    "dataset",
    [Numbers(6), Streamed(), torch.utils.data.DataLoader(Numbers(6), batch_size=2)],
    ids=["samples", "stream", "batches"],
)
@pytest.mark.parametrize("asked", [True, False])
def test_batches_are_pinned_for_a_gpu(dataset, asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 100)
    loader = WindowLoader(dataset, batch_size=2, shuffle=False, pin_memory=asked)
    assert flat(loader.windows()) == [number + 100 * asked for number in range(6)]


def test_moving_a_batch_does_not_hold_the_host_up(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **how: asked.append(how) or self)
    move_batch({"x": torch.ones(2), "y": [torch.ones(2)]}, torch.device("cuda"))
    assert asked == [{"non_blocking": True}] * 2


def test_what_a_collator_put_on_a_device_is_not_pinned(monkeypatch):
    def lock(tensor):
        if tensor.device.type != "cpu":
            raise RuntimeError("only dense CPU tensors can be pinned")
        return tensor + 1

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    batch = UserDict(there=torch.ones(2, device="meta"), here=torch.ones(2))
    pinned = pin(batch)
    assert pinned["there"] is batch["there"] and pinned["here"].tolist() == [2, 2]


def test_a_mapping_that_takes_no_changes_is_pinned_as_a_dict(monkeypatch):
    class Locked(UserDict):
        def update(self, *given, **named):
            raise RuntimeError("it is locked")

    batch = Locked()
    batch.data["x"] = torch.ones(2)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1)
    assert pin(batch)["x"].tolist() == [2, 2] and batch["x"].tolist() == [1, 1]
