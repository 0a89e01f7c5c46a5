"""Which parameters a model has under which names, and which part of each this rank answers for.

Owns: one list of names on all ranks, whatever the strategy; every element of every parameter
answered for by exactly one rank. Does not own: how torch cuts a tensor (checkpoint/sharding.py),
what is computed of the parts.

Ranks compare what they hold, and the first holder of a part answers for it. That covers copies
(DDP), slices (FSDP2), stages and weights tied between them (pipeline), and mixtures.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from headway.callbacks.watch.sharing import num_ranks, on_all_ranks
from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger(__name__)

_FIRST_NUMBER = re.compile(r"(?:^|(?<=\.))(\d+)(?=\.)")


@dataclass(frozen=True)
class Shard:
    """What this rank holds of one parameter."""

    name: str
    """Of the parameter in the whole model."""
    slot: int
    """Its place in the list of all names."""
    parameter: nn.Parameter
    answers: bool
    """Whether this rank, and no other, answers for these elements."""
    is_whole: bool
    offsets: tuple[int, ...]

    @property
    def local(self) -> Tensor:
        """The elements; not a copy, and without a history of gradients."""
        return _local(self.parameter)

    @property
    def local_gradient(self) -> Tensor | None:
        """The elements of the gradient that there are; of a sparse one those that it stores."""
        gradient = self.parameter.grad
        if gradient is None:
            return None
        gradient = _local(gradient)
        return gradient.coalesce().values() if gradient.is_sparse else gradient

    @property
    def dense_gradient(self) -> Tensor:
        """The gradient, which must be there, of every element."""
        assert self.parameter.grad is not None
        gradient = _local(self.parameter.grad)
        return gradient.to_dense() if gradient.is_sparse else gradient


@dataclass(frozen=True)
class Shards:
    """The parameters of a model and this rank's share of them."""

    names: tuple[str, ...]
    """Of the whole model, in its order; the same on all ranks."""
    shapes: tuple[tuple[int, ...], ...]
    held: tuple[Shard, ...]
    """What is here; parts may be empty."""
    is_replicated: bool
    """Whether every rank holds everything, so that rank 0 can answer without the others."""

    @property
    def answered(self) -> list[Shard]:
        """The parts that this rank answers for; none of them is empty."""
        return [shard for shard in self.held if shard.answers and shard.local.numel()]


def check_patterns(option: str, given: Any) -> tuple[str, ...] | None:
    """Glob patterns as a tuple; a single one may be a string."""
    if given is None:
        return None
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, Sequence) or not given or not all(isinstance(p, str) for p in given):
        raise ConfigError(f"{option}: glob patterns of names (a list of strings), got {given!r}")
    return tuple(given)


def matches(name: str, patterns: Iterable[str] | None) -> bool:
    return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)


def find_shards(
    model: nn.Module,
    patterns: Sequence[str] | None = None,
    *,
    observer: str,
    may_be_none: bool = False,
) -> Shards | None:
    """The parameters whose names match; all ranks must call it.

    None, with a warning that names the observer, where there is nothing to look at. That no name
    matches is nothing to warn of if there `may_be_none`.
    """
    held: list[tuple[str, nn.Parameter, list[Any]]] = []
    problem: str | None = None

    def look() -> list[Any]:
        nonlocal problem
        held[:] = [entry for entry in _describe(model) if matches(entry[0], patterns)]
        problem = _find_problem(model)
        digest = zlib.crc32(json.dumps([region for _, _, region in held]).encode())
        return [problem, digest, any(_is_part(region) for _, _, region in held)]

    said = on_all_ranks(look)
    problem = next((told for told, _, _ in said if told), None)
    if problem is not None:
        logger.warning("%s has nothing to measure: %s", observer, problem)
        return None
    replicated = len({digest for _, digest, _ in said}) == 1 and not any(part for *_, part in said)
    own = [region for _, _, region in held]
    lists = [own] * len(said) if replicated else on_all_ranks(lambda: own)
    if not any(lists) and not may_be_none:
        shown = "" if patterns is None else f" that matches {', '.join(patterns)}"
        logger.warning("%s has nothing to measure: the model has no parameter%s", observer, shown)
        return None
    return _assign(held, lists, _own_rank(), is_replicated=replicated)


