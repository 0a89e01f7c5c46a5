"""Digests of checkpoint files.

Owns: the names of the algorithms, how files or a stretch of bytes are digested, and that what is
read for a digest can at once go to where it is wanted.
Does not own: where digests are recorded (manifest.py), how files are written (storage.py) or
where their bytes are wanted (one_pass.py).
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import xxhash

from headway.checkpoint.jobs import num_readers, share_work, worth_threads
from headway.errors import ConfigError, unknown

DEFAULT_DIGEST = "xxh3_128"
# Small enough that what was read is still in the core's cache when it is digested.
PIECE_BYTES = 1 << 20
# What a system call takes on Linux.
_MOST_BUFFERS = 1024


class Hasher(Protocol):
    """The part of hashlib's interface that is used here."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def _new_xxh3_128() -> Hasher:
    hasher: Hasher = xxhash.xxh3_128()
    return hasher


_ALGORITHMS: dict[str, Callable[[], Hasher]] = {
    "xxh3_128": _new_xxh3_128,
    "sha256": hashlib.sha256,
}


def new_hasher(algorithm: str) -> Hasher:
    """A fresh hasher; an unknown algorithm is a `ConfigError`."""
    if algorithm not in _ALGORITHMS:
        raise ConfigError(unknown("checkpoint digest", algorithm, _ALGORITHMS))
    return _ALGORITHMS[algorithm]()


def digest_bytes(data: bytes, algorithm: str) -> str:
    """The hexadecimal digest of `data`."""
    hasher = new_hasher(algorithm)
    hasher.update(data)
    return hasher.hexdigest()


class Receiver(Protocol):
    """Where the bytes of a file go besides into its digest; asked by several threads."""

    @property
    def bounds(self) -> Sequence[int]:
        """Where pieces of the file begin, and where the last one ends; each is read at once."""

    def place(self, thread: int, number: int) -> Sequence[Any]:
        """Buffers that a thread fills, one after the other, with a piece of the file."""

    def deliver(self, thread: int, number: int) -> None:
        """The thread has filled the buffers of that piece."""


class Source(NamedTuple):
    """A file to be digested."""

    path: Path
    head: bytes = b""
    """Its beginning, if it was read before; it is digested and not read again."""
    receiver: Receiver | None = None
    """Knows what is to be read after that; None: all there is."""


def digest_file(path: Path, algorithm: str) -> str:
    """The hexadecimal digest of a file's content, read in pieces."""
    (found,) = digest_files([path], algorithm, num_threads=1)
    if isinstance(found, OSError):
        raise found
    return found


def digest_files(
    paths: Sequence[Path], algorithm: str, *, num_threads: int | None = None
) -> list[str | OSError]:
    """The digest of every file, or the error that kept it from being read."""
    return digest_sources([Source(path) for path in paths], algorithm, num_threads=num_threads)


def digest_sources(
    sources: Sequence[Source], algorithm: str, *, num_threads: int | None = None
) -> list[str | OSError]:
    """The digest of every file, or the error that kept it from being read.

    Reading and digesting let go of the interpreter, so threads use as many cores. Each thread
    has a file of its own, the largest first, and helps with another once none is untouched.
    """
    scratch: dict[int, memoryview] = {}
    files = [_PiecewiseFile(source, algorithm, scratch) for source in sources]
    untouched = deque(sorted((f for f in files if f.bytes_left), key=lambda f: -f.bytes_left))
    num_threads = num_readers() if num_threads is None else num_threads
    if not worth_threads(sum(file.bytes_left for file in files)):
        num_threads = 1
    current: dict[int, _PiecewiseFile] = {}

    def take(thread: int) -> Callable[[], None] | None:
        file = current.get(thread)
        if file is None or not file.bytes_left:
            if untouched:
                file = untouched.popleft()
            else:
                file = max(files, key=lambda f: f.bytes_left, default=None)
            if file is None or not file.bytes_left:
                return None
            current[thread] = file
        return functools.partial(file.digest_piece, file.take_piece(), thread)

    try:
        share_work(take, num_threads, "verify")
    finally:
        for file in files:
            file.close()
    return [file.error or file.hexdigest() for file in files]


