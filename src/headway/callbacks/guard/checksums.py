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

_SMALL_NUMBERS = 1 << 17
_NUM_TOGETHER = 64
_FACTOR = 0x5851F42D4C957F2D
NUM_BUCKETS = 16


class Held:
    """A tensor that this rank holds, or its part of one."""

    def __init__(self, name: str, key: str, read: Callable[[], Tensor]) -> None:
        self.name = name
        self.key = key
        """The same on all ranks that should hold the same bits."""
        self.read = read
        """The tensor as it is now; writing to it changes what the rank holds."""
        self._words: Tensor | None = None
        self._at = 0

    def words(self) -> Tensor:
        """Its bits as whole numbers, one after the other where they lie so."""
        tensor = self.read()
        # Making a view takes longer than adding up a small tensor.
        if self._words is None or tensor.data_ptr() != self._at:
            self._at, words = tensor.data_ptr(), _words(tensor)
            self._words = words.view(-1) if words.is_contiguous() else words
        return self._words


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


def add_up_each(members: Sequence[Held]) -> Tensor:
    """The checksum of each tensor, on its device."""
    import torch

    device = members[0].words().device
    return torch.stack([one.words().sum(dtype=torch.int64).to(device) for one in members])


def add_up(members: Sequence[Held]) -> Tensor:
    """As many checksums as it takes to see any change: large tensors have one each, small ones
    share them."""
    import torch

    words = [one.words() for one in members]
    device, sums = words[0].device, []
    small: dict[Any, list[Tensor]] = {}
    for one in words:
        if one.numel() > _SMALL_NUMBERS or one.dim() != 1:
            sums.append(one.sum(dtype=torch.int64))
        else:
            small.setdefault((one.device, one.dtype), []).append(one)
    for together in small.values():
        for start in range(0, len(together), _NUM_TOGETHER):
            joined = torch.cat(together[start : start + _NUM_TOGETHER])
            sums.append(joined.sum(dtype=torch.int64))
    # A low-bit state has its scales on the device of its values, as a rule.
    return torch.stack([one if one.device == device else one.to(device) for one in sums])


def _words(tensor: Tensor) -> Tensor:
    """The same bits as whole numbers."""
    import torch

    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() and tensor.dtype != torch.bool:
        return tensor
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(kind)


def fold(sums: Sequence[int]) -> list[int]:
    """At most `NUM_BUCKETS` numbers, one of which changes when any one of the sums does."""
    buckets = [0] * min(NUM_BUCKETS, len(sums))
    for index, total in enumerate(sums):
        row, bucket = divmod(index, NUM_BUCKETS)
        # Odd factors, so that no power of two is lost; each row another, so that two errors of
        # one size in different rows do not make up for each other.
        buckets[bucket] += total * (row * _FACTOR | 1)
    return [bucket % (1 << 64) for bucket in buckets]
