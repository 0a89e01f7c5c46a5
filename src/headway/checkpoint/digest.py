"""Digests of checkpoint files.

Owns: the names of the algorithms and how files or a stretch of bytes are digested.
Does not own: where digests are recorded (manifest.py) or how files are written (storage.py).
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import xxhash

from headway.checkpoint.jobs import num_readers, share_work, worth_threads
from headway.errors import ConfigError, unknown

DEFAULT_DIGEST = "xxh3_128"
# Small enough that what was read is still in the core's cache when it is digested.
PIECE_BYTES = 1 << 20


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


def digest_file(path: Path, algorithm: str) -> str:
    """The hexadecimal digest of a file's content, read in pieces."""
    (found,) = digest_files([path], algorithm, num_threads=1)
    if isinstance(found, OSError):
        raise found
    return found


def digest_files(
    paths: Sequence[Path], algorithm: str, *, num_threads: int | None = None
) -> list[str | OSError]:
    """The digest of every file, or the error that kept it from being read.

    Reading and digesting let go of the interpreter, so threads use as many cores. Each thread
    has a file of its own, the largest first, and helps with another once none is untouched.
    """
    files = [_PiecewiseFile(path, algorithm) for path in paths]
    untouched = deque(sorted((f for f in files if f.num_left), key=lambda f: -f.num_left))
    num_threads = num_readers() if num_threads is None else num_threads
    if not worth_threads(sum(file.num_left for file in files) * PIECE_BYTES):
        num_threads = 1
    buffers = [memoryview(bytearray(PIECE_BYTES)) for _ in range(num_threads)]
    current: dict[int, _PiecewiseFile] = {}

    def take(thread: int) -> Callable[[], None] | None:
        file = current.get(thread)
        if file is None or not file.num_left:
            if untouched:
                file = untouched.popleft()
            else:
                file = max(files, key=lambda f: f.num_left, default=None)
            if file is None or not file.num_left:
                return None
            current[thread] = file
        return functools.partial(file.digest_piece, file.take_piece(), buffers[thread])

    try:
        share_work(take, num_threads, "verify")
    finally:
        for file in files:
            file.close()
    return [file.error or file.hexdigest() for file in files]


class _PiecewiseFile:
    """A file whose pieces are read by several threads at once and digested in their order."""

    def __init__(self, path: Path, algorithm: str) -> None:
        self._path = path
        self._hasher = new_hasher(algorithm)
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        self._num_digested = 0
        self._gates: dict[int, threading.Lock] = {}
        self._given_up = False
        self._num_pieces = self._num_taken = 0
        self.error: OSError | None = None
        try:
            self._num_pieces = -(-os.stat(path).st_size // PIECE_BYTES)
        except OSError as error:
            self.error = error

    @property
    def num_left(self) -> int:
        """Pieces that no thread has taken."""
        return 0 if self._given_up else self._num_pieces - self._num_taken

    def take_piece(self) -> int:
        """The number of the next piece, for the thread that will digest it."""
        self._num_taken += 1
        return self._num_taken - 1

    def digest_piece(self, number: int, buffer: memoryview) -> None:
        """Read a piece, wait until all before it are digested, digest it."""
        try:
            num_bytes = read_at(self._open(), buffer, number * PIECE_BYTES)
            if self._await_turn(number):
                self._hasher.update(buffer[:num_bytes])
                self._pass_turn()
        except BaseException as error:
            self._give_up()
            if not isinstance(error, OSError):
                raise
            self.error = error

    def _open(self) -> int:
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


def read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from a place in a file; returns how much there was."""
    num_read = 0
    while num_read < len(buffer):
        more = os.preadv(descriptor, [buffer[num_read:]], offset + num_read)
        if more == 0:
            break
        num_read += more
    return num_read
