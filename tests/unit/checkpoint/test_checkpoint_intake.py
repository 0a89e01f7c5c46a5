"""Stored values into live tensors: every kind of target, parts, threads, and files that fail."""

import errno
import hashlib
import itertools
import os

import pytest
import torch
from torch import nn

from headway.checkpoint import (
    CheckpointContents,
    CheckpointError,
    CheckpointManager,
    intake,
    jobs,
    one_pass,
)
from headway.checkpoint import digest as digest_module
from headway.checkpoint.digest import digest_files
from headway.checkpoint.intake import Destination
from headway.checkpoint.tensors import ShardReader, write_shards

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.int16,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.fixture
def in_small_pieces(monkeypatch):
    """Threads even for little, and so little at once that every tensor is cut."""
    monkeypatch.setattr(jobs, "_WORTH_THREADS_BYTES", 0)
    monkeypatch.setattr(intake, "_STRETCH_BYTES", 96)
    monkeypatch.setattr(digest_module, "_MOST_BUFFERS", 3)
    monkeypatch.setattr(digest_module, "PIECE_BYTES", 64)
    monkeypatch.setattr(one_pass, "_PIECE_BYTES", 64)


def random_tensor(dtype, *shape):
    return torch.randn(shape).mul(3).to(dtype)


def as_bytes(tensor):
    flat = tensor.detach().cpu().resolve_conj().contiguous().reshape(-1)
    return (torch.view_as_real(flat) if flat.is_complex() else flat).view(torch.uint8).tolist()


def fill(reader, targets, offsets=None):
    stored = reader.locate(targets)
    reader.fill(
        Destination(stored[name], target, (offsets or {}).get(name))
        for name, target in targets.items()
    )


@pytest.mark.parametrize("num_threads", [1, 4])
def test_every_dtype_and_size_arrives(tmp_path, in_small_pieces, num_threads):
    stored = {
        f"{number}.{dtype}": random_tensor(dtype, *shape)
        for dtype in DTYPES
        for number, shape in enumerate([(), (1,), (0, 4), (7, 5), (40, 11)])
    }
    write_shards(tmp_path, "m", stored, max_shard_bytes=2000)
    reader = ShardReader(tmp_path, "m", num_threads=num_threads)
    live = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
    memory = {name: tensor.data_ptr() for name, tensor in live.items()}
    fill(reader, live)
    for name, tensor in stored.items():
        assert as_bytes(live[name]) == as_bytes(tensor), name
        assert live[name].data_ptr() == memory[name]


class Marked(torch.Tensor):
    """A subclass without any behaviour of its own."""


def test_targets_that_do_not_hold_plain_bytes_are_filled_too(tmp_path, in_small_pieces):
    value = torch.randn(12, 10)
    write_shards(tmp_path, "m", {"x": value, "z": torch.randn(9, dtype=torch.complex64)})
    reader = ShardReader(tmp_path, "m")
    whole = torch.zeros(24, 10)
    targets = {
        "parameter": nn.Parameter(torch.zeros(12, 10)),
        "transposed": torch.zeros(10, 12).t(),
        "every second row": whole[::2],
        "rows of a larger one": torch.zeros(20, 10)[4:16],
        "subclass": torch.zeros(12, 10).as_subclass(Marked),
        "float64": torch.zeros(12, 10, dtype=torch.float64),
        "bfloat16": torch.zeros(12, 10, dtype=torch.bfloat16),
    }
    for what, target in targets.items():
        fill(reader, {"x": target})
        assert torch.equal(target.detach().as_subclass(torch.Tensor), value.to(target.dtype)), what
    assert not whole[1::2].any()
    conjugate = torch.zeros(9, dtype=torch.complex64).conj()
    fill(reader, {"z": conjugate})
    assert torch.equal(conjugate.resolve_conj(), dict(reader.items(["z"]))["z"])


