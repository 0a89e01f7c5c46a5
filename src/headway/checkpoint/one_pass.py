"""Whole tensor files read once: into the tensors and through the digest at the same time.

Owns: which bytes of such a file go straight into a tensor, which by way of a buffer (those for a
device, and those that nobody wants), and the comparison of its digest with the recorded one.
Does not own: which files are read like this (loading.py), threads and the order of pieces
(digest.py), tensors that do not take bytes as they are stored, or files read in part (intake.py).
A damaged file is found out when its last byte has been read, so tensors hold damaged values then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headway.checkpoint.digest import Source, digest_sources
from headway.checkpoint.header import Header
from headway.checkpoint.intake import (
    Destination,
    DeviceLane,
    Part,
    as_part,
    bytes_of,
    fill,
    memory_at,
    tell_changed,
)
from headway.checkpoint.manifest import compare_digest
from headway.checkpoint.storage import FileRecord

# What is read at once is digested while it is still in the core's cache.
_PIECE_BYTES = 1 << 20
# To a device the copies are what costs: they should be few.
_DEVICE_PIECE_BYTES = 8 << 20


class WholeFile(NamedTuple):
    """A tensor file: how it begins, as it was read to find its tensors, and what is recorded."""

    header: Header
    record: FileRecord


class Wishes:
    """Tensors to be filled, by file."""

    def __init__(self, destinations: Iterable[Destination]) -> None:
        self._direct: dict[Path, list[tuple[Part, Destination]]] = {}
        """Those that take bytes as they are stored."""
        self._others: list[Destination] = []
        for destination in destinations:
            part = as_part(destination)
            if part is None:
                self._others.append(destination)
            elif part.num_bytes:
                self._direct.setdefault(part.path, []).append((part, destination))

    def count_bytes(self, path: Path) -> int:
        """How many bytes of a file can go straight to where they are wanted."""
        return sum(part.num_bytes for part, _ in self._direct.get(path, ()))

    def take(self, path: Path) -> list[tuple[Part, Destination]]:
        """What can go straight from a file to where it is wanted; others see to it then."""
        return self._direct.pop(path, [])

    def rest(self) -> list[Destination]:
        """What nobody has taken."""
        return [d for pairs in self._direct.values() for _, d in pairs] + self._others


def fill_and_verify(
    wishes: Wishes, files: Sequence[WholeFile], algorithm: str, num_threads: int
) -> list[str]:
    """Fill tensors as `intake.fill`; what is wrong with the files, a line for each.

    The files are read from end to end; from others only what is wanted is read, unverified.
    """
    routes, sources, later = [], [], []
    lanes = _Lanes()
    for header, record in files:
        route = _Route(len(header.text), record.size, wishes.take(header.path), lanes)
        later += route.left
        routes.append(route)
        sources.append(Source(header.path, header.text, route))
    later += wishes.rest()
    try:
        digests = digest_sources(sources, algorithm, num_threads=num_threads)
    finally:
        lanes.finish()
        for route in routes:
            tell_changed(route.parts)
    compared = (
        compare_digest(file.header.path, digest, file.record, algorithm)
        for file, digest in zip(files, digests)
    )
    problems = [problem for problem in compared if problem]
    if not problems:
        fill(later, num_threads)
    return problems


class _Segment(NamedTuple):
    """A stretch of a piece: bytes of a tensor, or bytes that nobody wants."""

    position: int
    """Where it begins in the piece."""
    num_bytes: int
    address: int | None
    """Where it goes on the host."""
    target: torch.Tensor | None
    """Where it goes on a device."""


class _Lanes:
    """The buffers of the threads, for all files that they read."""

    def __init__(self) -> None:
        self._to_devices: dict[tuple[int, torch.device], DeviceLane] = {}
        self._scratch: dict[int, memoryview] = {}

    def take(self, thread: int, device: torch.device | None) -> Any:
        """The next buffer of a thread, for what goes to a device, or nowhere."""
        if device is not None:
            if (thread, device) not in self._to_devices:
                # What the tensors were last used for may be on any stream.
                torch.cuda.synchronize(device)
                self._to_devices[thread, device] = DeviceLane(device, _DEVICE_PIECE_BYTES)
            return self._to_devices[thread, device].take()
        if thread not in self._scratch:
            self._scratch[thread] = memoryview(bytearray(_PIECE_BYTES))
        return self._scratch[thread]

    def send(
        self, thread: int, device: torch.device, parts: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        """Have the thread's last buffer copied to where it belongs on the device."""
        self._to_devices[thread, device].send(parts)

    def finish(self) -> None:
        """Return when all is in place."""
        for lane in self._to_devices.values():
            lane.finish()


