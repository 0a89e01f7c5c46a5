"""Stored values into tensors that are there already, by several threads.

Owns: reading stretches of files straight into a tensor's memory, by way of page-locked buffers
where it is on a CUDA device. Does not own: where values lie (header.py), who wants them.
A file is read rather than mapped: a page that cannot be read is then an error, not a signal.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headway.checkpoint.digest import read_at
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.header import StoredTensor
from headway.checkpoint.jobs import num_readers, share_work, worth_threads

# What one thread reads at once: enough to be worth the call, little enough to share evenly.
_STRETCH_BYTES = 8 << 20
_PLAIN_TYPES = (Tensor, nn.Parameter)


class Destination(NamedTuple):
    """A tensor to be filled with a stored one, or with the part of it that begins at `offsets`."""

    stored: StoredTensor
    tensor: Tensor
    offsets: tuple[int, ...] | None = None


class Part(NamedTuple):
    """Bytes of a tensor, by their place in it, and where they are stored."""

    tensor: Tensor
    begin: int
    num_bytes: int
    path: Path
    start: int

    @property
    def end(self) -> int:
        """Where they end in the file."""
        return self.start + self.num_bytes


@torch.no_grad()
def fill(destinations: Iterable[Destination], num_threads: int | None = None) -> None:
    """Fill tensors with stored values, converted where the dtype is another.

    Every destination must have the shape of what it gets, and lie within what is stored.
    """
    on_host, others = [], []
    on_device: dict[torch.device, list[Part]] = {}
    for destination in destinations:
        part = as_part(destination)
        if part is None:
            others.append(destination)
        elif part.tensor.is_cuda:
            on_device.setdefault(part.tensor.device, []).append(part)
        else:
            on_host.append(part)
    num_threads = num_readers() if num_threads is None else num_threads
    _read_stretches(on_host, num_threads, lambda: _read_into_place)
    for device, parts in on_device.items():
        _read_to_device(device, parts, num_threads)
    for parts in (on_host, *on_device.values()):
        tell_changed(parts)
    for stored, tensor, offsets in others:
        tensor.copy_(read(stored, offsets, tuple(tensor.shape), num_threads))


def tell_changed(parts: Iterable[Part]) -> None:
    """As any change in place: a backward pass that needs the old values is to notice."""
    torch.autograd.graph.increment_version([part.tensor for part in parts])


def as_part(destination: Destination) -> Part | None:
    """What is wanted as bytes that lie as they are stored; None if they have to be converted."""
    start, tensor = _find_start(destination), destination.tensor
    if start is None or not _takes_bytes(tensor, destination.stored.dtype):
        return None
    num_bytes = tensor.numel() * tensor.element_size()
    return Part(tensor, 0, num_bytes, destination.stored.path, start)


def read(
    stored: StoredTensor,
    offsets: tuple[int, ...] | None = None,
    shape: tuple[int, ...] | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """A stored tensor, or the part of that shape that begins at `offsets`, in new host memory."""
    shape = stored.shape if shape is None else shape
    tensor = torch.empty(shape, dtype=stored.dtype)
    wanted = Destination(stored, tensor, offsets)
    if _find_start(wanted) is not None:
        fill([wanted], num_threads)
        return tensor
    assert offsets is not None
    # Not one stretch: the same part of every row, some rows at a time.
    row_bytes = stored.num_bytes // stored.shape[0]
    num_rows = max(1, _STRETCH_BYTES // row_bytes)
    if row_bytes > _STRETCH_BYTES:
        for row in range(shape[0]):
            inner = stored._replace(
                shape=stored.shape[1:],
                start=stored.start + (offsets[0] + row) * row_bytes,
                num_bytes=row_bytes,
            )
            tensor[row] = read(inner, offsets[1:], shape[1:], num_threads)
        return tensor
    inside = tuple(slice(o, o + s) for o, s in zip(offsets[1:], shape[1:]))
    for first in range(0, shape[0], num_rows):
        count = min(num_rows, shape[0] - first)
        corner = (offsets[0] + first, *(0 for _ in inside))
        rows = read(stored, corner, (count, *stored.shape[1:]), num_threads)
        tensor[first : first + count] = rows[(slice(None), *inside)]
    return tensor


def _find_start(destination: Destination) -> int | None:
    """Where in its file the wanted part begins; None if it is not one stretch of bytes."""
    stored, tensor, offsets = destination
    if offsets is None or not tensor.numel():
        return stored.start
    stride, start, is_whole = stored.dtype.itemsize, stored.start, True
    for offset, size, full in zip(
        reversed(offsets), reversed(tensor.shape), reversed(stored.shape)
    ):
        assert 0 <= offset <= offset + size <= full, "the part lies within the stored tensor"
        if not is_whole and size != 1:
            return None
        is_whole = is_whole and size == full
        start += offset * stride
        stride *= full
    return start


def _takes_bytes(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether stored bytes are what the tensor's memory holds."""
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.dtype == dtype
        and tensor.device.type in ("cpu", "cuda")
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )


# -- stretches --------------------------------------------------------------------------------


