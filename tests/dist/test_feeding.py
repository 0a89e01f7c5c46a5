"""Ranks are fed alike: the same samples whoever reads, none lost, none twice, one end for all."""

from __future__ import annotations

import multiprocessing
import random
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from headway.data.feeding import Feeder
from headway.data.loader import WindowLoader
from headway.dist.failure import PeerFailure
from headway.errors import ConfigError
from headway.testing import run_ranks

Extra = namedtuple("Extra", "weight name")


class Rows(Dataset[dict[str, Any]]):
    """Sample n has n % 3 + 2 labels, the first of which is no target."""

    def __init__(self, num_samples: int, broken_at: int | None = None) -> None:
        self.num_samples, self.broken_at = num_samples, broken_at

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == self.broken_at:
            raise OSError(f"sample {number} is unreadable\nsecond line")
        labels = torch.full((5,), -100)
        labels[: number % 3 + 2] = number
        return {"input_ids": torch.full((5,), number), "labels": labels}


class Stream(IterableDataset[dict[str, Any]]):
    def __init__(self, num_samples: int, first: int = 0, broken_at: int | None = None) -> None:
        self.rows, self.first = Rows(first + num_samples, broken_at), first

    def __iter__(self) -> Any:
        return (self.rows[number] for number in range(self.first, len(self.rows)))


class Countable(Stream):
    """A stream with a place of its own."""

    at = 0

    def __iter__(self) -> Any:
        while self.at < len(self.rows):
            self.at += 1
            yield self.rows[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class OwnShare(Stream):
    """Rank r reads `counts[r]` samples that no other rank has."""

    is_sharded = True

    def __init__(self, counts: list[int]) -> None:
        rank = dist.get_rank()
        super().__init__(counts[rank], first=sum(counts[:rank]))


def make(kind: str, num_samples: int) -> Any:
    if kind == "map":
        return Rows(num_samples)
    if kind == "stream":
        return Stream(num_samples)
    if kind == "countable":
        return Countable(num_samples)
    return DataLoader(Rows(num_samples), batch_size=2, shuffle=kind == "shuffled")


def describe(windows: Any, loader: WindowLoader) -> list[dict[str, Any]]:
    told = []
    for window in windows:
        real = len(window.micro_batches) - window.num_fillers
        told.append(
            {
                "samples": [b["input_ids"][:, 0].tolist() for b in window.micro_batches[:real]],
                "width": len(window.micro_batches),
                "fillers": window.num_fillers,
                "masked": all(
                    bool((batch["labels"] == -100).all()) for batch in window.micro_batches[real:]
                ),
                "targets": window.num_target_tokens,
                "own": window.num_samples,
                "ids": None if window.sample_ids is None else window.sample_ids.tolist(),
                "totals": (
                    window.totals.num_target_tokens,
                    window.totals.num_tokens,
                    window.totals.num_samples,
                ),
                "place": (loader.place, loader.at_end, loader.epoch_fraction),
            }
        )
    return told


def load(dataset: Any, **options: Any) -> WindowLoader:
    shape = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "seed": 5}
    return WindowLoader(dataset, **{"batch_size": 2, "accumulation": 2, **shape, **options})


def feeder(loader: WindowLoader, dispatch: bool) -> Feeder:
    return Feeder(loader, dist.group.WORLD, dispatch=dispatch)


CASES = {
    f"{kind}-{num_samples}-{options}-{dispatch}": (kind, num_samples, dict(options), dispatch)
    for kind, num_samples, options in (
        ("map", 53, ()),
        ("map", 53, (("num_workers", 1),)),
        ("map", 53, (("drop_last", True),)),
        ("map", 19, (("batch_size", 1),)),
        ("map", 1, ()),
        ("stream", 53, ()),
        ("stream", 17, (("num_workers", 1),)),
        ("stream", 1, ()),
        ("stream", 40, (("epoch_batches", 3),)),
        ("countable", 41, ()),
        ("batches", 53, ()),
        ("batches", 2, ()),
        ("shuffled", 53, ()),
    )
    for dispatch in (True, False)
}


