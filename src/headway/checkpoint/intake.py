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

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.header import StoredTensor
from headway.checkpoint.jobs import num_readers, share_work, worth_threads

# What one thread reads at once: enough to be worth the call, little enough to share evenly.
_STRETCH_BYTES = 8 << 20
# A system call takes at most 1024 buffers on Linux.
_MOST_BUFFERS = 512
_PLAIN_TYPES = (Tensor, nn.Parameter)


class Destination(NamedTuple):
    """A tensor to be filled with a stored one, or with the part of it that begins at `offsets`."""

    stored: StoredTensor
    tensor: Tensor
    offsets: tuple[int, ...] | None = None


class _Part(NamedTuple):
    """Bytes of a tensor, by their place in it, and where they are stored."""

    tensor: Tensor
    begin: int
    num_bytes: int
    path: Path
    start: int


@torch.no_grad()
def fill(destinations: Iterable[Destination], num_threads: int | None = None) -> None:
    """Fill tensors with stored values, converted where the dtype is another.

    Every destination must have the shape of what it gets, and lie within what is stored.
    """
    on_host, others = [], []
    on_device: dict[torch.device, list[_Part]] = {}
    for destination in destinations:
        start = _find_start(destination)
        stored, tensor = destination.stored, destination.tensor
        if start is None or not _takes_bytes(tensor, stored.dtype):
            others.append(destination)
            continue
        part = _Part(tensor, 0, tensor.numel() * tensor.element_size(), stored.path, start)
        if tensor.is_cuda:
            on_device.setdefault(tensor.device, []).append(part)
        else:
            on_host.append(part)
    num_threads = num_readers() if num_threads is None else num_threads
    _read_stretches(on_host, num_threads, lambda: _read_into_place)
    for device, parts in on_device.items():
        _read_to_device(device, parts, num_threads)
    for parts in (on_host, *on_device.values()):
        # As any change in place: a backward pass that needs the old values is to notice.
        torch.autograd.graph.increment_version([part.tensor for part in parts])
    for stored, tensor, offsets in others:
        tensor.copy_(read(stored, offsets, tuple(tensor.shape), num_threads))


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


def _find_stretches(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """The parts, cut and joined to stretches of a file that are read in one go."""
    by_file: dict[Path, list[_Part]] = {}
    for part in parts:
        by_file.setdefault(part.path, []).append(part)
    for in_file in by_file.values():
        stretch: list[_Part] = []
        room, end = 0, -1
        for part in sorted(in_file, key=lambda part: part.start):
            while part.num_bytes:
                if part.start != end or not room or len(stretch) == _MOST_BUFFERS:
                    if stretch:
                        yield stretch
                    stretch, room = [], _STRETCH_BYTES
                taken, part = _cut(part, room)
                stretch.append(taken)
                room -= taken.num_bytes
                end = taken.start + taken.num_bytes
        if stretch:
            yield stretch


def _cut(part: _Part, room: int) -> tuple[_Part, _Part]:
    """As much of a part as there is room for, and the rest."""
    size = min(part.num_bytes, room)
    rest = _Part(
        part.tensor, part.begin + size, part.num_bytes - size, part.path, part.start + size
    )
    return (part._replace(num_bytes=size) if rest.num_bytes else part), rest


def _read_stretches(
    parts: Sequence[_Part],
    num_threads: int,
    make_reader: Callable[[], Callable[[int, list[_Part]], None]],
) -> None:
    """Have threads read all parts, each by a reader of its own, which gets a descriptor."""
    if not worth_threads(sum(part.num_bytes for part in parts)):
        num_threads = 1
    stretches = _find_stretches(parts)
    readers: dict[int, Callable[[int, list[_Part]], None]] = {}
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


def _read_into_place(descriptor: int, stretch: list[_Part]) -> None:
    _read(descriptor, stretch, [_memory(part) for part in stretch])


def _read(descriptor: int, stretch: list[_Part], buffers: list[Any]) -> None:
    """Fill buffers, one after the other, with the bytes of a stretch."""
    path, start = stretch[0].path, stretch[0].start
    end = stretch[-1].start + stretch[-1].num_bytes
    try:
        while start < end:
            num_read = os.preadv(descriptor, buffers, start)
            if num_read == 0:
                raise OSError(f"it ends at byte {start}, before {end}")
            start += num_read
            if start < end:
                buffers = _drop(buffers, num_read)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _drop(buffers: list[Any], num_bytes: int) -> list[Any]:
    """Buffers without those bytes at the front that are filled."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    while num_bytes >= len(views[0]):
        num_bytes -= len(views.pop(0))
    return [views[0][num_bytes:], *views[1:]]


def _memory(part: _Part) -> Any:
    """The bytes of a part as a buffer to write to; the part keeps its tensor alive meanwhile."""
    # A tenth of the time that an array of the tensor takes, which counts with thousands of them.
    kind = ctypes.c_char * part.num_bytes
    return kind.from_address(part.tensor.data_ptr() + part.begin)


def _as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as a flat tensor of bytes."""
    flat = tensor.detach().reshape(-1)
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


# -- CUDA devices -----------------------------------------------------------------------------


class _DeviceReader:
    """Reads into two page-locked buffers in turn; one fills while the other goes to the device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._buffers = [
            torch.empty(_STRETCH_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]
        self._copied = [torch.cuda.Event() for _ in self._buffers]
        self._turn = 0

    def __call__(self, descriptor: int, stretch: list[_Part]) -> None:
        self._turn = 1 - self._turn
        buffer, copied = self._buffers[self._turn], self._copied[self._turn]
        copied.synchronize()
        num_bytes = sum(part.num_bytes for part in stretch)
        _read(descriptor, stretch, [buffer[:num_bytes].numpy()])
        with torch.no_grad(), torch.cuda.stream(self._stream):
            position = 0
            for part in stretch:
                target = _as_bytes(part.tensor)[part.begin : part.begin + part.num_bytes]
                target.copy_(buffer[position : position + part.num_bytes], non_blocking=True)
                position += part.num_bytes
            copied.record(self._stream)

    def finish(self) -> None:
        """Return when all is on the device."""
        self._stream.synchronize()


def _read_to_device(device: torch.device, parts: list[_Part], num_threads: int) -> None:
    readers: list[_DeviceReader] = []

    def make_reader() -> _DeviceReader:
        readers.append(_DeviceReader(device))
        return readers[-1]

    # What the tensors were last used for may be on any stream.
    torch.cuda.synchronize(device)
    try:
        _read_stretches(parts, num_threads, make_reader)
    finally:
        for reader in readers:
            reader.finish()
