"""Whole tensor files read once: into the tensors and through the digest at the same time.

Owns: which bytes of such a file go straight into a tensor, which by way of a buffer (those for a
device, and those that nobody wants), and the comparison of its digest with the recorded one.
Does not own: which files are read like this (loading.py), threads and the order of pieces
(digest.py), tensors that do not take bytes as they are stored, or files read in part (intake.py).
A damaged file is found out when its last byte has been read, so tensors hold damaged values then.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
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
    fill,
    memory_of,
    tell_changed,
)
from headway.checkpoint.manifest import compare_digest
from headway.checkpoint.storage import FileRecord

# What is read at once is digested while it is still in the core's cache.
_PIECE_BYTES = 256 << 10
# A copy to a device is worth its call only if it is longer.
_DEVICE_PIECE_BYTES = 2 << 20
_NUM_DEVICE_BUFFERS = 3


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
    for header, record in files:
        route = _Route(len(header.text), record.size, wishes.take(header.path))
        later += route.left
        routes.append(route)
        sources.append(Source(header.path, record.size, header.text, route))
    later += wishes.rest()
    try:
        digests = digest_sources(sources, algorithm, num_threads=num_threads)
    finally:
        for route in routes:
            route.finish()
    compared = (
        compare_digest(file.header.path, digest, file.record, algorithm)
        for file, digest in zip(files, digests)
    )
    problems = [problem for problem in compared if problem]
    if not problems:
        fill(later, num_threads)
    return problems


class _Segment(NamedTuple):
    """A stretch of a file: the bytes of a tensor, or bytes that nobody wants."""

    start: int
    end: int
    part: Part | None


class _Route:
    """Where the bytes of one file go."""

    def __init__(self, begin: int, end: int, wanted: list[tuple[Part, Destination]]) -> None:
        self.left: list[Destination] = []
        """Whose bytes go elsewhere already, or which are on another device than the first."""
        self._segments: list[_Segment] = []
        self._device: torch.device | None = None
        self._lanes: dict[int, DeviceLane] = {}
        self._scratch: dict[int, memoryview] = {}
        position = begin
        for part, destination in sorted(wanted, key=lambda pair: pair[0].start):
            on_another = part.tensor.is_cuda and self._device not in (None, part.tensor.device)
            if part.start < position or on_another:
                self.left.append(destination)
                continue
            if part.tensor.is_cuda:
                self._device = part.tensor.device
            if part.start > position:
                self._segments.append(_Segment(position, part.start, None))
            self._segments.append(_Segment(part.start, part.end, part))
            position = part.end
        if position < end:
            self._segments.append(_Segment(position, end, None))
        self.piece_bytes = _PIECE_BYTES if self._device is None else _DEVICE_PIECE_BYTES
        if self._device is not None:
            # What the tensors were last used for may be on any stream.
            torch.cuda.synchronize(self._device)

    def place(self, thread: int, begin: int, end: int) -> Sequence[Any]:
        """Tensors on the host are filled where they are, all else in a buffer of the thread."""
        buffers, own = [], None
        for segment in self._cut(begin, end):
            if segment.part is not None and not segment.part.tensor.is_cuda:
                buffers.append(memory_of(segment.part))
                continue
            if own is None:
                own = self._take_buffer(thread)
            buffers.append(own[segment.start - begin : segment.end - begin])
        return buffers

    def deliver(self, thread: int, begin: int, end: int) -> None:
        """Send what is for the device on its way."""
        if self._device is None:
            return
        to_send = [
            (segment.part, segment.start - begin)
            for segment in self._cut(begin, end)
            if segment.part is not None and segment.part.tensor.is_cuda
        ]
        if to_send:
            self._lanes[thread].send(to_send)

    def finish(self) -> None:
        """Return when all is in place."""
        for lane in self._lanes.values():
            lane.finish()
        tell_changed(segment.part for segment in self._segments if segment.part is not None)

    def _take_buffer(self, thread: int) -> Any:
        if self._device is None:
            if thread not in self._scratch:
                self._scratch[thread] = memoryview(bytearray(self.piece_bytes))
            return self._scratch[thread]
        if thread not in self._lanes:
            self._lanes[thread] = DeviceLane(self._device, self.piece_bytes, _NUM_DEVICE_BUFFERS)
        return self._lanes[thread].take()

    def _cut(self, begin: int, end: int) -> Iterator[_Segment]:
        """The segments of a stretch, those at its ends cut to it."""
        first = bisect.bisect_right(self._segments, begin, key=lambda segment: segment.start) - 1
        for number in range(first, len(self._segments)):
            start, stop, part = self._segments[number]
            if start >= end:
                return
            low, high = max(start, begin), min(stop, end)
            if part is not None:
                place = part.begin + low - start
                part = part._replace(begin=place, num_bytes=high - low, start=low)
            yield _Segment(low, high, part)