def feed_cases() -> dict[str, Any]:
    # As under torchrun; a rank of this test would start its workers anew, which takes seconds.
    multiprocessing.set_start_method("fork", force=True)
    results = {}
    for name, (kind, num_samples, options, dispatch) in CASES.items():
        loader = load(make(kind, num_samples), **options)
        evaluated = describe(feeder(loader, dispatch).batches(), loader)
        windows = []
        for epoch in range(2):
            loader.start_epoch(epoch)
            windows.append(describe(feeder(loader, dispatch).windows(), loader))
        results[name] = evaluated, windows, (loader.place, loader.at_end)
    return results


@pytest.fixture(scope="module", params=[2, 4])
def fed(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(feed_cases, request.param, timeout_s=180)


@pytest.mark.parametrize("name", CASES)
def test_every_sample_once_and_the_ranks_in_step(fed: list[Any], name: str) -> None:
    kind, num_samples, options, _ = CASES[name]
    ranks = [result[name] for result in fed]
    batch_size = options.get("batch_size", 2)
    usable = num_samples
    if options.get("drop_last"):
        usable -= num_samples % (batch_size * len(fed))
    for passes in ([r[0] for r in ranks], *([r[1][epoch] for r in ranks] for epoch in (0, 1))):
        rounds = list(zip(*passes, strict=True))
        for round_ in rounds:
            assert len({told["width"] for told in round_}) == 1
            assert len({(told["totals"], told["place"]) for told in round_}) == 1
            assert sum(told["targets"] for told in round_) == round_[0]["totals"][0]
            assert sum(told["own"] for told in round_) == round_[0]["totals"][2]
            assert all(told["masked"] for told in round_)
        seen = [n for round_ in rounds for told in round_ for b in told["samples"] for n in b]
        if "epoch_batches" not in options:
            assert len(seen) == usable and len(set(seen)) == usable
            assert sum(round_[0]["totals"][0] for round_ in rounds) == sum(n % 3 + 1 for n in seen)
        assert all(told["width"] <= options.get("accumulation", 2) for told in passes[0])
    assert all(told["width"] == 1 for told in ranks[0][0])
    assert len({result[2] for result in ranks}) == 1
    if kind == "map":
        assert ranks[0][2] == ((usable, 0, False), True)


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("True")])
def test_who_reads_makes_no_difference(fed: list[Any], name: str) -> None:
    other = name.removesuffix("True") + "False"

    def without_end(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in w.items() if key != "place"} for w in told]

    for result in fed:
        for ours, theirs in zip(result[name][1], result[other][1], strict=True):
            assert without_end(ours) == without_end(theirs)
            assert [w["place"][0][0] for w in ours] == [w["place"][0][0] for w in theirs]
        assert without_end(result[name][0]) == without_end(result[other][0])


def test_map_order_is_that_of_one_process(fed: list[Any]) -> None:
    alone = WindowLoader(Rows(53), batch_size=4 * len(fed), seed=5)
    expected = [w.sample_ids.tolist() for w in alone.windows()]
    rounds = zip(*(result["map-53-()-True"][1][0] for result in fed), strict=True)
    assert [[n for told in round_ for n in told["ids"]] for round_ in rounds] == expected


# ---- resuming


def feed_some(kind: str, dispatch: bool, num_windows: int, state: Any, **options: Any) -> Any:
    loader = load(make(kind, 53), **options)
    loader.start_epoch(0)
    if state is not None:
        loader.load_state_dict(state)
    windows = feeder(loader, dispatch).windows()
    told = describe((next(windows) for _ in range(num_windows)), loader)
    if num_windows == 0:
        told = describe(windows, loader)
    return [[n for b in w["samples"] for n in b] for w in told], loader.state_dict()