def _find_stretches(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """The parts, cut and joined to stretches of a file that are read in one go."""
    by_file: dict[Path, list[Part]] = {}
    for part in parts:
        by_file.setdefault(part.path, []).append(part)
    for in_file in by_file.values():
        stretch: list[Part] = []
        room, end = 0, -1
        for part in sorted(in_file, key=lambda part: part.start):
            while part.num_bytes:
                if part.start != end or not room:
                    if stretch:
                        yield stretch
                    stretch, room = [], _STRETCH_BYTES
                taken, part = _cut(part, room)
                stretch.append(taken)
                room -= taken.num_bytes
                end = taken.end
        if stretch:
            yield stretch


def _cut(part: Part, room: int) -> tuple[Part, Part]:
    """As much of a part as there is room for, and the rest."""
    size = min(part.num_bytes, room)
    rest = Part(part.tensor, part.begin + size, part.num_bytes - size, part.path, part.start + size)
    return (part._replace(num_bytes=size) if rest.num_bytes else part), rest


def _read_stretches(
    parts: Sequence[Part],
    num_threads: int,
    make_reader: Callable[[], Callable[[int, list[Part]], None]],
) -> None:
    """Have threads read all parts, each by a reader of its own, which gets a descriptor."""
    if not worth_threads(sum(part.num_bytes for part in parts)):
        num_threads = 1
    stretches = _find_stretches(parts)
    readers: dict[int, Callable[[int, list[Part]], None]] = {}
    descriptors: dict[Path, int] = {}

    def take(thread: int) -> Callable[[], None] | None:
        stretch = next(stretches, None)
        if stretch is None:
            return None
        path = stretch[0].path
        if path not in descriptors:
            descriptors[path] = _open(path)
        if thread not in readers:
            readers[thread] = make_reader()
        return functools.partial(readers[thread], descriptors[path], stretch)

    try:
        share_work(take, num_threads, "read")
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _read_into_place(descriptor: int, stretch: list[Part]) -> None:
    _read(descriptor, stretch, [memory_of(part) for part in stretch])


def _read(descriptor: int, stretch: list[Part], buffers: list[Any]) -> None:
    """Fill buffers, one after the other, with the bytes of a stretch."""
    path, start, end = stretch[0].path, stretch[0].start, stretch[-1].end
    try:
        num_read = read_at(descriptor, buffers, start, end - start)
        if start + num_read < end:
            raise OSError(f"it ends at byte {start + num_read}, before {end}")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def memory_of(part: Part) -> Any:
    """The bytes of a part as a buffer to write to; the part keeps its tensor alive meanwhile."""
    return memory_at(part.tensor.data_ptr() + part.begin, part.num_bytes)


def memory_at(address: int, num_bytes: int) -> Any:
    """Bytes of somebody else's memory as a buffer to write to."""
    # A tenth of the time that an array of the tensor takes, which counts with thousands of them.
    return (ctypes.c_char * num_bytes).from_address(address)


def bytes_of(part: Part) -> Tensor:
    """The bytes of a part as a flat tensor."""
    flat = part.tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.view(torch.uint8)[part.begin : part.begin + part.num_bytes]


# -- CUDA devices -----------------------------------------------------------------------------


class DeviceLane:
    """Page-locked buffers in turn, for one thread: one fills while others go to the device."""

    def __init__(self, device: torch.device, buffer_bytes: int, num_buffers: int = 2) -> None:
        self._stream = torch.cuda.Stream(device)
        self._buffers = [
            torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True)
            for _ in range(num_buffers)
        ]
        self._copied = [torch.cuda.Event() for _ in self._buffers]
        self._turn = 0

    def take(self) -> Any:
        """The next buffer to fill; it returns when what it held before is on the device."""
        self._turn = (self._turn + 1) % len(self._buffers)
        self._copied[self._turn].synchronize()
        return self._buffers[self._turn].numpy()

    def send(self, parts: Iterable[tuple[Tensor, int]]) -> None:
        """Copy to bytes on the device from their places in the buffer taken last."""
        buffer = self._buffers[self._turn]
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for target, position in parts:
                source = buffer[position : position + target.numel()]
                target.copy_(source, non_blocking=True)
            self._copied[self._turn].record(self._stream)

    def finish(self) -> None:
        """Return when all is on the device."""
        self._stream.synchronize()


def _read_through(lane: DeviceLane, descriptor: int, stretch: list[Part]) -> None:
    start = stretch[0].start
    _read(descriptor, stretch, [lane.take()[: stretch[-1].end - start]])
    lane.send((bytes_of(part), part.start - start) for part in stretch)


def _read_to_device(device: torch.device, parts: list[Part], num_threads: int) -> None:
    lanes: list[DeviceLane] = []

    def make_reader() -> Callable[[int, list[Part]], None]:
        lanes.append(DeviceLane(device, _STRETCH_BYTES))
        return functools.partial(_read_through, lanes[-1])

    # What the tensors were last used for may be on any stream.
    torch.cuda.synchronize(device)
    try:
        _read_stretches(parts, num_threads, make_reader)
    finally:
        for lane in lanes:
            lane.finish()
