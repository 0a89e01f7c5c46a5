"""Loads that verify tensor files while they read them: what is read, what damage leads to."""

import collections
import contextlib
import json
import logging
import os

import pytest
import torch
from torch import nn

from headway.checkpoint import (
    CheckpointContents,
    CheckpointManager,
    DamagedError,
    SharingPattern,
    StateComponent,
    intake,
    jobs,
    load_checkpoint,
    one_pass,
    verify,
)
from headway.checkpoint import digest as digest_module
from headway.checkpoint.digest import digest_file
from headway.checkpoint.errors import MisfitError
from headway.checkpoint.header import read_header
from headway.checkpoint.intake import Destination
from headway.checkpoint.loading import Loading
from headway.checkpoint.manifest import read_manifest
from headway.checkpoint.one_pass import WholeFile, Wishes, fill_and_verify
from headway.checkpoint.reader import LoadPlan
from headway.checkpoint.storage import FileRecord
from headway.checkpoint.tensors import write_shards
from headway.testing.contents import Counter
from headway.testing.faults import FaultyStorage
from headway.testing.threadranks import run_thread_ranks


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def in_small_pieces(monkeypatch, request):
    """So little at once that tensors are cut and several are in one piece."""
    monkeypatch.setattr(jobs, "_WORTH_THREADS_BYTES", 0)
    monkeypatch.setattr(jobs, "num_readers", lambda *_: request.param)
    monkeypatch.setattr("headway.checkpoint.loading.num_readers", lambda *_: request.param)
    monkeypatch.setattr(digest_module, "_MOST_BUFFERS", 3)
    monkeypatch.setattr(one_pass, "_PIECE_BYTES", 100)


def trained(seed, value=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    counter = StateComponent("counter", Counter(value), SharingPattern.GLOBAL)
    return CheckpointContents(model, optimizer, components=[counter])


def values(contents):
    state = [t for s in contents.optimizer.state.values() for t in s.values()]
    tensors = [t.detach().clone() for t in [*contents.model.parameters(), *state]]
    return [*tensors, torch.tensor(contents.components[0].stateful.state_dict()["value"])]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


@contextlib.contextmanager
def counted_reads(monkeypatch):
    """Bytes that positioned reads bring, by name of the file."""
    counts = collections.Counter()
    whole_call = os.preadv

    def count(descriptor, buffers, offset):
        num_read = whole_call(descriptor, buffers, offset)
        counts[os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))] += num_read
        return num_read

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", count)
        yield counts


def test_a_load_reads_every_byte_of_a_tensor_file_once(tmp_path, monkeypatch, in_small_pieces):
    manager = CheckpointManager(tmp_path, max_shard_bytes=500)
    path = manager.save(trained(0), 1)
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 3
    values_in = {s.name: s.stat().st_size - len(read_header(s).text) for s in shards}
    live = trained(1)
    for load in (
        lambda: manager.load(live, path),
        lambda: manager.load(live),
        lambda: CheckpointManager(tmp_path).load(live),
    ):
        with counted_reads(monkeypatch) as counts:
            load()
        assert {name: counts[name] for name in values_in} == values_in
        assert same(values(live), values(trained(0)))
    with counted_reads(monkeypatch) as counts:
        manager.load(live, path, verify_first=True)
    assert all(counts[s.name] == s.stat().st_size + values_in[s.name] for s in shards)


# -- damage -----------------------------------------------------------------------------------


def change(place):
    def damage(file):
        data = bytearray(file.read_bytes())
        data[place(len(read_header(file).text), len(data))] ^= 1
        file.write_bytes(data)

    return damage


def replace_in_header(old, new):
    def damage(file):
        data = file.read_bytes()
        assert old in data and len(old) == len(new)
        file.write_bytes(data.replace(old, new, 1))

    return damage


def change_padding(file):
    """Another blank: the header says the same."""
    text, data = read_header(file).text, bytearray(file.read_bytes())
    before = read_header(file).tensors
    assert text.endswith(b" ")
    data[len(text) - 1 : len(text)] = b"\t"
    file.write_bytes(data)
    assert read_header(file).tensors == before


