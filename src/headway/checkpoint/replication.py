"""Whether a state that should be equal on all ranks is.

Owns: the levels of the check (none, quick, tensor, full), the digest of a tensor on its device, and
a verdict that is the same on every rank. Does not own: which components are checked (component.py).
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headway.checkpoint.component import VALIDATION_LEVELS
from headway.checkpoint.contents import CheckpointContents
from headway.checkpoint.digest import DEFAULT_DIGEST, digest_bytes
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.model import collect_model
from headway.checkpoint.optimizer import split_optimizer
from headway.checkpoint.ranks import Ranks
from headway.checkpoint.tensors import spec_of
from headway.checkpoint.tree import split_tree
from headway.errors import ConfigError, unknown

_CHUNK_ELEMENTS = 1 << 22
_NUM_SAMPLES = 64
_MOST_NAMED = 4
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd 64-bit constants, written as the signed numbers that int64 arithmetic wraps to.
_STREAMS = (-7046029254386353131, -4658895280553007687)
_SPREAD = -7723592293110705685

logger = logging.getLogger(__name__)


def _as_integers(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def digest_tensor(tensor: Tensor) -> Tensor:
    """128 bits of a tensor's values as two int64 on its device, without a copy to the host.

    The sum over all elements of their bits times an odd weight that depends on the place: sums of
    integers do not depend on the order of the device's threads, and any change of one element
    changes the sum.
    """
    values = _as_integers(tensor)
    totals = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, values.numel(), _CHUNK_ELEMENTS):
        chunk = values[start : start + _CHUNK_ELEMENTS].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + chunk.numel(), device=tensor.device)
        for number, constant in enumerate(_STREAMS):
            weight = place * constant
            weight = (weight ^ (weight >> 29)) * _SPREAD
            totals[number] += (chunk * ((weight ^ (weight >> 32)) | 1)).sum()
    return totals


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    places = torch.linspace(0, flat.numel() - 1, min(_NUM_SAMPLES, flat.numel())).long()
    return flat[places.to(flat.device)]


def _summarise(tensors: Mapping[str, Tensor], level: str) -> dict[str, list[Any]]:
    """Spec and digest by name; one transfer from the device for all of them."""
    digests = [
        digest_tensor(_sample(tensor) if level == "quick" else tensor)
        for tensor in tensors.values()
    ]
    by_device: dict[torch.device, list[int]] = {}
    for number, digest in enumerate(digests):
        by_device.setdefault(digest.device, []).append(number)
    numbers: dict[int, list[int]] = {}
    for members in by_device.values():
        rows = torch.stack([digests[number] for number in members]).tolist()
        numbers.update(zip(members, rows))
    return {
        name: [str(spec_of(tensor, name)), *numbers[number]]
        for number, (name, tensor) in enumerate(tensors.items())
    }


def check_replication(
    ranks: Ranks, key: str, state: Any, level: str = "tensor", *, required: bool = True
) -> None:
    """Raise `CheckpointError` on every rank if `state` is not equal on all of them.

    quick: structure, plain values, shapes, dtypes and some elements of each tensor; tensor: a
    digest of every tensor, computed on its device; full: every byte, compared with rank 0's. If
    the component is not `required`, a difference is logged instead.
    """
    if level not in VALIDATION_LEVELS:
        raise ConfigError(unknown("replication validation level", level, VALIDATION_LEVELS))
    if level == "none" or ranks.world_size == 1:
        return
    with ranks.together(f"reading the state of {key!r}"):
        encoded, tensors = split_tree(state, what=f"state of {key!r}")
        plain = digest_bytes(json.dumps(encoded, sort_keys=True).encode(), DEFAULT_DIGEST)
        entries: dict[str, Any] = {"plain values": plain}
        if level == "full":
            entries.update({n: [str(spec_of(t, n))] for n, t in tensors.items()})
        else:
            entries.update(_summarise(tensors, level))
    told = ranks.exchange(entries)
    if level == "full" and all(one == told[0] for one in told):
        told = ranks.exchange(_compare_all(ranks, key, tensors))
    problem = _verdict(key, told)
    if problem is None:
        return
    if required:
        raise CheckpointError(problem)
    logger.error("%s", problem)


def _compare_all(ranks: Ranks, key: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """By name whether this rank's bytes are rank 0's."""
    same: dict[str, Any] = {}
    for name, tensor in tensors.items():
        own = _as_integers(tensor)
        equal = True
        for start in range(0, own.numel(), _CHUNK_ELEMENTS):
            part = own[start : start + _CHUNK_ELEMENTS]
            buffer = part.cpu().clone() if ranks.is_main else torch.empty_like(part, device="cpu")
            ranks.spread(buffer)
            equal &= torch.equal(part, buffer.to(part.device))
        same[name] = equal
    return same


def _verdict(key: str, told: list[dict[str, Any]]) -> str | None:
    """What differs, in words that are the same on every rank; None if nothing does."""
    texts = [json.dumps(one, sort_keys=True) for one in told]
    if len(set(texts)) == 1:
        return None
    # Most ranks are taken to be right; of equally many, those with the lowest rank.
    reference = told[texts.index(Counter(texts).most_common(1)[0][0])]
    parts = []
    for rank, one in enumerate(told):
        names = sorted(n for n in {*one, *reference} if one.get(n) != reference.get(n))
        if names:
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            parts.append(f"rank {rank} in {', '.join(names[:_MOST_NAMED])}{more}")
    return f"component {key!r} should be equal on all ranks, but differs on {'; '.join(parts)}"


def check_contents(ranks: Ranks, contents: CheckpointContents) -> None:
    """Check what is to be checked before a save; every rank must call it."""
    if contents.validation_level not in VALIDATION_LEVELS:
        raise ConfigError(
            unknown("replication validation level", contents.validation_level, VALIDATION_LEVELS)
        )
    if ranks.world_size == 1:
        return
    if contents.validation_level != "none":
        with ranks.together("reading the model"):
            model = collect_model(contents.model)
            states: dict[str, Any] = {"model": model.stored}
            if contents.optimizer is not None:
                states["optimizer"] = split_optimizer(contents.optimizer, model.names_by_id())
        for key, state in states.items():
            check_replication(ranks, key, state, contents.validation_level)
    for component in contents.components:
        if component.validate_replication and component.validation_level != "none":
            with ranks.together(f"reading the state of {component.key!r}"):
                state = component.stateful.state_dict()
            check_replication(
                ranks,
                component.key,
                state,
                component.validation_level,
                required=component.required,
            )