@pytest.mark.parametrize("stretch_bytes", [16, 96, 10_000])
def test_any_part_is_read_as_a_slice_would_be(tmp_path, monkeypatch, stretch_bytes):
    monkeypatch.setattr(intake, "_STRETCH_BYTES", stretch_bytes)
    for number, shape in enumerate([(), (9,), (5, 4), (3, 4, 5), (2, 1, 3, 4)]):
        whole = torch.randn(shape)
        write_shards(tmp_path, f"m{number}", {"first": torch.ones(3), "x": whole})
        reader = ShardReader(tmp_path, f"m{number}")
        choices = [[(a, b) for a in range(size + 1) for b in range(a, size + 1)] for size in shape]
        for ranges in itertools.product(*(every[:: max(1, len(shape) - 1)] for every in choices)):
            index = tuple(slice(a, b) for a, b in ranges)
            ((_, part),) = reader.parts({"x": index})
            assert torch.equal(part, whole[index]), (shape, ranges)
            target = torch.zeros_like(whole[index])
            fill(reader, {"x": target}, {"x": tuple(a for a, _ in ranges)})
            assert torch.equal(target, whole[index]), (shape, ranges)


def test_a_part_of_rows_costs_only_their_bytes(tmp_path, monkeypatch):
    write_shards(tmp_path, "m", {"x": torch.randn(1000, 16)})
    reader = ShardReader(tmp_path, "m")
    reader.locate()
    lengths = []
    whole_call = os.preadv

    def count(descriptor, buffers, offset):
        lengths.append(whole_call(descriptor, buffers, offset))
        return lengths[-1]

    monkeypatch.setattr(os, "preadv", count)
    dict(reader.parts({"x": (slice(400, 500),)}))
    assert sum(lengths) == 100 * 16 * 4


def test_reads_that_return_little_are_continued(tmp_path, monkeypatch):
    stored = {f"t{number}": torch.randn(number, 3) for number in range(1, 12)}
    write_shards(tmp_path, "m", stored)
    whole_call = os.preadv

    def little(descriptor, buffers, offset):
        return whole_call(descriptor, [memoryview(buffers[0]).cast("B")[:7]], offset)

    monkeypatch.setattr(os, "preadv", little)
    reader = ShardReader(tmp_path, "m")
    live = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
    fill(reader, live)
    assert all(torch.equal(live[name], tensor) for name, tensor in stored.items())


def test_a_file_that_shrinks_or_fails_is_named(tmp_path, monkeypatch):
    write_shards(tmp_path, "m", {"x": torch.randn(100)})
    reader = ShardReader(tmp_path, "m")
    stored = reader.locate()["x"]
    os.truncate(stored.path, stored.start + 50)
    with pytest.raises(CheckpointError, match=r"m-00001-of-00001\.safetensors cannot be read"):
        fill(reader, {"x": torch.zeros(100)})

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=r"m-00001-of-00001.*Input/output error"):
        fill(reader, {"x": torch.zeros(100)})