def exchange_places(file):
    """A header that is right in itself and gives two tensors of one shape each other's bytes."""
    text, data = read_header(file).text, file.read_bytes()
    header = json.loads(text[8:])
    pairs = collections.defaultdict(list)
    for name, entry in header.items():
        if name != "__metadata__":
            pairs[str(entry["shape"])].append(name)
    first, second = next(names for names in pairs.values() if len(names) > 1)[:2]
    offsets = [header[name]["data_offsets"] for name in (first, second)]
    header[first]["data_offsets"], header[second]["data_offsets"] = offsets[1], offsets[0]
    new = json.dumps(header, separators=(",", ":")).encode()
    file.write_bytes(text[:8] + new.ljust(len(text) - 8) + data[len(text) :])
    read_header(file)


DAMAGES = {
    "length of the header": change(lambda begin, size: 0),
    "header": change(lambda begin, size: begin // 2),
    "a name in the header": replace_in_header(b".weight", b".weighs"),
    "a dtype in the header": replace_in_header(b'"F32"', b'"I32"'),
    "padding": change_padding,
    "places of two tensors": exchange_places,
    "first value": change(lambda begin, size: begin),
    "middle": change(lambda begin, size: (begin + size) // 2),
    "last byte": change(lambda begin, size: size - 1),
    "shorter": lambda file: os.truncate(file, file.stat().st_size - 1),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "missing": lambda file: file.unlink(),
}


def padded_run(folder):
    """Two checkpoints; the header of a file of each kind ends with blanks."""
    manager = CheckpointManager(folder)
    good, newest = manager.save(trained(0, 5), 1), manager.save(trained(1, 6), 2)
    return good, newest


@pytest.mark.parametrize("prefix", ["model", "optimizer"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_named_and_the_older_checkpoint_loaded(
    tmp_path, kind, prefix, caplog, in_small_pieces
):
    if (kind, prefix) == ("places of two tensors", "model"):
        pytest.skip("no two weights of one shape")
    good, newest = padded_run(tmp_path)
    file = newest / f"{prefix}-00001-of-00001.safetensors"
    if kind == "padding" and not read_header(file).text.endswith(b" "):
        pytest.skip("its header has no padding")
    DAMAGES[kind](file)
    live = trained(2, 7)
    with pytest.raises(DamagedError, match=file.name) as caught:
        CheckpointManager(tmp_path).load(live, newest)
    assert len(caught.value.problems) == 1
    assert live.components[0].stateful.state_dict()["value"] == 7

    manager = CheckpointManager(tmp_path)
    live = trained(3, 7)
    with caplog.at_level(logging.WARNING):
        loaded = manager.load(live)
    assert loaded.path == good
    assert same(values(live), values(trained(0, 5)))
    told = [record.getMessage() for record in caplog.records if file.name in record.getMessage()]
    assert len(told) == 1
    assert not [e for e in manager._entries() if e.id == newest.name]


def test_padding_is_there_to_be_damaged(tmp_path):
    _, newest = padded_run(tmp_path)
    shards = newest.glob("*.safetensors")
    assert any(read_header(file).text.endswith(b" ") for file in shards)


def test_all_damaged_files_are_named(tmp_path):
    manager = CheckpointManager(tmp_path, max_shard_bytes=500)
    path = manager.save(trained(0), 1)
    shards = sorted(path.glob("*.safetensors"))
    small = path / "state" / "counter.json"
    for damaged in (shards[::2], [small, shards[1], shards[-1]]):
        kept = {file: file.read_bytes() for file in damaged}
        for file, data in kept.items():
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(DamagedError) as caught:
            manager.load(trained(1), path)
        named = [file for file in damaged if any(str(file) in p for p in caught.value.problems)]
        assert named == damaged and len(caught.value.problems) == len(damaged)
        for file, data in kept.items():
            file.write_bytes(data)
    manager.load(trained(1), path)


def test_a_damaged_small_file_and_a_misfit_change_nothing(tmp_path):
    manager = CheckpointManager(tmp_path)
    path = manager.save(trained(0), 1)
    live = trained(1)
    before = values(live)
    file = path / "state" / "optimizer.json"
    data = file.read_bytes()
    file.write_bytes(data.replace(b"0.1", b"0.2", 1))
    with pytest.raises(DamagedError, match=r"optimizer\.json"):
        manager.load(live, path)
    assert same(values(live), before)
    file.write_bytes(data)
    live.model[1] = nn.Linear(16, 4)
    before = values(live)
    with pytest.raises(MisfitError, match="does not fit the model"):
        manager.load(live, path)
    assert same(values(live), before)


@pytest.mark.parametrize("prefix", ["model", "optimizer"])
def test_loads_that_others_may_survive_verify_first(tmp_path, prefix):
    path = CheckpointManager(tmp_path).save(trained(0), 1)
    DAMAGES["last byte"](path / f"{prefix}-00001-of-00001.safetensors")
    live = trained(1)
    before = values(live)
    loads = [
        lambda: CheckpointManager(tmp_path).load(live, path, verify_first=True),
        lambda: load_checkpoint(checkpoint_dir=path, model=live.model, optimizer=live.optimizer),
    ]
    if prefix == "model":
        loads.append(lambda: CheckpointManager(tmp_path).load_model(live.model, path))
    for load in loads:
        with pytest.raises(DamagedError, match=f"{prefix}-00001"):
            load()
        assert same(values(live), before)


def test_nothing_good_is_left(tmp_path):
    good, newest = padded_run(tmp_path)
    for path in (good, newest):
        DAMAGES["middle"](path / "model-00001-of-00001.safetensors")
    with pytest.raises(RuntimeError, match="no checkpoint that can be loaded"):
        CheckpointManager(tmp_path).load(trained(2))


def test_what_a_search_leaves_unread_the_load_verifies(tmp_path):
    good, newest = padded_run(tmp_path)
    DAMAGES["middle"](newest / "optimizer-00001-of-00001.safetensors")
    manager = CheckpointManager(tmp_path)
    assert manager.find_intact(verify_tensors=False) == (newest, [])
    assert manager.resolve(newest, verify_tensors=False) == newest
    with pytest.raises(DamagedError):
        manager.load(trained(2), newest)
    path, problems = manager.find_intact(verify_tensors=False)
    assert path == good and len(problems) == 1 and "optimizer-00001" in problems[0]
    assert CheckpointManager(tmp_path).find_intact()[0] == good
    with pytest.raises(DamagedError):
        manager.resolve(newest)


def test_files_that_nothing_is_loaded_from_are_verified_as_well(tmp_path):
    manager = CheckpointManager(tmp_path)
    path = manager.save(trained(0), 1)
    DAMAGES["middle"](path / "optimizer-00001-of-00001.safetensors")
    live = trained(1)
    before = values(live)
    with pytest.raises(DamagedError, match="optimizer-00001"):
        manager.load(live, path, components=["model"])
    assert same(values(live), before)
    manager.load(live, path, components=["model"], verify=False)
    assert torch.equal(live.model[0].weight, trained(0).model[0].weight)


def test_an_unlisted_weight_file_is_refused(tmp_path):
    manager = CheckpointManager(tmp_path)
    path = manager.save(trained(0), 1)
    (path / "other.safetensors").write_bytes(b"")
    with pytest.raises(DamagedError, match=r"other\.safetensors is not listed"):
        manager.load(trained(1), path)
    assert verify(path)


# -- several ranks ----------------------------------------------------------------------------


def on_ranks(root, num_ranks, act):
    """What every rank returns; all of them must return."""
    found = [None] * num_ranks

    def run(ranks):
        found[ranks.rank] = act(ranks)

    ends = run_thread_ranks(run, [FaultyStorage(root) for _ in range(num_ranks)])
    assert ends == [None] * num_ranks
    return found


def half_of(contents, rank):
    """A rank that holds one of two layers, as a stage of a pipeline does."""
    part = nn.Sequential()
    part.add_module(str(rank), contents.model[rank])
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.1)
    for param in part.parameters():
        optimizer.state[param] = contents.optimizer.state[param]
    return CheckpointContents(part, optimizer, components=contents.components)


@pytest.mark.parametrize("hold", ["all", "a half"])
@pytest.mark.parametrize("prefix", ["model", "optimizer"])
def test_ranks_agree_on_damage_and_fall_back_together(tmp_path, hold, prefix):
    good, newest = padded_run(tmp_path)
    DAMAGES["middle"](newest / f"{prefix}-00001-of-00001.safetensors")
    live, problems = [trained(10 + rank, 7) for rank in range(2)], [None] * 2

    def load(ranks):
        contents = live[ranks.rank]
        contents = contents if hold == "all" else half_of(contents, ranks.rank)
        manager = CheckpointManager(tmp_path, ranks=ranks)
        try:
            manager.load(contents, newest)
        except DamagedError as error:
            problems[ranks.rank] = error.problems
        return manager.load(contents).path, values(contents)

    expected = trained(0, 5)
    for rank, (path, state) in enumerate(on_ranks(tmp_path, 2, load)):
        assert path == good
        assert same(state, values(expected if hold == "all" else half_of(expected, rank)))
    assert problems[0] == problems[1] and len(problems[0]) == 1
    assert f"{prefix}-00001-of-00001.safetensors" in problems[0][0]


def test_what_no_rank_reads_whole_is_verified_first_and_once(tmp_path, monkeypatch):
    path = CheckpointManager(tmp_path).save(trained(0), 1)
    file = path / "optimizer-00001-of-00001.safetensors"

    def load(ranks):
        # A quarter of the values to each of four ranks: far less than reading all would be.
        target = torch.zeros(4, 8)
        plan = LoadPlan()
        plan.headers[file.name] = read_header(file)
        stored = plan.headers[file.name].tensors["exp_avg.0.weight"]
        plan.destinations.append(Destination(stored, target, (4 * ranks.rank, 0)))
        loading = Loading(path, read_manifest(path), ranks)
        loading.carry_out(lambda: plan, [file.name])
        return target

    with counted_reads(monkeypatch) as counts:
        parts = on_ranks(tmp_path, 4, load)
    assert torch.equal(torch.cat(parts), trained(0).optimizer.state_dict()["state"][0]["exp_avg"])
    assert counts[file.name] == file.stat().st_size + 16 * 8 * 4
    DAMAGES["last byte"](file)

    def fail(ranks):
        with pytest.raises(DamagedError, match=file.name):
            load(ranks)

    on_ranks(tmp_path, 4, fail)


# -- where bytes go ---------------------------------------------------------------------------


def whole_file(path):
    return WholeFile(
        read_header(path), FileRecord(path.stat().st_size, digest_file(path, "sha256"))
    )


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_kind_of_target_and_bytes_nobody_wants(tmp_path, in_small_pieces, num_threads):
    stored = {f"t{number:03}": torch.randn(number % 7) for number in range(300)}
    stored |= {"large": torch.randn(50, 11), "gap": torch.randn(40), "last": torch.randn(3)}
    write_shards(tmp_path, "m", stored)
    file = whole_file(tmp_path / "m-00001-of-00001.safetensors")
    located = file.header.tensors
    live = {name: torch.zeros_like(t) for name, t in stored.items() if name != "gap"}
    live["t003"] = live["t003"].to(torch.float64)
    twice, part = torch.zeros(50, 11), torch.zeros(20, 11)
    wishes = [Destination(located[name], tensor) for name, tensor in live.items()]
    wishes += [Destination(located["large"], twice), Destination(located["large"], part, (7, 0))]
    assert fill_and_verify(Wishes(wishes), [file], "sha256", num_threads) == []
    for name, tensor in live.items():
        assert torch.equal(tensor, stored[name].to(tensor.dtype)), name
    assert torch.equal(twice, stored["large"]) and torch.equal(part, stored["large"][7:27])
    wrong = file._replace(record=FileRecord(file.record.size, "0"))
    (problem,) = fill_and_verify(Wishes(wishes), [wrong], "sha256", num_threads)
    assert "m-00001-of-00001.safetensors is damaged" in problem


def test_a_failed_load_counts_as_a_change_in_place(tmp_path):
    manager = CheckpointManager(tmp_path)
    path = manager.save(trained(0), 1)
    DAMAGES["last byte"](path / "model-00001-of-00001.safetensors")
    live = trained(1)
    loss = live.model(torch.randn(2, 8)).square().sum()
    with pytest.raises(DamagedError):
        manager.load(live, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class OnDevice:
    """Stands for a tensor on a CUDA device."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, shape):
        self.values = torch.zeros(shape)


class LateLane:
    """Copies to the device only when it must, as a device that is slow."""

    def __init__(self, device, buffer_bytes):
        self.buffers = [torch.zeros(buffer_bytes, dtype=torch.uint8) for _ in range(2)]
        self.waiting, self.turn = [[], []], 0

    def _copy(self, turn):
        for target, values in self.waiting[turn]:
            target.copy_(values)
        self.waiting[turn] = []

    def take(self):
        self.turn = 1 - self.turn
        self._copy(self.turn)
        return self.buffers[self.turn].numpy()

    def send(self, parts):
        buffer = self.buffers[self.turn]
        self.waiting[self.turn] = [(t, buffer[at : at + t.numel()]) for t, at in parts]

    def finish(self):
        self._copy(0)
        self._copy(1)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_bytes_for_a_device_go_over_buffers(tmp_path, monkeypatch, num_threads):
    def as_part(wish):
        held = wish.tensor.values if isinstance(wish.tensor, OnDevice) else wish.tensor
        return intake.Part(wish.tensor, 0, held.nbytes, wish.stored.path, wish.stored.start)

    def bytes_of(part):
        return part.tensor.values.reshape(-1).view(torch.uint8)

    monkeypatch.setattr(jobs, "_WORTH_THREADS_BYTES", 0)
    monkeypatch.setattr(one_pass, "_DEVICE_PIECE_BYTES", 256)
    monkeypatch.setattr(one_pass, "DeviceLane", LateLane)
    monkeypatch.setattr(one_pass, "as_part", as_part)
    monkeypatch.setattr(one_pass, "bytes_of", bytes_of)
    monkeypatch.setattr(one_pass, "tell_changed", list)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    stored = {f"t{number:03}": torch.randn(number % 9) for number in range(200)}
    stored |= {"large": torch.randn(50, 11), "gap": torch.randn(40), "host": torch.randn(70)}
    write_shards(tmp_path, "m", stored, max_shard_bytes=3000)
    files = [whole_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    located = {name: one for file in files for name, one in file.header.tensors.items()}
    live = {name: OnDevice(t.shape) for name, t in stored.items() if name != "gap"}
    live |= {name: torch.zeros_like(stored[name]) for name in ("host", "t007")}
    wishes = [Destination(located[name], tensor) for name, tensor in live.items()]
    assert fill_and_verify(Wishes(wishes), files, "sha256", num_threads) == []
    for name, tensor in live.items():
        held = tensor.values if isinstance(tensor, OnDevice) else tensor
        assert torch.equal(held, stored[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_device_is_filled_and_the_file_digested_in_one_pass(tmp_path, num_threads):
    stored = {f"small{number}": torch.randn(number) for number in range(700)}
    stored |= {f"large{number}": torch.randn(1500, 1000) for number in range(6)}
    stored["host"], stored["scalar"] = torch.randn(300_000), torch.tensor(2.0)
    write_shards(tmp_path, "m", stored, max_shard_bytes=20_000_000)
    files = [whole_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    located = {name: one for file in files for name, one in file.header.tensors.items()}
    live = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in stored.items()}
    live["host"] = torch.zeros(300_000)
    live["large2"] = torch.zeros(1000, 1500, device="cuda").t()
    del live["large3"]
    wishes = [Destination(located[name], tensor) for name, tensor in live.items()]
    assert fill_and_verify(Wishes(wishes), files, "sha256", num_threads) == []
    for name, tensor in live.items():
        assert torch.equal(tensor.cpu(), stored[name]), name
    damaged = files[-1].header.path
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    (problem,) = fill_and_verify(Wishes(wishes), files, "sha256", num_threads)
    assert str(damaged) in problem
