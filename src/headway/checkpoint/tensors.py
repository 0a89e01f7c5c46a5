"""Named tensors in safetensors shards with a Hugging Face style index.

Owns: writing (streamed, digested on the way) and reading by name.
Does not own: which tensors there are (model.py, optimizer.py), the split into files
(models/shards.py) or the checkpoint's completeness.
The files are written here rather than by the safetensors library, whose writer needs the whole
shard in memory a second time or a second read for the digest. They are read here as well: the
library maps files and gives out tensors, and does not fill those that are there (intake.py).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headway.checkpoint.digest import DEFAULT_DIGEST
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.header import (
    DTYPE_NAMES,
    Header,
    StoredTensor,
    read_header,
)
from headway.checkpoint.intake import Destination, fill, read
from headway.checkpoint.jsonfile import read_json
from headway.checkpoint.storage import DigestWriter, FileRecord, Storage, check_name
from headway.models.shards import index_name, plan_shards, shard_name

MAX_SHARD_BYTES = 2**31


def why_not_storable(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot go into a shard, or None if it can."""
    if is_traceable_wrapper_subclass(tensor):
        return f"it is a {type(tensor).__name__}, not a plain tensor"
    if tensor.is_meta:
        return "it is on the meta device and has no values"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"its layout is {tensor.layout}"
    if tensor.dtype not in DTYPE_NAMES:
        return f"its dtype is {tensor.dtype}"
    return None


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's values."""
    return tensor.numel() * tensor.element_size()


def _raw_bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class TensorSpec:
    """What a file header says about a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def dtype_name(self) -> str:
        return DTYPE_NAMES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype_name}{list(self.shape)}"


def spec_of(tensor: torch.Tensor, name: str) -> TensorSpec:
    """The spec of a tensor; `CheckpointError` naming it if it cannot be stored."""
    reason = why_not_storable(tensor)
    if reason:
        raise CheckpointError(f"tensor {name!r} cannot be stored: {reason}")
    return TensorSpec(tensor.dtype, tuple(tensor.shape))


def header_order(specs: Mapping[str, TensorSpec]) -> list[str]:
    """The order of tensors in a file."""
    # Wide elements first: then every tensor starts at a multiple of its element size.
    return sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))


def _file_header(
    specs: Mapping[str, TensorSpec], order: Sequence[str], metadata: Mapping[str, str]
) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name in order:
        end = offset + specs[name].num_bytes
        header[name] = {
            "dtype": specs[name].dtype_name,
            "shape": list(specs[name].shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class TensorFile:
    """One safetensors file that takes its tensors one at a time, in `order`."""

    def __init__(
        self,
        storage: Storage,
        path: Path,
        specs: Mapping[str, TensorSpec],
        digest: str,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        assert sys.byteorder == "little", "safetensors files are little-endian"
        self.order = header_order(specs)
        self._specs = specs
        self._num_written = 0
        self._writer = DigestWriter(storage, path, digest)
        try:
            self._writer.write(_file_header(specs, self.order, metadata or {}))
        except BaseException as error:
            self._writer.__exit__(type(error), error, None)
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor's values."""
        assert name == self.order[self._num_written], "tensors come in the order of the header"
        assert (tensor.dtype, tuple(tensor.shape)) == (
            self._specs[name].dtype,
            self._specs[name].shape,
        )
        self._writer.write(_raw_bytes(tensor))
        self._num_written += 1

    @property
    def record(self) -> FileRecord:
        """Size and digest of what was written."""
        return self._writer.record

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        assert kind is not None or self._num_written == len(self.order), "tensors are missing"
        self._writer.__exit__(kind, error, trace)


def write_tensor_file(
    storage: Storage,
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    digest: str = DEFAULT_DIGEST,
    metadata: Mapping[str, str] | None = None,
) -> FileRecord:
    """Write one safetensors file; returns its size and digest."""
    specs = {name: spec_of(tensor, name) for name, tensor in tensors.items()}
    with TensorFile(storage, path, specs, digest, metadata) as file:
        for name in file.order:
            file.write(name, tensors[name])
    return file.record


