"""Tensors that ranks hold in slices, put together by their owners and written.

Owns: the rounds in which slices travel, so that an owner has only a few whole tensors at a time.
Does not own: who owns what (dealing.py), the file format (tensors.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from headway.checkpoint.dealing import ShardPlan
from headway.checkpoint.ranks import Ranks
from headway.checkpoint.staged import TensorSlice
from headway.checkpoint.storage import FileRecord, Storage
from headway.checkpoint.tensors import TensorFile, header_order

ROUND_BYTES = 64 * 2**20
"""What an owner puts together in one round, unless one tensor alone is larger."""

Entry = tuple[str, str]


def sliced_files(plan: ShardPlan) -> list[str]:
    """The files that hold at least one tensor which comes in slices."""
    return [
        file_name
        for file_name, names in plan.files.items()
        if any(plan.tensors[name].parts for name in names)
    ]


def plan_rounds(plan: ShardPlan, num_ranks: int) -> list[list[list[Entry]]]:
    """By round and owner: which (file, tensor) the owner puts together and writes."""
    batches: list[list[list[Entry]]] = [[] for _ in range(num_ranks)]
    room_bytes = [0] * num_ranks
    for file_name in sliced_files(plan):
        owner = plan.owner_of(file_name)
        specs = {name: plan.tensors[name].spec for name in plan.files[file_name]}
        for name in header_order(specs):
            size = specs[name].num_bytes
            if not batches[owner] or size > room_bytes[owner]:
                batches[owner].append([])
                room_bytes[owner] = ROUND_BYTES
            batches[owner][-1].append((file_name, name))
            room_bytes[owner] -= size
    count = max((len(own) for own in batches), default=0)
    return [[own[n] if n < len(own) else [] for own in batches] for n in range(count)]


def write_sliced(
    plan: ShardPlan,
    held: Mapping[str, Tensor | TensorSlice],
    ranks: Ranks,
    storage: Storage,
    directory: Path,
    digest: str,
    record: Callable[[str, FileRecord], None],
) -> list[str]:
    """Write the files of `plan` that hold slices; every rank takes part. Returns this rank's."""
    own_files = [name for name in sliced_files(plan) if plan.owner_of(name) == ranks.rank]
    with contextlib.ExitStack() as stack:
        files: dict[str, TensorFile] = {}
        for batches in plan_rounds(plan, ranks.world_size):
            # A vote in every round: a full disk on one rank ends the save on all of them now.
            with ranks.together("putting slices together"):
                wholes = _swap_slices(plan, held, ranks, batches)
                for file_name, name in batches[ranks.rank]:
                    if file_name not in files:
                        specs = {n: plan.tensors[n].spec for n in plan.files[file_name]}
                        files[file_name] = stack.enter_context(
                            TensorFile(storage, directory / file_name, specs, digest)
                        )
                    files[file_name].write(name, wholes.pop(name))
        with ranks.together("syncing slices"):
            stack.pop_all().close()
            for file_name in own_files:
                record(file_name, files[file_name].record)
    return own_files


def _swap_slices(
    plan: ShardPlan,
    held: Mapping[str, Tensor | TensorSlice],
    ranks: Ranks,
    batches: list[list[Entry]],
) -> dict[str, Tensor]:
    """One round: send what others put together, return what this rank does."""
    wholes: dict[str, Tensor] = {}
    outgoing: list[tuple[int, Tensor]] = []
    incoming: list[tuple[int, Tensor]] = []
    detours: list[tuple[Tensor, Tensor]] = []
    for owner, entries in enumerate(batches):
        for _, name in entries:
            dealt, here = plan.tensors[name], held.get(name)
            if not dealt.parts:
                if owner == ranks.rank:
                    assert isinstance(here, Tensor)
                    wholes[name] = here
                continue
            if owner == ranks.rank:
                wholes[name] = torch.empty(dealt.spec.shape, dtype=dealt.spec.dtype)
            for part in dealt.sources():
                if part.rank == ranks.rank and owner != ranks.rank:
                    assert isinstance(here, TensorSlice)
                    outgoing.append((owner, here.tensor))
                elif owner == ranks.rank:
                    index = tuple(slice(o, o + s) for o, s in zip(part.offsets, part.shape))
                    place = wholes[name][index]
                    if part.rank == ranks.rank:
                        assert isinstance(here, TensorSlice)
                        place.copy_(here.tensor)
                    elif place.is_contiguous():
                        incoming.append((part.rank, place))
                    else:
                        detours.append((place, torch.empty(part.shape, dtype=place.dtype)))
                        incoming.append((part.rank, detours[-1][1]))
    ranks.swap(outgoing, incoming)
    for place, received in detours:
        place.copy_(received)
    return wholes