def test_a_fill_counts_as_a_change_in_place(tmp_path):
    write_shards(tmp_path, "m", {"x": torch.randn(4)})
    weight = nn.Parameter(torch.ones(4))
    loss = weight.square().sum()
    fill(ShardReader(tmp_path, "m"), {"x": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- digests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_digests_of_many_files_at_once(tmp_path, in_small_pieces, num_threads):
    sizes = [0, 1, 63, 64, 65, 128, 5000, 3333, *range(10)]
    paths = [tmp_path / str(number) for number in range(len(sizes))]
    for path, size in zip(paths, sizes):
        path.write_bytes(os.urandom(size))
    expected = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    for _ in range(20):
        assert digest_files(paths, "sha256", num_threads=num_threads) == expected
    assert digest_files([], "sha256", num_threads=num_threads) == []


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_file_that_cannot_be_read_leaves_the_others(
    tmp_path, in_small_pieces, num_threads, monkeypatch
):
    paths = [tmp_path / str(number) for number in range(3)]
    for path in paths:
        path.write_bytes(os.urandom(64 * 40))
    expected = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    bad = os.stat(paths[1]).st_ino
    whole_call = os.preadv

    def fail(descriptor, buffers, offset):
        if os.fstat(descriptor).st_ino == bad and offset == 64 * 7:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole_call(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    missing = tmp_path / "missing"
    for _ in range(20):
        found = digest_files([*paths, missing], "sha256", num_threads=num_threads)
        assert [found[0], found[2]] == [expected[0], expected[2]]
        assert found[1].errno == errno.EIO and isinstance(found[3], FileNotFoundError)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_an_interrupt_reaches_the_caller(tmp_path, in_small_pieces, num_threads, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(os.urandom(64 * 50))
    whole_call = os.preadv

    def interrupt(descriptor, buffers, offset):
        if offset == 64 * 20:
            raise KeyboardInterrupt
        return whole_call(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", interrupt)
    with pytest.raises(KeyboardInterrupt):
        digest_files([path], "sha256", num_threads=num_threads)


# -- whole loads ------------------------------------------------------------------------------


def trained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    return CheckpointContents(model, optimizer)


def values(contents):
    state = [t for s in contents.optimizer.state.values() for t in s.values()]
    return [t.detach().clone() for t in [*contents.model.parameters(), *state]]


def test_one_changed_byte_in_any_file_changes_nothing_live(tmp_path, in_small_pieces):
    manager = CheckpointManager(tmp_path / "run", max_shard_bytes=300)
    path = manager.save(trained(0), 1)
    live = trained(1)
    before = values(live)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    assert len(files) > 8
    for file in files:
        data = file.read_bytes()
        for place in (0, len(data) // 2, len(data) - 1):
            changed = bytearray(data)
            changed[place] ^= 1
            file.write_bytes(changed)
            with pytest.raises(CheckpointError, match=file.name):
                manager.load(live, path, verify_first=True)
            assert all(torch.equal(a, b) for a, b in zip(before, values(live)))
        file.write_bytes(data)
    manager.load(live, path)
    assert all(torch.equal(a, b) for a, b in zip(values(live), values(trained(0))))


def test_weights_stay_as_they_are_if_the_optimizer_does_not_fit(tmp_path):
    path = CheckpointManager(tmp_path).save(trained(0), 1)
    live = trained(1)
    live.optimizer = torch.optim.SGD(live.model.parameters(), lr=0.1)
    before = values(live)
    with pytest.raises(CheckpointError, match="the run uses SGD"):
        CheckpointManager(tmp_path).load(live, path)
    assert all(torch.equal(a, b) for a, b in zip(before, values(live)))


class Tied(nn.Module):
    def __init__(self, is_tied):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        if is_tied:
            self.second.weight = self.first.weight


def test_two_values_for_a_tied_weight_are_refused_before_it_changes(tmp_path):
    path = CheckpointManager(tmp_path).save(CheckpointContents(Tied(is_tied=False)), 1)
    model = Tied(is_tied=True)
    before = model.first.weight.detach().clone()
    with pytest.raises(CheckpointError, match="are one tensor in the model"):
        CheckpointManager(tmp_path).load_model(model, path)
    assert torch.equal(model.first.weight, before)


@pytest.mark.gpu
@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_device_is_filled_through_page_locked_memory(tmp_path, num_threads):
    stored = {f"small{number}": random_tensor(torch.bfloat16, number) for number in range(700)}
    stored |= {f"large{number}": torch.randn(1500, 3000) for number in range(4)}
    stored["scalar"], stored["complex"] = torch.tensor(2.0), torch.randn(5, dtype=torch.complex64)
    write_shards(tmp_path, "m", stored, max_shard_bytes=40_000_000)
    reader = ShardReader(tmp_path, "m", num_threads=num_threads)
    live = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in stored.items()}
    live["large2"] = torch.zeros(3000, 1500, device="cuda").t()
    live["large3"] = torch.zeros(1500, 3000, device="cuda", dtype=torch.float16)
    fill(reader, live)
    for name, tensor in stored.items():
        assert as_bytes(live[name]) == as_bytes(tensor.to(live[name].dtype)), name
    part = torch.zeros(100, 3000, device="cuda")
    fill(reader, {"large0": part}, {"large0": (1400, 0)})
    assert torch.equal(part.cpu(), stored["large0"][1400:])
