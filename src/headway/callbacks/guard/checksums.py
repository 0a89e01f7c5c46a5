"""Checksums of tensors, bit by bit, computed where the tensors are.

Owns: what a rank holds of a model and its optimizer, which of it other ranks hold as well, and
the sums over it. Does not own: when that is done and what a difference leads to (replica_check.py).

The sum of a tensor's words, as whole numbers modulo 2**64, changes with every single bit. Sums of
small tensors are taken together: launching a kernel for each would cost more than reading them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

_SMALL_BYTES = 1 << 20
_TOGETHER_BYTES = 8 << 20
NUM_BUCKETS = 16


@dataclass(frozen=True)
class Held:
    """A tensor that this rank holds, or its part of one."""

    name: str
    key: str
    """The same on all ranks that should hold the same bits."""
    read: Callable[[], Tensor]
    """The tensor as it is now; writing to it changes what the rank holds."""


def find_held(model: nn.Module, optimizer: Optimizer | None = None) -> list[Held]:
    """Parameters and, with an optimizer, its state by parameter where that lies with it."""
    import torch

    found: list[Held] = []
    for name, parameter in model.named_parameters():
        found += _held(name, lambda own=parameter: own)  # type: ignore[misc]
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for slot, value in state.items():
            if isinstance(value, torch.Tensor) and value.device == parameter.device:
                found += _held(f"{name}: {slot}", lambda s=state, k=slot: s[k])  # type: ignore[misc]
    return found


def _held(name: str, get: Callable[[], Tensor]) -> Iterator[Held]:
    from headway.checkpoint.sharding import is_spread, local_offsets, local_tensor

    whole = get()
    offsets = local_offsets(whole) if is_spread(whole) else ()
    for path in _plain_paths(local_tensor(whole)):

        def read(path: tuple[str, ...] = path) -> Tensor:
            return _follow(local_tensor(get()).detach(), path)

        part = read()
        if part.numel() and not part.is_meta:
            inner = ".".join((name, *path))
            spelled = f"{inner} {part.dtype} {tuple(part.shape)} at {offsets}"
            yield Held(inner, hashlib.sha256(spelled.encode()).hexdigest()[:16], read)


def _plain_paths(tensor: Tensor) -> Iterator[tuple[str, ...]]:
    """The way to each plain tensor in one that is made of others, such as a low-bit state."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield ()
        return
    for attribute in flatten()[0]:
        for rest in _plain_paths(getattr(tensor, attribute)):
            yield (attribute, *rest)


def _follow(tensor: Any, path: tuple[str, ...]) -> Tensor:
    for attribute in path:
        tensor = getattr(tensor, attribute)
    found: Tensor = tensor
    return found


def group_shared(own: Sequence[Held], keys_of_ranks: Sequence[Sequence[str]]) -> dict[str, Group]:
    """What this rank holds and others hold as well, by the ranks that do ('0,1,2')."""
    holders: dict[str, list[int]] = {}
    for rank, keys in enumerate(keys_of_ranks):
        for key in dict.fromkeys(keys):
            holders.setdefault(key, []).append(rank)
    groups: dict[str, Group] = {}
    for held in sorted(own, key=lambda one: one.key):
        ranks = holders.get(held.key, [])
        if len(ranks) > 1:
            name = ",".join(map(str, ranks))
            groups.setdefault(name, Group(ranks, [])).members.append(held)
    return groups


@dataclass(frozen=True)
class Group:
    """What some ranks hold alike, in the same order on all of them."""

    ranks: list[int]
    members: list[Held]


class Adder:
    """Adds up tensors; it remembers where each of those that go together ends."""

    def __init__(self) -> None:
        self._ends: dict[Any, Tensor] = {}

    def add_up(self, tensors: Sequence[Tensor]) -> Tensor:
        """The checksum of each tensor, as one tensor of 64-bit numbers on their device."""
        import torch

        sums: list[Any] = [None] * len(tensors)
        together: dict[Any, list[int]] = {}
        for index, tensor in enumerate(tensors):
            if tensor.numel() * tensor.element_size() > _SMALL_BYTES:
                sums[index] = _words(tensor).sum(dtype=torch.int64)
            else:
                together.setdefault((tensor.device, _words(tensor).dtype), []).append(index)
        for (device, _), indices in together.items():
            for chosen in _chunks(indices, tensors):
                parts = [_words(tensors[i]).reshape(-1) for i in chosen]
                ends = self._ends_of(tuple(part.numel() for part in parts), device)
                # Differences of a running sum are exact also where it wraps around.
                running = torch.cat(parts).cumsum(0, dtype=torch.int64)[ends]
                found = torch.cat([running[:1], running[1:] - running[:-1]])
                for i, total in zip(chosen, found.unbind()):
                    sums[i] = total
        device = tensors[0].device
        return torch.stack([total.to(device) for total in sums])

    def _ends_of(self, sizes: tuple[int, ...], device: Any) -> Tensor:
        import torch

        if (sizes, device) not in self._ends:
            self._ends[sizes, device] = (torch.tensor(sizes).cumsum(0) - 1).to(device)
        return self._ends[sizes, device]


def _chunks(indices: list[int], tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    chunk: list[int] = []
    room = _TOGETHER_BYTES
    for index in indices:
        num_bytes = tensors[index].numel() * tensors[index].element_size()
        if chunk and num_bytes > room:
            yield chunk
            chunk, room = [], _TOGETHER_BYTES
        chunk.append(index)
        room -= num_bytes
    if chunk:
        yield chunk


def _words(tensor: Tensor) -> Tensor:
    """The same bits as whole numbers."""
    import torch

    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() and tensor.dtype != torch.bool:
        return tensor
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(kind)


def fold(sums: Tensor) -> Tensor:
    """At most `NUM_BUCKETS` numbers, each of which changes when any sum that goes into it does."""
    import torch

    num_rows = -(-len(sums) // NUM_BUCKETS)
    padded = torch.zeros(num_rows * NUM_BUCKETS, dtype=torch.int64, device=sums.device)
    padded[: len(sums)] = sums
    # Odd factors, so that no power of two is lost; each row another, so that two errors of one
    # size in different rows do not make up for each other.
    rows = torch.arange(num_rows, dtype=torch.int64, device=sums.device)
    factors = (rows * 0x5851F42D4C957F2D) | 1
    return (padded.view(num_rows, NUM_BUCKETS) * factors[:, None]).sum(0)[: len(sums)]