class _Nowhere:
    """Bytes of a file that only the digest needs."""

    def __init__(self, path: Path, scratch: dict[int, memoryview]) -> None:
        size = os.stat(path).st_size
        self.bounds = [*range(0, size, PIECE_BYTES), size]
        self._scratch = scratch

    def place(self, thread: int, number: int) -> Sequence[Any]:
        if thread not in self._scratch:
            self._scratch[thread] = memoryview(bytearray(PIECE_BYTES))
        return [self._scratch[thread][: self.bounds[number + 1] - self.bounds[number]]]

    def deliver(self, thread: int, number: int) -> None:
        pass


class _PiecewiseFile:
    """A file whose pieces are read by several threads at once and digested in their order."""

    def __init__(self, source: Source, algorithm: str, scratch: dict[int, memoryview]) -> None:
        self._path = source.path
        self._hasher = new_hasher(algorithm)
        self._hasher.update(source.head)
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        self._num_digested = 0
        self._gates: dict[int, threading.Lock] = {}
        self._given_up = False
        self._num_taken = 0
        self._bounds: Sequence[int] = [0]
        self.error: OSError | None = None
        try:
            self._receiver = source.receiver or _Nowhere(source.path, scratch)
            self._bounds = self._receiver.bounds
        except OSError as error:
            self.error = error
        self._num_pieces = len(self._bounds) - 1

    @property
    def bytes_left(self) -> int:
        """How much no thread has taken."""
        return 0 if self._given_up else self._bounds[-1] - self._bounds[self._num_taken]

    def take_piece(self) -> int:
        """The number of the next piece, for the thread that will digest it."""
        self._num_taken += 1
        return self._num_taken - 1

    def digest_piece(self, number: int, thread: int) -> None:
        """Read a piece, wait until all before it are digested, digest it."""
        begin, end = self._bounds[number : number + 2]
        try:
            buffers = self._receiver.place(thread, number)
            num_read = read_at(self._open(), buffers, begin, end - begin)
            if num_read < end - begin:
                raise OSError(f"it ends at byte {begin + num_read}, before {end}")
            self._receiver.deliver(thread, number)
            if self._await_turn(number):
                for buffer in buffers:
                    self._hasher.update(buffer)
                self._pass_turn()
        except BaseException as error:
            self._give_up()
            if not isinstance(error, OSError):
                raise
            self.error = error

    def _open(self) -> int:
        if self._descriptor is None:
            with self._lock:
                if self._descriptor is None:
                    self._descriptor = os.open(self._path, os.O_RDONLY)
        return self._descriptor

    def _await_turn(self, number: int) -> bool:
        """Whether it came; it does not if another piece could not be read."""
        with self._lock:
            if self._given_up or self._num_digested == number:
                return not self._given_up
            gate = self._gates[number] = threading.Lock()
            gate.acquire()
        with gate:  # opened by the thread whose piece is the one before
            return not self._given_up

    def _pass_turn(self) -> None:
        with self._lock:
            self._num_digested += 1
            gate = self._gates.pop(self._num_digested, None)
        if gate is not None:
            gate.release()
        elif self._num_digested == self._num_pieces:
            self.close()

    def _give_up(self) -> None:
        with self._lock:
            self._given_up = True
            gates, self._gates = self._gates, {}
        for gate in gates.values():
            gate.release()

    def close(self) -> None:
        """Close the file; no piece may be under way."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def hexdigest(self) -> str:
        """The digest, once every piece has been taken in."""
        assert self._num_digested == self._num_pieces
        return self._hasher.hexdigest()


def read_at(descriptor: int, buffers: Sequence[Any], offset: int, num_bytes: int) -> int:
    """Fill buffers, one after the other, from a place in a file; returns how much there was.

    `num_bytes` is what they hold together.
    """
    num_read = 0
    while num_read < num_bytes:
        more = os.preadv(descriptor, buffers[:_MOST_BUFFERS], offset + num_read)
        if more == 0:
            break
        num_read += more
        if num_read < num_bytes:
            buffers = _drop(buffers, more)
    return num_read


def _drop(buffers: Sequence[Any], num_bytes: int) -> Sequence[Any]:
    """Buffers without those bytes at the front that are filled."""
    for number, buffer in enumerate(buffers):
        view = memoryview(buffer)
        if num_bytes < view.nbytes:
            return [view.cast("B")[num_bytes:], *buffers[number + 1 :]]
        num_bytes -= view.nbytes
    return []