def _own_rank() -> int:
    import torch

    return torch.distributed.get_rank() if num_ranks() > 1 else 0


def _assign(
    held: Sequence[tuple[str, nn.Parameter, list[Any]]],
    lists: Sequence[Sequence[Any]],
    rank: int,
    *,
    is_replicated: bool,
) -> Shards:
    """Give every part to its first holder."""
    shapes: dict[str, tuple[int, ...]] = {}
    holders: dict[str, int] = {}
    for holder, regions in enumerate(lists):
        for region in regions:
            shapes.setdefault(region[0], tuple(region[1]))
            holders.setdefault(json.dumps(region), holder)
    names = _in_model_order(list(shapes))
    slots = {name: slot for slot, name in enumerate(names)}
    found = [
        Shard(
            name,
            slots[name],
            parameter,
            holders[json.dumps(region)] == rank,
            not _is_part(region),
            tuple(region[2]),
        )
        for name, parameter, region in held
    ]
    return Shards(tuple(names), tuple(shapes[name] for name in names), tuple(found), is_replicated)


def _in_model_order(names: Sequence[str]) -> list[str]:
    """Names of all ranks in the order of the layers: ranks may hold every second one."""
    places: dict[str, int] = {}

    def key(position: int) -> tuple[int, int, int]:
        name = names[position]
        number = _FIRST_NUMBER.search(name)
        before = name[: number.start()] if number else name
        return places[before], int(number[1]) if number else -1, position

    for name in names:
        number = _FIRST_NUMBER.search(name)
        places.setdefault(name[: number.start()] if number else name, len(places))
    return [names[position] for position in sorted(range(len(names)), key=key)]


def _describe(model: nn.Module) -> list[tuple[str, nn.Parameter, list[Any]]]:
    """By parameter: its stored name, and [name, shape, offsets, local shape] of what is here."""
    from headway.checkpoint.model import clean_name, collect_model
    from headway.checkpoint.sharding import is_spread, local_offsets

    stored = collect_model(model).names_by_id()
    found = []
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        name = stored.get(id(parameter), clean_name(name))
        shape = list(parameter.shape)
        offsets = list(local_offsets(parameter)) if is_spread(parameter) else [0] * len(shape)
        found.append((name, parameter, [name, shape, offsets, list(_local(parameter).shape)]))
    return found


def _is_part(region: Sequence[Any]) -> bool:
    return list(region[1]) != list(region[3])


def _find_problem(model: nn.Module) -> str | None:
    """Why the values are not here, where they are not."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            return f"{name} is on the meta device, without values"
        if hasattr(parameter, "ds_id"):
            return "DeepSpeed's stage 3 keeps the parameters out of reach"
    return None


def _local(tensor: Tensor) -> Tensor:
    from headway.checkpoint.sharding import local_tensor

    return local_tensor(tensor).detach()


def put_in_slots(values: Sequence[Tensor], slots: Sequence[int], num_slots: int) -> Tensor:
    """A vector over all names with these scalars in it, zero elsewhere; nothing is read."""
    import torch

    if not values:
        return torch.zeros(num_slots, dtype=torch.float64)
    device = values[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64
    stacked = torch.stack([value.to(device) for value in values]).to(wide)
    vector = torch.zeros(num_slots, dtype=wide, device=device)
    # From pinned memory or not, the copy of the indices does not wait for the device.
    index = torch.tensor(slots, dtype=torch.int64).to(device, non_blocking=True)
    return vector.index_copy_(0, index, stacked)


def norms_of(tensors: Sequence[Tensor], order: float = 2.0) -> list[Tensor]:
    """The norm of each tensor in float32 at least, in few launches."""
    import torch

    found: list[Tensor | None] = [None] * len(tensors)
    kinds: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(number)
    for (_, dtype), numbers in kinds.items():
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        group = [tensors[number] for number in numbers]
        for number, norm in zip(numbers, torch._foreach_norm(group, order, dtype=wide)):
            found[number] = norm
    return [norm for norm in found if norm is not None]


def measure_squares(shards: Shards) -> Tensor:
    """The square of the L2 norm of what this rank answers for, by name."""
    answered = shards.answered
    norms = norms_of([shard.local for shard in answered])
    return put_in_slots(norms, [shard.slot for shard in answered], len(shards.names)).square()
