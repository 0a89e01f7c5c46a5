"""Packing: which pieces of which documents fill which sequence.

Owns: the packing modes, the index of packs, and its memory-mapped cache on disk.
Does not own: token values, labels or masks (datasets), nor the order of packs (order).

A *piece* is a document, or a part of one that is longer than a sequence. A *pack* is one or more
pieces that together fill at most one sequence.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from headway.data.arrayfile import AtomicFile, MappedFile, align, encode_header
from headway.data.tokens import TokenFile
from headway.errors import ConfigError, unknown

MAGIC = b"HWPACKS\0"
FORMAT_VERSION = 1
INDEXED_MODES = ("greedy", "best_fit", "none")
MODES = ("stream", *INDEXED_MODES)
DEFAULT_BUFFER_DOCUMENTS = 1 << 16

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackIndex:
    """Pack p holds pieces pack_offsets[p] .. pack_offsets[p + 1] - 1; each has start and length."""

    pack_offsets: Offsets
    piece_starts: Offsets
    piece_lengths: npt.NDArray[np.int32]
    has_padding: bool
    _mapped: MappedFile | None = None

    @property
    def num_packs(self) -> int:
        return len(self.pack_offsets) - 1

    @property
    def num_pieces(self) -> int:
        return len(self.piece_starts)

    def pieces(self, pack: int) -> tuple[Offsets, npt.NDArray[np.int32]]:
        """Starts (in tokens of the file) and lengths of the pieces of one pack."""
        first, last = self.pack_offsets[pack : pack + 2]
        return self.piece_starts[first:last], self.piece_lengths[first:last]


def check_packing(mode: str, sequence_length: int) -> None:
    """Refuse an unknown packing mode or an impossible sequence length."""
    if mode not in MODES:
        raise ConfigError(unknown("packing", mode, MODES))
    if not 2 <= sequence_length < 2**31:
        raise ConfigError(
            f"sequence_length must be at least 2 (a token and its target), got {sequence_length}"
        )


def build_packs(
    document_offsets: Offsets,
    sequence_length: int,
    mode: str,
    *,
    split_documents: bool = True,
    buffer_documents: int = DEFAULT_BUFFER_DOCUMENTS,
) -> PackIndex:
    """Pack documents given by their offsets; the result depends on nothing but the arguments."""
    check_packing(mode, sequence_length)
    if mode not in INDEXED_MODES:
        raise ConfigError(f"packing {mode!r} needs no index")
    if np.any(np.diff(document_offsets) < 0):
        raise ConfigError("the document offsets decrease: the token file is damaged")
    starts, lengths = _split_pieces(np.asarray(document_offsets), sequence_length, split_documents)
    if len(starts) == 0:
        raise ConfigError("there is no document to pack")
    if mode == "none":
        order, pack_offsets = np.arange(len(starts)), np.arange(len(starts) + 1)
    elif mode == "greedy":
        order, pack_offsets = np.arange(len(starts)), _pack_in_order(lengths, sequence_length)
    else:
        order, pack_offsets = _pack_best_fit(lengths, sequence_length, buffer_documents)
    starts, lengths = starts[order], lengths[order]
    filled = np.add.reduceat(lengths, pack_offsets[:-1])
    return PackIndex(
        pack_offsets.astype(np.int64),
        starts,
        lengths.astype(np.int32),
        has_padding=bool(np.any(filled < sequence_length)),
    )


def load_packs(
    file: TokenFile,
    sequence_length: int,
    mode: str,
    *,
    split_documents: bool = True,
    index_dir: str | os.PathLike[str] | None = None,
) -> PackIndex:
    """The packs of a token file, from the index beside it or in `index_dir`; built if absent."""
    check_packing(mode, sequence_length)
    parameters = {
        "mode": mode,
        "sequence_length": sequence_length,
        "split_documents": split_documents,
        "buffer_documents": DEFAULT_BUFFER_DOCUMENTS,
        "token_file": file.digest,
    }
    key = xxhash.xxh3_64_hexdigest(repr(sorted(parameters.items())).encode())
    folder = Path(index_dir) if index_dir is not None else file.path.parent
    path = folder / f"{file.path.stem}.{mode}-{sequence_length}-{key}.hwp"
    if path.exists():
        return _read_index(path, parameters)
    index = build_packs(
        file.document_offsets, sequence_length, mode, split_documents=split_documents
    )
    try:
        _write_index(path, index, parameters)
    except (OSError, ConfigError) as error:
        raise ConfigError(
            f"the pack index of {file.path} cannot be written to {folder} ({error}); "
            "set index_dir to a folder that can be written"
        ) from error
    return _read_index(path, parameters)


def _split_pieces(offsets: Offsets, sequence_length: int, split: bool) -> tuple[Offsets, Offsets]:
    starts, lengths = offsets[:-1], np.diff(offsets)
    kept = lengths > 0
    starts, lengths = starts[kept], lengths[kept]
    if not split:
        return starts.astype(np.int64), np.minimum(lengths, sequence_length)
    counts = -(-lengths // sequence_length)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    skipped = number * sequence_length
    return (
        np.repeat(starts, counts) + skipped,
        np.minimum(np.repeat(lengths, counts) - skipped, sequence_length),
    )


def _pack_in_order(lengths: Offsets, sequence_length: int) -> Offsets:
    """Where each pack begins when pieces are taken in order until the next does not fit."""
    ends = np.concatenate(([0], np.cumsum(lengths)))
    following = np.searchsorted(ends, ends[:-1] + sequence_length, side="right") - 1
    chain: list[int] = following.tolist()
    begins = [0]
    piece = 0
    while piece < len(chain):
        piece = chain[piece]
        begins.append(piece)
    return np.array(begins, dtype=np.int64)


def _pack_best_fit(
    lengths: Offsets, sequence_length: int, buffer_documents: int
) -> tuple[Offsets, Offsets]:
    """Longest first into the fullest pack that still has room, within a buffer of pieces."""
    orders, counts = [], []
    for start in range(0, len(lengths), buffer_documents):
        part = lengths[start : start + buffer_documents]
        longest_first = np.argsort(-part, kind="stable")
        packs = _best_fit(part[longest_first].tolist(), sequence_length)
        by_pack = np.argsort(packs, kind="stable")
        orders.append(longest_first[by_pack] + start)
        counts.append(np.bincount(packs))
    sizes = np.concatenate(counts)
    return np.concatenate(orders), np.concatenate(([0], np.cumsum(sizes)))


def _best_fit(lengths: list[int], sequence_length: int) -> Offsets:
    # Open packs are kept by their free room. The bits of `rooms` say which rooms occur, so the
    # tightest sufficient one is the lowest set bit at or above the length.
    by_room: list[list[int]] = [[] for _ in range(sequence_length + 1)]
    rooms = 0
    num_packs = 0
    packs = []
    for length in lengths:
        fitting = rooms >> length
        if fitting:
            room = (fitting & -fitting).bit_length() - 1 + length
            pack = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, pack = sequence_length, num_packs
            num_packs += 1
        packs.append(pack)
        left = room - length
        if left:
            by_room[left].append(pack)
            rooms |= 1 << left
    return np.array(packs, dtype=np.int64)


def _write_index(path: Path, index: PackIndex, parameters: dict[str, Any]) -> None:
    arrays = (
        index.pack_offsets.astype("<i8").tobytes(),
        index.piece_starts.astype("<i8").tobytes(),
        index.piece_lengths.astype("<i4").tobytes(),
    )
    header = {
        "parameters": parameters,
        "num_packs": index.num_packs,
        "num_pieces": index.num_pieces,
        "has_padding": int(index.has_padding),
        "digest": _digest(arrays),
    }
    output = AtomicFile(path)
    try:
        output.file.write(encode_header(MAGIC, FORMAT_VERSION, header))
        for raw in arrays:
            output.file.write(raw.ljust(align(len(raw)), b"\0"))
        output.commit()
    except BaseException:
        output.discard()
        raise


def _read_index(path: Path, parameters: dict[str, Any]) -> PackIndex:
    mapped = MappedFile(path, magic=MAGIC, version=FORMAT_VERSION, kind="pack index")
    if mapped.header.get("parameters") != parameters:
        raise mapped.problem("it was built for other data or parameters; delete it")
    num_packs, num_pieces = mapped.field("num_packs", int), mapped.field("num_pieces", int)
    has_padding = bool(mapped.field("has_padding", int))
    starts_at = mapped.data_start + align(8 * (num_packs + 1))
    lengths_at = starts_at + align(8 * num_pieces)
    mapped.check_size(lengths_at + align(4 * num_pieces))
    index = PackIndex(
        mapped.array("<i8", mapped.data_start, num_packs + 1),
        mapped.array("<i8", starts_at, num_pieces),
        mapped.array("<i4", lengths_at, num_pieces),
        has_padding,
        mapped,
    )
    arrays = (index.pack_offsets, index.piece_starts, index.piece_lengths)
    if _digest(arrays) != mapped.field("digest", str):
        raise mapped.problem("its content does not match its digest; delete it to build it again")
    return index


def _digest(arrays: tuple[Any, ...]) -> str:
    digest = xxhash.xxh3_128()
    for content in arrays:
        digest.update(content)
    return digest.hexdigest()
