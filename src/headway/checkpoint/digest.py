"""Digests of checkpoint files.

Owns: the names of the algorithms and how a file or a stretch of bytes is digested.
Does not own: where digests are recorded (manifest.py) or how files are written (storage.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import xxhash

from headway.errors import ConfigError, unknown

DEFAULT_DIGEST = "xxh3_128"
_READ_BYTES = 1 << 20


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
    hasher = new_hasher(algorithm)
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            hasher.update(view[:num_bytes])
    return hasher.hexdigest()