def resume_steps(states: dict[Any, Any]) -> dict[Any, Any]:
    results = {}
    for kind in ("map", "stream", "countable", "batches"):
        for dispatch in (True, False):
            key = kind, dispatch
            options = {"batch_size": 4 // dist.get_world_size()}
            if not states:
                results[key] = feed_some(kind, dispatch, 2, None, **options)
            else:
                results[key] = feed_some(kind, not dispatch, 0, states[key], **options)
    return results


def test_a_resumed_run_goes_on_at_the_same_sample_at_another_world_size() -> None:
    first = run_ranks(resume_steps, 2, {}, timeout_s=180)
    states = {key: value[1] for key, value in first[0].items()}
    rest = run_ranks(resume_steps, 4, states, timeout_s=180)
    for key in states:
        order = {}
        for results in (first, rest):
            rounds = zip(*(result[key][0] for result in results), strict=True)
            order[id(results)] = [sorted(n for own in r for n in own) for r in rounds]
        before, after = order[id(first)], order[id(rest)]
        if key[0] != "batches":  # its batches keep their size, so windows differ
            assert [len(window) for window in before + after] == [8] * 6 + [5], key
        got = [n for window in before + after for n in window]
        if key[0] != "map":
            assert got == list(range(53)), key
        else:
            alone = WindowLoader(Rows(53), batch_size=8, seed=5)
            assert got == [n for w in alone.windows() for n in sorted(w.sample_ids.tolist())]


# ---- shares of different length, forms of batches, errors


def feed_shares() -> dict[str, Any]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    counts = [3, 9, 1, 6][:num_ranks]
    results: dict[str, Any] = {}
    for dispatch in (False, True):
        loader = load(OwnShare(counts))
        windows = describe(feeder(loader, dispatch).windows(), loader)
        again = describe(feeder(loader, dispatch).batches(), loader)
        results[f"own-{dispatch}"] = windows, again
    sampler = DistributedSampler(Rows(16), num_ranks, rank, shuffle=False)
    loader = load(DataLoader(Rows(16), batch_size=2, sampler=sampler))
    results["sampler"] = describe(feeder(loader, True).windows(), loader)
    return results


def test_shares_of_different_length_end_together() -> None:
    ranks = run_ranks(feed_shares, 4, timeout_s=180)
    for dispatch in (False, True):
        for number in (0, 1):
            passes = [result[f"own-{dispatch}"][number] for result in ranks]
            rounds = list(zip(*passes, strict=True))
            assert len(rounds) == (3 if number == 0 else 5)
            assert all(len({told["width"] for told in round_}) == 1 for round_ in rounds)
            seen = [n for told in passes for w in told for b in w["samples"] for n in b]
            assert seen == list(range(19))
            assert all(len({told["totals"] for told in round_}) == 1 for round_ in rounds)
        last = [result[f"own-{dispatch}"][0][-1] for result in ranks]
        assert {told["place"] for told in last} == {((19, 5, True), True, None)}
        assert [told["fillers"] for told in last] == [1, 0, 1, 1]
    seen = [n for told in ranks for w in told["sampler"] for b in w["samples"] for n in b]
    assert sorted(seen) == list(range(16))


def odd_batch(samples: list[dict[str, Any]]) -> dict[str, Any]:
    number = int(samples[0]["input_ids"][0])
    noise = torch.Generator().manual_seed(number)
    return {
        "input_ids": torch.full((len(samples), 2, 3, 1), number),
        "flag": torch.tensor(number % 2 == 0),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(3, generator=noise).bfloat16().expand(2, 3),
        "complex": torch.randn(2, generator=noise, dtype=torch.complex64),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "nested": [
            (torch.tensor([number], dtype=torch.uint8), "text"),
            {7: None, "x": [1.5, True]},
        ],
        "extra": Extra(torch.ones(2, dtype=torch.float64) * number, "w"),
        "array": np.arange(3, dtype=np.int16) * number,
        "scalar": np.float32(0.5),
        "infinite": float("inf"),
    }


def feed_odd() -> list[list[Any]]:
    told = []
    for dispatch in (True, False):
        loader = load(Rows(12), batch_size=1, collate_fn=odd_batch)
        told.append([w.micro_batches for w in feeder(loader, dispatch).windows()])
    return [list(map(flatten, pair)) for pair in zip(*told, strict=True)]


def flatten(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), tuple(value.shape), value.tolist()]
    if isinstance(value, (np.ndarray, np.generic)):
        return [type(value).__name__, str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {key: flatten(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *getattr(value, "_fields", ()), *map(flatten, value)]
    return value


def test_batches_of_any_form_arrive_as_they_were() -> None:
    for result in run_ranks(feed_odd, 2, timeout_s=180):
        assert len(result) == 3
        assert all(handed == read for handed, read in result)


class Opaque:
    pass


def opaque_batch(samples: list[Any]) -> dict[str, Any]:
    return {"input_ids": torch.zeros(1), "mystery": Opaque()}


def feed_broken() -> dict[str, tuple[str, str, int]]:
    """What each rank raises, and how many windows it got before."""
    rank, results = dist.get_rank(), {}
    attempts = {
        "map read for all": (lambda: load(Rows(40, broken_at=9), shuffle=False), True),
        "map": (lambda: load(Rows(40, broken_at=9), shuffle=False), False),
        "stream read for all": (lambda: load(Stream(40, broken_at=9)), True),
        "opaque": (lambda: load(Rows(8), collate_fn=opaque_batch), True),
        "empty": (lambda: load(Stream(0)), True),
        "no share": (lambda: load(OwnShare([4, 0])), False),
        "no share in the end": (lambda: load(OwnShare([4, 1]), drop_last=True), False),
        "different": (lambda: load(Rows(40 + rank)), False),
    }
    for name, (make_loader, dispatch) in attempts.items():
        count = 0
        try:
            for _ in feeder(make_loader(), dispatch).windows():
                count += 1
        except Exception as error:
            results[name] = type(error).__name__, str(error), count
    return results


def test_an_error_in_reading_reaches_every_rank() -> None:
    first, second = run_ranks(feed_broken, 2, timeout_s=180)
    line = "OSError: sample 9 is unreadable"
    for name in ("map read for all", "stream read for all"):
        assert first[name] == ("OSError", "sample 9 is unreadable\nsecond line", 1)
        expected = f"rank 0 of 2 failed: it could not read the data: {line}"
        assert second[name] == (PeerFailure.__name__, expected, 1)
    # Samples 8 to 11 are the first rank's.
    assert first["map"][0] == "OSError" and second["map"][1].endswith(line)
    assert first["opaque"] == second["opaque"]
    assert first["opaque"][0] == ConfigError.__name__
    assert "Opaque" in first["opaque"][1] and "dispatch_batches=False" in first["opaque"][1]
    assert first["empty"] == second["empty"] and "is empty" in first["empty"][1]
    for name in ("no share", "no share in the end"):
        assert first[name] == second[name]
        assert first[name][0] == ConfigError.__name__ and "rank 1" in first[name][1]
    assert first["different"] == second["different"]
    assert "40 on rank 0; 41 on rank 1" in first["different"][1]


def feed_many() -> int:
    """Windows of changing size, so that messages in flight could overtake each other."""
    random.seed(1)
    sizes = [random.randrange(1, 2000) for _ in range(150)]

    def widen(samples: list[Any]) -> dict[str, Any]:
        number = int(samples[0]["input_ids"][0])
        return {"input_ids": torch.full((1, sizes[number]), number)}

    loader = load(Rows(150), batch_size=1, accumulation=1, collate_fn=widen)
    return sum(
        bool((w.micro_batches[0]["input_ids"] == int(w.sample_ids[0])).all())
        and w.micro_batches[0]["input_ids"].shape[1] == sizes[int(w.sample_ids[0])]
        for w in feeder(loader, True).windows()
        if not w.num_fillers
    )


def test_windows_of_changing_size_arrive_in_order() -> None:
    assert sum(run_ranks(feed_many, 3, timeout_s=180)) == 150
