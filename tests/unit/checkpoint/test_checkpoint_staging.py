"""The copy a save works on: independent of the live state, in memory that is used again."""

import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from checkpoint_faults import Counter, make_contents, train
from torch import nn

from headway.checkpoint import (
    CheckpointContents,
    CheckpointError,
    CheckpointManager,
    SharingPattern,
    StateComponent,
    read_manifest,
)
from headway.checkpoint.ranks import SoloRanks
from headway.checkpoint.staging import HostBuffers, Stager
from headway.checkpoint.storage import Storage
from headway.checkpoint.tensors import num_bytes
from headway.errors import ConfigError


def large_contents(width=256):
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    return CheckpointContents(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def step(contents):
    for parameter in contents.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    contents.optimizer.step()


def state_bytes(contents):
    moments = [t for state in contents.optimizer.state.values() for t in state.values()]
    return sum(num_bytes(t) for t in [*contents.model.state_dict().values(), *moments])


def test_host_memory_is_at_most_5_percent_above_the_state_and_is_reused():
    contents = large_contents()
    step(contents)
    stager = Stager(SoloRanks())
    first = stager.stage(contents)
    assert state_bytes(contents) <= stager.host_bytes <= 1.05 * state_bytes(contents)
    places = [values[name].data_ptr() for values, name in first.tensor_slots()]
    low, high = min(places), max(places)
    assert high - low < stager.host_bytes, "every copy lies in the one buffer"
    second = stager.stage(contents)
    assert [values[name].data_ptr() for values, name in second.tensor_slots()] == places


def test_memory_reserved_before_the_first_step_is_what_the_first_save_needs():
    contents = large_contents()
    stager = Stager(SoloRanks())
    stager.reserve(contents)
    reserved = stager.host_bytes
    step(contents)
    staged = stager.stage(contents)
    assert stager.host_bytes == reserved
    assert reserved <= 1.05 * state_bytes(contents)
    model = staged.components[0].shards.tensors
    assert torch.equal(model["0.weight"], contents.model[0].weight)


def test_buffers_shrink_when_the_state_does():
    buffers = HostBuffers()
    buffers.take([torch.zeros(1000)])
    assert buffers.capacity_bytes == 4000
    (small,) = buffers.take([torch.zeros(10, dtype=torch.bfloat16)])
    assert buffers.capacity_bytes == 32 and small.dtype == torch.bfloat16


class Pages:
    """Stands for the memory that a thread brings in; holds it up until it may go on."""

    def __init__(self, monkeypatch, *, chunk_bytes=1000):
        self.calls = []
        self.entered, self.go_on = threading.Event(), threading.Event()
        monkeypatch.setattr("headway.checkpoint.staging._CHUNK_BYTES", chunk_bytes)
        monkeypatch.setattr("headway.checkpoint.staging.ctypes", SimpleNamespace(memset=self.fill))

    def fill(self, address, value, size):
        self.calls.append((address, size, threading.current_thread().name))
        self.entered.set()
        assert self.go_on.wait(60)


def test_a_copy_waits_for_the_memory_that_a_thread_brings_in(monkeypatch):
    pages, buffers, taken = Pages(monkeypatch), HostBuffers(), []
    buffers.reserve(2500)
    start = buffers._slab.data_ptr()
    buffers.make_ready(wait=False)
    buffers.make_ready(wait=False)  # asks for nothing more
    assert pages.entered.wait(60)
    thread = threading.Thread(target=lambda: taken.extend(buffers.take([torch.zeros(600)])))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and not taken
    pages.go_on.set()
    thread.join(60)
    assert taken[0].data_ptr() == start
    assert [call[:2] for call in pages.calls] == [
        (start, 1000), (start + 1000, 1000), (start + 2000, 500)
    ]  # fmt: skip
    assert {name for _, _, name in pages.calls} == {"headway-save-memory"}


def test_memory_that_is_not_needed_any_more_is_not_brought_in(monkeypatch):
    pages, buffers = Pages(monkeypatch), HostBuffers()
    buffers.reserve(2500)
    buffers.make_ready(wait=False)
    assert pages.entered.wait(60)
    monkeypatch.setattr(buffers._given_up, "set", lambda real=buffers._given_up.set: (
        real(), pages.go_on.set()
    ))  # fmt: skip
    thread = buffers._thread
    buffers.give_up()
    assert not thread.is_alive() and len(pages.calls) == 1
    (copy,) = buffers.take([torch.ones(600)])  # all the same
    assert copy.shape == (600,) and len(pages.calls) == 1


def test_what_goes_wrong_in_the_thread_is_told_by_the_next_copy_and_only_by_it(monkeypatch):
    def fail(*_):
        raise OSError("no memory of that kind")

    monkeypatch.setattr("headway.checkpoint.staging.ctypes", SimpleNamespace(memset=fail))
    stager, contents = Stager(SoloRanks()), large_contents()
    stager.reserve(contents, ready=False)
    stager.make_ready()
    step(contents)
    with pytest.raises(OSError, match="of that kind"):
        stager.stage(contents)
    staged = stager.stage(contents)
    assert torch.equal(staged.components[0].shards.tensors["0.weight"], contents.model[0].weight)


def test_a_thread_locks_pages_on_the_device_of_the_run_once_they_are_there(monkeypatch):
    pages, events, current = Pages(monkeypatch), [], threading.local()
    pages.go_on.set()

    @contextmanager
    def device(index):
        current.device = index
        yield

    def register(pointer, size, flags):
        name = threading.current_thread().name
        events.append((size, current.device, name, len(pages.calls)))
        return 0

    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda _: events.append("released")
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", device)
    buffers = HostBuffers(pinned=True)
    buffers.reserve(1504)
    buffers.make_ready(wait=False)
    buffers.take([torch.zeros(375)])
    assert events == [(1504, 3, "headway-page-lock", 2)]
    buffers.take([torch.zeros(1000)])  # other memory, whose pages are locked at once
    assert events[1:] == ["released", (4000, 3, "headway-page-lock", 2)]


def test_every_kind_of_tensor_is_copied_as_it_is():
    kinds = {
        "transposed": torch.randn(4, 6).t(),
        "strided": torch.randn(10)[::3],
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "bool": torch.tensor([True, False]),
        "fp8": torch.randn(5).to(torch.float8_e4m3fn),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "leaf": torch.ones(2, requires_grad=True),
    }

    class Holder:
        def state_dict(self):
            return kinds

        def load_state_dict(self, state):
            pass

    component = StateComponent("kinds", Holder(), SharingPattern.GLOBAL)
    staged = Stager(SoloRanks()).stage(CheckpointContents(nn.Linear(1, 1), None, [component]))
    copies = staged.components[1].trees[0].tensors
    for name, tensor in kinds.items():
        copy = copies[name]
        assert copy.is_contiguous() and not copy.requires_grad and copy.dtype == tensor.dtype
        same = copy.to(torch.float32) if name == "fp8" else copy
        assert torch.equal(same, tensor.detach().to(same.dtype)), name


class MutatingStorage(Storage):
    """Changes the live state at every file operation of a save."""

    def __init__(self, root, mutate):
        super().__init__(root)
        self.mutate = mutate

    def create(self, path):
        self.mutate()
        return super().create(path)


def test_changes_during_the_write_are_not_in_the_checkpoint(tmp_path):
    contents = make_contents(value=3)
    contents.trainer_state["log_history"] = [{"loss": 1.0}]
    train(contents, 2)
    expected = {k: v.clone() for k, v in contents.model.state_dict().items()}
    moments = contents.optimizer.state[contents.model.layer.weight]["exp_avg"].clone()
    counter = contents.components[1].stateful

    def mutate():
        with torch.no_grad():
            for tensor in contents.model.state_dict().values():
                tensor.add_(1)
            for state in contents.optimizer.state.values():
                for tensor in state.values():
                    tensor.mul_(-3)
        counter.value += 1
        counter.tensor.add_(7)
        contents.trainer_state["log_history"].append({"loss": 2.0})

    manager = CheckpointManager(tmp_path, storage=MutatingStorage(tmp_path, mutate))
    path = manager.write(manager.stage(contents, 2))
    again = make_contents(seed=8)
    loaded = CheckpointManager(tmp_path).load(again, path)
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert torch.equal(again.optimizer.state[again.model.layer.weight]["exp_avg"], moments)
    assert again.components[1].stateful.value == 3
    assert again.components[1].stateful.tensor.tolist() == [3.0] * 3
    assert loaded.trainer_state["log_history"] == [{"loss": 1.0}]


def test_tokenizer_is_asked_once_and_its_files_are_in_every_checkpoint(tmp_path):
    class Tokenizer:
        calls = 0

        def save_pretrained(self, folder):
            self.calls += 1
            with open(f"{folder}/tokenizer.json", "w") as file:
                json.dump({"calls": self.calls}, file)

    tokenizer = Tokenizer()
    manager = CheckpointManager(tmp_path)
    for number in (1, 2):
        # A bound method is a new object at every access.
        contents = make_contents(save_tokenizer=tokenizer.save_pretrained)
        path = manager.save(contents, number)
        assert "tokenizer.json" in read_manifest(path).files
    assert tokenizer.calls == 1
    manager.save(make_contents(save_tokenizer=Tokenizer().save_pretrained), 3)
    assert tokenizer.calls == 1


def test_a_sharded_component_takes_only_tensors_by_name(tmp_path):
    component = StateComponent("table", Counter(), SharingPattern.SHARDED)
    contents = CheckpointContents(nn.Linear(1, 1), None, [component])
    with pytest.raises(ConfigError, match="'table' is SHARDED: value is a int"):
        CheckpointManager(tmp_path).save(contents, 1)


def test_what_a_forward_may_write_to_is_not_copied_beside_it(monkeypatch):
    """On a GPU. Such as an encoder that follows another one, which no optimizer has."""
    model = nn.ModuleDict({"own": nn.Linear(2, 2), "follows": nn.BatchNorm1d(2)})
    model["follows"].requires_grad_(False)
    contents = CheckpointContents(model, torch.optim.SGD(model["own"].parameters(), lr=0.1))
    stager, beside = Stager(SoloRanks()), set()
    monkeypatch.setattr(stager, "_copy", lambda staged, late: beside.update(late))
    stager.stage(contents)
    assert beside == {id(parameter) for parameter in model["own"].parameters()}


def test_memory_that_cannot_be_locked_is_told_and_blamed_on_nobody_else(monkeypatch, caplog):
    """CUDA remembers the failure for the thread that met it."""
    met_by = []

    class Runtime:
        def cudaHostRegister(self, *given):
            met_by.append(threading.current_thread())
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    devices = []

    @contextmanager
    def on(device):
        devices.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", on)
    buffers = HostBuffers(pinned=True)
    buffers.take([torch.ones(4)])
    assert "could not page-lock" in caplog.text
    assert len(met_by) == 1 and met_by[0] is not threading.current_thread()
    assert devices == [3]


def test_what_no_save_could_store_is_refused_before_the_first_step():
    model = nn.Linear(2, 2)
    model.register_buffer("angles", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"'angles' cannot be stored: .*complex128"):
        Stager(SoloRanks()).reserve(CheckpointContents(model))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(3))])
    with pytest.raises(ConfigError, match="not a parameter of the model"):
        Stager(SoloRanks()).reserve(CheckpointContents(model, optimizer))
