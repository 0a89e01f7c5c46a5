"""The container under token files and pack indexes: a JSON header, then aligned raw arrays.

Owns: the prefix (magic, version, header length), alignment, atomic writing, memory mapping, and
the wording of what is wrong with a damaged file.
Does not own: what the header and the arrays mean (tokens, packing).
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from headway.errors import ConfigError, not_there

ALIGNMENT_BYTES = 64
MAGIC_BYTES = 8
_PREFIX = struct.Struct(f"<{MAGIC_BYTES}sII")
_MAX_HEADER_BYTES = 1 << 20


def align(offset: int) -> int:
    """The next multiple of the alignment at or after `offset`."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class AtomicFile:
    """A file that appears under its name complete, or not at all."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise ConfigError(f"{self.path} is a folder; a file name is needed to write to")
        self._temporary = self.path.with_name(f".{self.path.name}.tmp-{secrets.token_hex(6)}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file: BinaryIO = open(self._temporary, "xb")  # noqa: SIM115 (commit or discard closes it)
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror or error}") from error

    def commit(self) -> None:
        """Make the content durable, then give it its name."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self._temporary, self.path)
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def discard(self) -> None:
        """Leave nothing behind."""
        self.file.close()
        with contextlib.suppress(FileNotFoundError):
            self._temporary.unlink()


def encode_header(
    magic: bytes, version: int, header: dict[str, Any], *, reserved_bytes: int = 0
) -> bytes:
    """Prefix and header, padded to the alignment; at least `reserved_bytes` long."""
    text = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    total = max(align(_PREFIX.size + len(text)), reserved_bytes)
    # JSON allows trailing blanks, so the padding is part of the header and the data start is
    # known from the prefix alone.
    text = text.ljust(total - _PREFIX.size)
    return _PREFIX.pack(magic, version, len(text)) + text


class MappedFile:
    """A container opened for reading: its header, and its arrays as views of the mapping."""

    def __init__(self, path: str | os.PathLike[str], *, magic: bytes, version: int, kind: str):
        self.path = Path(path)
        self.kind = kind
        try:
            with open(self.path, "rb") as file:
                self.num_bytes = os.fstat(file.fileno()).st_size
                self._check_prefix_size()
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ConfigError(f"{kind} {not_there(self.path)}") from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"{kind} {self.path} cannot be read: {reason}") from error
        self.header, self.data_start = self._read_header(magic, version)

    def problem(self, what: str) -> ConfigError:
        """The error that names this file and what is wrong with it."""
        return ConfigError(f"{self.kind} {self.path} is not usable: {what}")

    def array(self, dtype: npt.DTypeLike, offset: int, count: int) -> npt.NDArray[Any]:
        """A read-only view of `count` elements at byte `offset`."""
        return np.frombuffer(self._map, dtype=dtype, count=count, offset=offset)

    def field(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """A header field of the given type; anything else is a damaged header."""
        value = self.header.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.problem(f"its header has no valid {name!r} (found {value!r})")
        return value

    def check_size(self, expected_bytes: int) -> None:
        """The file must be exactly as long as its header says."""
        if self.num_bytes < expected_bytes:
            raise self.problem(
                f"truncated: {self.num_bytes} bytes, its header promises {expected_bytes}"
            )
        if self.num_bytes > expected_bytes:
            raise self.problem(
                f"size mismatch: {self.num_bytes} bytes, its header promises {expected_bytes}"
            )

    def _check_prefix_size(self) -> None:
        if self.num_bytes == 0:
            raise self.problem("the file is empty")
        if self.num_bytes < _PREFIX.size:
            raise self.problem(f"truncated: {self.num_bytes} bytes are too few for any header")

    def _read_header(self, magic: bytes, version: int) -> tuple[dict[str, Any], int]:
        found_magic, found_version, header_bytes = _PREFIX.unpack_from(self._map, 0)
        if found_magic != magic:
            raise self.problem(f"wrong magic {found_magic!r}, expected {magic!r}")
        if found_version != version:
            raise self.problem(
                f"format version {found_version}; this Headway reads version {version}"
            )
        if header_bytes > _MAX_HEADER_BYTES:
            raise self.problem(f"damaged header: a length of {header_bytes} bytes is impossible")
        end = _PREFIX.size + header_bytes
        if end > self.num_bytes:
            raise self.problem(
                f"truncated inside the header ({self.num_bytes} bytes, the header ends at {end})"
            )
        try:
            header = json.loads(self._map[_PREFIX.size : end])
        except ValueError as error:
            raise self.problem(f"damaged header: not JSON ({error})") from None
        if not isinstance(header, dict):
            raise self.problem("damaged header: not a JSON object")
        return header, align(end)
