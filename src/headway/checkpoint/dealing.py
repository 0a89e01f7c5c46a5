"""Which rank writes which named tensor to which file, as a pure function of who holds what.

Owns: the plan of a set of shards over ranks. Does not own: moving the slices (slices.py) or
writing the files (writer.py).
Every tensor is stored whole under its name. It is written by a rank that holds it (all of it, or a
part), chosen so that the ranks write about equally many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.header import DTYPES_BY_NAME
from headway.checkpoint.staged import TensorSlice
from headway.checkpoint.tensors import TensorSpec, spec_of
from headway.models.shards import plan_shards, shard_name


@dataclass(frozen=True)
class Part:
    """Where one rank's slice lies in the whole tensor."""

    rank: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass
class Dealt:
    """One tensor of the plan."""

    spec: TensorSpec
    holders: list[int] = field(default_factory=list)
    """Ranks that hold all of it."""
    parts: dict[tuple[int, ...], list[Part]] = field(default_factory=dict)
    """Slices by their offsets; several ranks may hold the same one."""
    owner: int = -1

    @property
    def num_bytes(self) -> int:
        return self.spec.num_bytes

    @property
    def candidates(self) -> list[int]:
        return self.holders or sorted({p.rank for same in self.parts.values() for p in same})

    def sources(self) -> list[Part]:
        """For a tensor in slices: one rank for each slice, the owner's own where it has it."""
        return [
            min(same, key=lambda part: (part.rank != self.owner, part.rank))
            for _, same in sorted(self.parts.items())
        ]


@dataclass
class ShardPlan:
    """The files of one set of shards."""

    tensors: dict[str, Dealt]
    files: dict[str, list[str]]
    """Tensor names by file name."""

    def owner_of(self, file_name: str) -> int:
        """The rank that writes a file."""
        return self.tensors[self.files[file_name][0]].owner

    @property
    def weight_map(self) -> dict[str, str]:
        return {name: file_name for file_name, names in self.files.items() for name in names}

    @property
    def total_bytes(self) -> int:
        return sum(dealt.num_bytes for dealt in self.tensors.values())


def describe(tensors: Mapping[str, Tensor | TensorSlice]) -> dict[str, Any]:
    """What a rank holds, as a JSON value: `{name: [dtype, shape]}`, slices with their place."""
    described: dict[str, Any] = {}
    for name, held in tensors.items():
        if isinstance(held, TensorSlice):
            spec = spec_of(held.tensor, name)
            place = [list(held.offsets), list(held.tensor.shape)]
            described[name] = [spec.dtype_name, list(held.shape), *place]
        else:
            spec = spec_of(held, name)
            described[name] = [spec.dtype_name, list(spec.shape)]
    return described


def deal(described: Sequence[Mapping[str, Any]], prefix: str, max_shard_bytes: int) -> ShardPlan:
    """The plan for what the ranks (in order) say they hold; the same on every rank."""
    tensors: dict[str, Dealt] = {}
    for rank, held in enumerate(described):
        for name, (dtype, shape, *place) in held.items():
            spec = TensorSpec(DTYPES_BY_NAME[dtype], tuple(shape))
            dealt = tensors.setdefault(name, Dealt(spec))
            if dealt.spec != spec:
                raise CheckpointError(
                    f"tensor {name!r} is {spec} on rank {rank} and {dealt.spec} on "
                    f"rank {dealt.candidates[0]}"
                )
            if place:
                part = Part(rank, tuple(place[0]), tuple(place[1]))
                dealt.parts.setdefault(part.offsets, []).append(part)
            else:
                dealt.holders.append(rank)
    for name, dealt in tensors.items():
        _check_cover(name, dealt)
    _choose_owners(tensors, len(described))

    shards: list[list[str]] = []
    for rank in range(len(described)):
        sizes = {name: dealt.num_bytes for name, dealt in tensors.items() if dealt.owner == rank}
        shards += plan_shards(sizes, max_shard_bytes)
    files = {
        shard_name(number, len(shards), prefix): names
        for number, names in enumerate(shards, start=1)
    }
    return ShardPlan(tensors, files)


def _check_cover(name: str, dealt: Dealt) -> None:
    if dealt.holders:
        dealt.parts.clear()
        return
    inside = all(
        len({part.shape for part in same}) == 1
        and all(o + s <= w for o, s, w in zip(offsets, same[0].shape, dealt.spec.shape))
        for offsets, same in dealt.parts.items()
    )
    covered = sum(math.prod(same[0].shape) for same in dealt.parts.values())
    if not inside or covered != math.prod(dealt.spec.shape):
        raise CheckpointError(
            f"the ranks' slices of tensor {name!r} ({dealt.spec}) do not make up the whole: "
            f"{sorted((p.rank, p.offsets, p.shape) for same in dealt.parts.values() for p in same)}"
        )


def _choose_owners(tensors: Mapping[str, Dealt], num_ranks: int) -> None:
    load_bytes = [0] * num_ranks
    for _, dealt in sorted(tensors.items(), key=lambda item: (-item[1].num_bytes, item[0])):
        dealt.owner = min(dealt.candidates, key=lambda rank: (load_bytes[rank], rank))
        load_bytes[dealt.owner] += dealt.num_bytes
