"""A model's trained parameters as one flat list of full tensors, however ranks share them.

Owns: names, shapes and order that are the same under every strategy, gathering parts on the leading
rank and handing full tensors back to all. Does not own: what the values mean (worker.py), who cuts
parameters (strategies), the bytes on a network (wire.py).

The leader is rank 0 of the group. Every method named so is collective: all ranks call it, in the
same order. Values travel as float32, which holds bfloat16 and float16 exactly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headway.checkpoint.model import collect_model
from headway.checkpoint.sharding import as_slice, local_tensor
from headway.checkpoint.staged import TensorSlice
from headway.diloco.specification import Entry, Specification
from headway.optim.freezing import is_trained

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headway.checkpoint.ranks import Ranks

BUCKET_BYTES = 64 << 20
"""How much travels between ranks at once: many small tensors go together."""


@dataclass(frozen=True)
class _Part:
    """Who holds which part of a parameter."""

    rank: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class ParameterView:
    """The parameters of one model, seen by all ranks that train it together."""

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        before_write: Callable[[], None] | None = None,
    ) -> None:
        """Collective. `before_write` is called before values change: a save may be copying them."""
        self.ranks, self._before_write = ranks, before_write
        from torch import nn

        self._live = {
            name: tensor
            for name, tensor in collect_model(model).stored.items()
            if isinstance(tensor, nn.Parameter)
        }
        told = ranks.exchange([_describe(name, t) for name, t in self._live.items()])
        self.specification = _specify(told)
        """Every parameter of the model by name, frozen ones too; the same on all ranks."""
        self.shapes = self.specification.shapes
        """Of those that travel."""
        self._owners = {name: _find_owners(name, told) for name in self.shapes}
        for name, shape in self.shapes.items():
            held = sum(part.numel for part in self._owners[name])
            assert held == math.prod(shape), f"ranks hold {held} numbers of {name}, not {shape}"

    @property
    def names(self) -> list[str]:
        """Of the parameters that travel, in order."""
        return list(self.shapes)

    @property
    def leads(self) -> bool:
        """Whether this rank talks to the server."""
        return self.ranks.is_main

    # -- this rank's parts ------------------------------------------------------------------

    def parts(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """What this rank holds of each parameter that travels, without empty parts; not copies."""
        chosen = self.shapes if names is None else names
        parts = {n: local_tensor(self._live[n]).detach() for n in chosen if n in self._live}
        return {name: part for name, part in parts.items() if part.numel()}

    def copies(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """The same in host memory, in float32."""
        return {
            name: part.to("cpu", torch.float32, copy=True)
            for name, part in self.parts(names).items()
        }

    def sum_over_owned(self, values: Mapping[str, Tensor]) -> float:
        """This rank's share of the sum of squares, each number of the model counted once."""
        total = 0.0
        for name, value in values.items():
            if any(part.rank == self.ranks.rank for part in self._owners[name]):
                total += float(value.double().pow(2).sum())
        return total

    # -- between the ranks ------------------------------------------------------------------

    def read_on_leader(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Collective: the full values on the leader, an empty dict elsewhere."""
        return self.gather_on_leader(self.copies(names), names)

    def gather_on_leader(
        self, values: Mapping[str, Tensor], names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Collective: join tensors that have the shape of each rank's part (host, float32)."""
        chosen = self.names if names is None else list(names)
        if self.ranks.world_size == 1:
            return {name: values[name].contiguous() for name in chosen}
        full: dict[str, Tensor] = {}
        for bucket in self._buckets(chosen):
            full.update(self._gather_bucket(values, bucket))
        return full

    def _gather_bucket(
        self, values: Mapping[str, Tensor], names: Sequence[str]
    ) -> dict[str, Tensor]:
        owned = [(n, part) for n in names for part in self._owners[n]]
        mine = [n for n, part in owned if part.rank == self.ranks.rank]
        flat = torch.cat([values[n].reshape(-1) for n in mine]) if mine else torch.empty(0)
        if not self.leads:
            self.ranks.swap([(0, flat.contiguous())], [])
            return {}
        boxes = {
            rank: torch.empty(sum(p.numel for _, p in owned if p.rank == rank))
            for rank in range(1, self.ranks.world_size)
        }
        self.ranks.swap([], list(boxes.items()))
        boxes[0] = flat
        full = {name: torch.empty(self.shapes[name]) for name in names}
        places = dict.fromkeys(boxes, 0)
        for name, part in owned:
            start = places[part.rank]
            places[part.rank] += part.numel
            piece = boxes[part.rank][start : start + part.numel]
            full[name][part.index] = piece.reshape(part.shape)
        return full

    def hand_out(
        self, values: Mapping[str, Tensor], names: Sequence[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Collective: each rank's parts of the leader's full tensors, one after the other.

        The iterator has to be used up. What it yields may be changed, and is gone afterwards.
        """
        chosen = self.names if names is None else list(names)
        for bucket in self._buckets(chosen):
            sizes = [math.prod(self.shapes[name]) for name in bucket]
            if self.leads:
                flat = torch.cat([values[name].reshape(-1).float() for name in bucket])
            else:
                flat = torch.empty(sum(sizes))
            self.ranks.spread(flat)
            for name, full in zip(bucket, flat.split(sizes)):
                if name in self._live:
                    own = _part_of(self.ranks.rank, self._live[name])
                    if own.numel:
                        yield name, full.reshape(self.shapes[name])[own.index]

    def write_from_leader(
        self,
        values: Mapping[str, Tensor],
        names: Sequence[str] | None = None,
        merge: Callable[[str, Tensor, Tensor], Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Collective: put the leader's values into the model, on every rank its part.

        `merge(name, new, part)` may make the value that is written of the new one and the live
        part. Returns what the new values are once they went through the parameter's own dtype, in
        host memory and float32.
        """
        self.allow_writes()
        parts, taken = self.parts(names), {}
        with torch.no_grad():
            for name, new in self.hand_out(values, names):
                part = parts[name]
                exact = new.to(part.dtype)
                part.copy_(exact if merge is None else merge(name, exact.float(), part))
                taken[name] = exact.to(torch.float32, copy=True).contiguous()
        return taken

    def allow_writes(self) -> None:
        """To be called before values of the model change."""
        if self._before_write is not None:
            self._before_write()

    def _buckets(self, names: Sequence[str]) -> Iterator[list[str]]:
        bucket: list[str] = []
        size = 0
        for name in names:
            num_bytes = 4 * math.prod(self.shapes[name])
            if bucket and size + num_bytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(name)
            size += num_bytes
        if bucket:
            yield bucket


def _describe(name: str, tensor: nn.Parameter) -> list[Any]:
    part = _part_of(0, tensor)
    kind = str(tensor.dtype).removeprefix("torch.")
    return [
        name,
        list(tensor.shape),
        kind,
        is_trained(tensor),
        list(part.offsets),
        list(part.shape),
    ]


def _part_of(rank: int, tensor: Tensor) -> _Part:
    held = as_slice(tensor)
    if isinstance(held, TensorSlice):
        return _Part(rank, tuple(held.offsets), tuple(held.tensor.shape))
    return _Part(rank, (0,) * tensor.dim(), tuple(tensor.shape))


def _specify(told: Sequence[Sequence[Any]]) -> Specification:
    """All that any rank holds, sorted by name, numbers in names as numbers."""
    found = {
        name: Entry(tuple(shape), dtype, trainable)
        for of_rank in told
        for name, shape, dtype, trainable, _, _ in of_rank
    }
    return Specification({name: found[name] for name in sorted(found, key=_natural)})


def _natural(name: str) -> list[str | int]:
    """Layer 10 comes after layer 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _find_owners(name: str, told: Sequence[Sequence[Any]]) -> list[_Part]:
    """Of each distinct part the first rank that holds it."""
    owners: dict[tuple[tuple[int, ...], tuple[int, ...]], _Part] = {}
    for rank, of_rank in enumerate(told):
        for other, _, _, _, offsets, shape in of_rank:
            part = _Part(rank, tuple(offsets), tuple(shape))
            if other == name and part.numel:
                owners.setdefault((part.offsets, part.shape), part)
    return list(owners.values())
