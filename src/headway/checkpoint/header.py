"""The header of a safetensors file: what is stored where.

Owns: dtype names, and that a header which is not exactly right (its size, its JSON, the places it
gives to tensors) ends in an error that names the file. Does not own: the values (intake.py).
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headway.checkpoint.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Where its values begin in the file."""
    num_bytes: int


class Header(NamedTuple):
    """What a file says about itself."""

    path: Path
    tensors: dict[str, StoredTensor]
    """In the order in which they lie in the file."""
    text: bytes
    """The bytes of the file up to the first value."""


def read_header(path: Path) -> Header:
    """The header of a file, found to be exactly right."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(_LENGTH_BYTES)
            length = int.from_bytes(prefix, "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            text = file.read(length)
        header = json.loads(text, object_pairs_hook=_unique)
        tensors = _check_header(path, header, _LENGTH_BYTES + length, size)
        return Header(path, tensors, prefix + text)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read: its header is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("the header says something twice")
    return values


def _check_header(path: Path, header: Any, begin: int, size: int) -> dict[str, StoredTensor]:
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ValueError("the metadata is not a JSON object")
    tensors = {name: _check_entry(path, name, entry, begin) for name, entry in header.items()}
    end = begin
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)))
    for name, stored in ordered.items():
        # The values fill the file without gaps, and none serve twice.
        if stored.start != end:
            raise ValueError(f"{name!r} begins at byte {stored.start} instead of {end}")
        end += stored.num_bytes
    if end != size:
        raise ValueError(f"the tensors end at byte {end} of {size}")
    return ordered


def _check_entry(path: Path, name: str, entry: Any, begin: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {name!r} is not one of dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES_BY_NAME:
        raise ValueError(f"{name!r} has the unknown dtype {kind!r}")
    if not (isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2):
        raise ValueError(f"the shape and data_offsets of {name!r} are not two lists")
    for count in (*shape, *offsets):
        if type(count) is not int or count < 0:
            raise ValueError(f"the shape and data_offsets of {name!r} are not counts")
    dtype, num_bytes = DTYPES_BY_NAME[kind], offsets[1] - offsets[0]
    if math.prod(shape) * dtype.itemsize != num_bytes:
        raise ValueError(f"{name!r} has {num_bytes} bytes, which is not its shape's size")
    return StoredTensor(path, dtype, tuple(shape), begin + offsets[0], num_bytes)