class _Route:
    """Where the bytes of one file go, piece by piece."""

    def __init__(
        self, begin: int, end: int, wanted: list[tuple[Part, Destination]], lanes: _Lanes
    ) -> None:
        self.left: list[Destination] = []
        """Whose bytes go elsewhere already, or which are on another device than the first."""
        self.parts: list[Part] = []
        self.bounds = [begin]
        self._pieces: list[list[_Segment]] = [[]]
        self._lanes = lanes
        devices = [part.tensor.device for part, _ in wanted if part.tensor.is_cuda]
        self._device = devices[0] if devices else None
        self._piece_bytes = _PIECE_BYTES if self._device is None else _DEVICE_PIECE_BYTES
        self._position = begin
        for part, destination in sorted(wanted, key=lambda pair: pair[0].start):
            is_elsewhere = part.tensor.is_cuda and part.tensor.device != self._device
            if part.start < self._position or is_elsewhere:
                self.left.append(destination)
                continue
            self._pass_by(part.start)
            self._lead(part)
            self.parts.append(part)
        self._pass_by(end)
        self._end_piece()

    def _pass_by(self, end: int) -> None:
        """Up to there nobody wants anything."""
        while self._position < end:
            self._add(self._room(end), None, None)

    def _lead(self, part: Part) -> None:
        """The next bytes go into a tensor."""
        address = None if part.tensor.is_cuda else part.tensor.data_ptr() - part.start
        on_device = bytes_of(part) if part.tensor.is_cuda else None
        filled = self._position - self.bounds[-1]
        if filled >= self._piece_bytes // 2 and filled + part.num_bytes > self._piece_bytes:
            self._end_piece()  # rather than cut a tensor in two
        while self._position < part.end:
            place, num_bytes = self._position, self._room(part.end)
            if on_device is None:
                assert address is not None
                self._add(num_bytes, address + place, None)
            else:
                first = place - part.start
                self._add(num_bytes, None, on_device[first : first + num_bytes])

    def _room(self, end: int) -> int:
        """How much of what ends there belongs to the current piece, or to a new one."""
        if self._position - self.bounds[-1] >= self._piece_bytes:
            self._end_piece()
        return min(end, self.bounds[-1] + self._piece_bytes) - self._position

    def _add(self, num_bytes: int, address: int | None, target: torch.Tensor | None) -> None:
        place = self._position - self.bounds[-1]
        self._pieces[-1].append(_Segment(place, num_bytes, address, target))
        self._position += num_bytes

    def _end_piece(self) -> None:
        if self._position > self.bounds[-1]:
            self.bounds.append(self._position)
            self._pieces.append([])

    def place(self, thread: int, number: int) -> Sequence[Any]:
        """Tensors on the host are filled where they are, all else in a buffer of the thread."""
        buffers, own = [], None
        for position, num_bytes, address, _ in self._pieces[number]:
            if address is not None:
                buffers.append(memory_at(address, num_bytes))
                continue
            if own is None:
                own = self._lanes.take(thread, self._device)
            buffers.append(own[position : position + num_bytes])
        return buffers

    def deliver(self, thread: int, number: int) -> None:
        """Send what is for the device on its way."""
        if self._device is None:
            return
        to_send = [(s.target, s.position) for s in self._pieces[number] if s.target is not None]
        if to_send:
            self._lanes.send(thread, self._device, to_send)