def write_shards(
    directory: Path,
    prefix: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    aliases: Mapping[str, str] | None = None,
    digest: str = DEFAULT_DIGEST,
    storage: Storage | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, FileRecord]:
    """Write `<prefix>-0000k-of-0000n.safetensors` and the index; returns a record per file.

    `metadata` goes into the header of each.
    """
    storage = storage or Storage(directory)
    shards = plan_shards({name: num_bytes(t) for name, t in tensors.items()}, max_shard_bytes)
    records: dict[str, FileRecord] = {}
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = shard_name(number, len(shards), prefix)
        part = {name: tensors[name] for name in names}
        path = directory / file_name
        records[file_name] = write_tensor_file(storage, path, part, digest, metadata)
        weight_map.update(dict.fromkeys(names, file_name))
    total_bytes = sum(num_bytes(tensor) for tensor in tensors.values())
    text = index_text(weight_map, total_bytes, aliases or {})
    records[index_name(prefix)] = storage.write_bytes(
        directory / index_name(prefix), text, digest=digest
    )
    return records


def index_text(
    weight_map: Mapping[str, str], total_bytes: int, aliases: Mapping[str, str]
) -> bytes:
    """The content of an index: file by tensor name, and the other names of tied weights."""
    index = {
        "metadata": {"total_size": total_bytes, "headway_aliases": dict(aliases)},
        "weight_map": dict(weight_map),
    }
    return json.dumps(index, indent=2, sort_keys=True).encode()


class ShardReader:
    """Reads the tensors of an index by name, by `num_threads` threads where there is much."""

    def __init__(
        self, directory: str | Path, prefix: str, *, num_threads: int | None = None
    ) -> None:
        self.directory = Path(directory)
        self.index_path = self.directory / index_name(prefix)
        self._num_threads = num_threads
        self._headers: dict[str, Header] = {}
        index = read_json(self.index_path)
        try:
            self.weight_map: dict[str, str] = dict(index["weight_map"])
            self.aliases: dict[str, str] = dict(index["metadata"].get("headway_aliases", {}))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.index_path} is not a valid index: {error!r}") from error
        for file_name in set(self.weight_map.values()):
            check_name(file_name)

    def locate(self, names: Collection[str] | None = None) -> dict[str, StoredTensor]:
        """Where tensors lie and what they are, from the file headers, file by file."""
        wanted = self.weight_map if names is None else names
        absent = sorted(set(wanted) - set(self.weight_map))
        if absent:
            raise CheckpointError(f"{self.index_path} does not list {', '.join(absent)}")
        found: dict[str, StoredTensor] = {}
        for name in sorted(wanted, key=lambda name: (self.weight_map[name], name)):
            file_name = self.weight_map[name]
            if file_name not in self._headers:
                self._headers[file_name] = read_header(self.directory / file_name)
            tensors = self._headers[file_name].tensors
            if name not in tensors:
                raise CheckpointError(
                    f"{self.directory / file_name} lacks {name!r}, which the index places there"
                )
            found[name] = tensors[name]
        return found

    @property
    def headers(self) -> dict[str, Header]:
        """By name of the file: the headers from which it is known where tensors lie."""
        return self._headers

    def shapes(self, names: Collection[str] | None = None) -> dict[str, tuple[int, ...]]:
        """Shapes from the file headers, without reading values."""
        return {name: stored.shape for name, stored in self.locate(names).items()}

    def fill(self, destinations: Iterable[Destination]) -> None:
        """Fill tensors of the right shapes with stored ones, or with parts of them."""
        fill(destinations, self._num_threads)

    def parts(self, wanted: Mapping[str, tuple[slice, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and the wanted part of the tensor, in memory of its own, read without the rest."""
        for name, stored in self.locate(wanted).items():
            ranges = [part.indices(size) for part, size in zip(wanted[name], stored.shape)]
            assert all(step == 1 for _, _, step in ranges), "parts have no gaps"
            offsets = tuple(start for start, _, _ in ranges)
            shape = tuple(max(0, stop - start) for start, stop, _ in ranges)
            rest = stored.shape[len(ranges) :]
            zeros = (0,) * len(rest)
            yield name, read(stored, offsets + zeros, shape + rest, self._num_threads)

    def items(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor, one at a time, in memory of its own."""
        for name, stored in self.locate(names).items():
            yield name, read(stored, num_threads=self._num_threads)


def open_tensor_file(path: Path) -> Any:
    """Open one safetensors file for reading by name (a context manager)."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_tensor_file(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of one safetensors file, in memory of their own."""
    return _read_together(read_header(path).tensors)


def read_shards(
    directory: str | Path, prefix: str, names: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """The named tensors (all by default), in memory; aliases are not included."""
    return _read_together(ShardReader(directory, prefix).locate(names))


def _read_together(stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    tensors = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in stored.items()}
    fill(Destination(one, tensors[name]) for name, one in stored.items())
    return tensors
