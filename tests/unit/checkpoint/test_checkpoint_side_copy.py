"""What an optimizer step waits for while the state is copied; the device only takes notes."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from headway.checkpoint import side_copy
from headway.checkpoint.side_copy import SideCopy, num_copied_in_place


@pytest.mark.parametrize(
    ("sizes", "share", "room", "expected"),
    [
        ([4, 4, 4, 4], 0.5, 100, 2),
        ([4, 4, 4, 4], 0.6, 100, 2),  # a tensor that is not through in time is cloned
        ([4, 4, 4, 4], 0.0, 100, 0),
        ([4, 4, 4, 4], 1.0, 100, 4),
        ([4, 4, 4, 4], 0.0, 9, 2),  # there is room for two clones
        ([4, 4, 4, 4], 0.5, 0, 4),
        ([100, 1], 0.5, 200, 0),  # the first is too large for the time
        ([], 0.5, 100, 0),
    ],
)
def test_what_is_not_through_in_time_is_cloned_where_there_is_room(sizes, share, room, expected):
    assert num_copied_in_place(sizes, share, room) == expected


class Notes(list):
    """What a device is asked for, in order, and how long its copies take."""

    def __init__(self, monkeypatch, *, free=1000, copy_ms=10.0, due_ms=5.0):
        super().__init__()
        self.copy_ms, self.due_ms, self.fails, self.reserved = copy_ms, due_ms, False, 0
        current = SimpleNamespace(wait_event=lambda event: self.append(("wait", event.name)))
        side = SimpleNamespace(wait_stream=lambda stream: self.append("side waits for main"))
        names = iter(["begun", "read", "copied", "due"] * 9)
        notes = self

        class Event:
            def __init__(self, enable_timing=False):
                self.name = next(names)

            def record(self, stream=None):
                notes.append(("record", self.name))

            def query(self):
                return True

            def synchronize(self):
                notes.append("synchronize")

            def elapsed_time(self, other):
                return notes.copy_ms if other.name == "copied" else notes.due_ms

        class OnSide:
            def __init__(self, stream):
                assert stream is side

            def __enter__(self):
                pass

            def __exit__(self, *error):
                pass

        for name, value in {
            "Event": Event,
            "Stream": lambda: side,
            "current_stream": lambda: current,
            "stream": OnSide,
            "mem_get_info": lambda: (free, 1000),
            "memory_reserved": lambda: self.reserved,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(side_copy, "_clone", self.clone)

    def clone(self, tensors, reader):
        if self.fails:
            raise torch.OutOfMemoryError
        self.extend(("clone", tensor.name) for tensor in tensors)
        return [Noted(self, f"clone of {tensor.name}") for tensor in tensors]

    def pairs(self, *names):
        return [(Noted(self, "host"), Noted(self, name)) for name in names]


def after_a_step():
    copy = SideCopy()
    copy.wait_before_update()
    return copy


class Noted:
    """A tensor of ten bytes."""

    def __init__(self, notes, name):
        self.notes, self.name = notes, name

    def numel(self):
        return 10

    def element_size(self):
        return 1

    def copy_(self, source, non_blocking):
        assert non_blocking
        self.notes.append(("copy", source.name))


def test_the_update_waits_for_live_tensors_and_not_for_clones(monkeypatch):
    notes, copy = Notes(monkeypatch), after_a_step()
    wait = copy.start(notes.pairs("a", "b", "c"), None)
    copy.wait_before_update()
    copy.wait_before_update()  # of the next step: nothing to wait for
    wait()
    assert notes == [
        ("clone", "b"),
        ("clone", "c"),
        "side waits for main",
        ("record", "begun"),
        ("copy", "a"),
        ("record", "read"),
        ("copy", "clone of b"),
        ("copy", "clone of c"),
        ("record", "copied"),
        ("record", "due"),
        ("wait", "read"),
        "synchronize",
    ]


@pytest.mark.parametrize(("due_ms", "clones"), [(5.0, 6), (0.0, 10), (12.0, 0)])
def test_the_next_save_clones_what_was_late_in_this_one(monkeypatch, due_ms, clones):
    notes, copy = Notes(monkeypatch, due_ms=due_ms), after_a_step()
    copy.start(notes.pairs(*"abcdefghij"), None)()
    copy.wait_before_update()
    notes.clear()
    copy.start(notes.pairs(*"abcdefghij"), None)()
    assert sum(note[0] == "clone" for note in notes) == clones


@pytest.mark.parametrize("fails", [False, True])
def test_without_memory_for_clones_the_update_waits_for_all_of_it(monkeypatch, fails):
    notes, copy = Notes(monkeypatch, free=1000 if fails else 55), after_a_step()
    notes.fails = fails
    copy.start(notes.pairs("a", "b"), None)
    copy.wait_before_update()
    assert [note for note in notes if note[0] in ("clone", "copy", "record", "wait")] == [
        ("record", "begun"),
        ("copy", "a"),
        ("copy", "b"),
        ("record", "read"),
        ("record", "copied"),
        ("record", "due"),
        ("wait", "read"),
    ]


def test_clones_share_one_stretch_of_memory():
    tensors = [
        torch.arange(5),
        torch.ones(3, 4).t(),
        torch.tensor(True),
        torch.randn(4, 4).to(torch.float8_e5m2),
        torch.zeros(0, 7, dtype=torch.bfloat16),
        torch.randn(2, 3, 2, dtype=torch.bfloat16),
    ]
    clones = side_copy._clone(tensors, None)
    assert len({clone.untyped_storage().data_ptr() for clone in clones}) == 1
    for tensor, clone in zip(tensors, clones, strict=True):
        assert torch.equal(tensor.float(), clone.float()) and clone.is_contiguous()
        assert clone.dtype == tensor.dtype
    assert side_copy._clone([], None) == []


def test_before_the_first_step_nothing_is_cloned(monkeypatch):
    """What a forward will take is not known, and clones would be in its way."""
    notes, copy = Notes(monkeypatch), SideCopy()
    copy.start(notes.pairs("a", "b"), None)
    assert not any(note[0] == "clone" for note in notes)


def test_the_next_copy_waits_for_one_that_nobody_waited_for(monkeypatch):
    notes, copy = Notes(monkeypatch), SideCopy()
    copy.finish()
    assert notes == []
    copy.start(notes.pairs("a"), None)
    copy.finish()
    assert notes[-1] == "synchronize"


def test_host_memory_is_kept_until_the_copy_is_through(monkeypatch):
    notes, copy = Notes(monkeypatch), SideCopy()

    class Memory:
        pass

    memory = Memory()
    seen = weakref.ref(memory)
    wait = copy.start(notes.pairs("a"), memory)
    del memory
    assert seen() is not None
    wait()
    assert seen() is None


def test_clones_take_half_of_what_is_free_and_leave_a_part(monkeypatch):
    for free, room in ((600, 300), (60, 10), (40, 0)):
        Notes(monkeypatch, free=free)
        assert SideCopy()._room() == room


def test_what_earlier_clones_took_can_be_had_again(monkeypatch):
    notes, copy = Notes(monkeypatch, free=60), after_a_step()
    notes.reserved = 500
    copy.start(notes.pairs("a", "b"), None)
    assert copy._room() == 10 + 16  # a clone, with room to the next boundary
    notes.reserved = 400
    assert copy._room() == 10
