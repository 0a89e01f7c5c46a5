"""Metrics of all ranks made into one: which belong together, and how they are reduced.

Owns: the comparison of what the ranks brought, the quick way where that is the same, the slower
way where it is not, and the figures derived from the result. Does not own: the channel (dist),
nor in which thread this happens (flushing).

Whatever each rank recorded, all ranks take part in the same collectives in the same order: the
first one tells them all which way to go.
"""

from __future__ import annotations

import hashlib
import logging
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.dist.agreement import CommonMistake, spell_ranks
from headway.dist.channel import RankChannel
from headway.engine.metrics import PERPLEXITY, TRAIN_LOSS, ReduceType

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 6  # a double holds so many exactly


class Key(NamedTuple):
    """What a number is: a metric of a step, and how ranks join it."""

    step: int
    name: str
    kind: ReduceType | None


@dataclass
class Joined:
    """The metrics of a flush as all ranks see them."""

    steps: list[tuple[int, dict[str, float]]]
    kinds_of_others: dict[str, ReduceType] = field(default_factory=dict)
    """Metrics that some rank did not record, and how they are joined; empty on the quick way."""


def join(channel: RankChannel | None, number: int, keys: list[Key], numbers: list[float]) -> Joined:
    """Put the value of all ranks in the place of this rank's; `number` counts the flushes."""
    joined = Joined([])
    if channel is None:
        numbers = [
            abs(value) if key.kind is ReduceType.l2_norm else value
            for key, value in zip(keys, numbers, strict=True)
        ]
    else:
        shared = [index for index, key in enumerate(keys) if key.kind is not None]
        shared.sort(key=lambda index: keys[index][:2])
        own_keys, own = [keys[i] for i in shared], [numbers[i] for i in shared]
        if _brought_the_same(channel, number, own_keys):
            for index, value in zip(shared, _reduce(channel, own_keys, own), strict=True):
                numbers[index] = value
        else:
            kept = [index for index, key in enumerate(keys) if key.kind is None]
            both = _exchange(channel, own_keys, own, {keys[i].name for i in kept})
            joined.kinds_of_others = {key.name: key.kind for key in both if key.kind is not None}
            numbers = [*(numbers[i] for i in kept), *both.values()]
            keys = [*(keys[i] for i in kept), *both]
    by_step: dict[int, dict[str, float]] = {}
    for key, value in zip(keys, numbers, strict=True):
        by_step.setdefault(key.step, {})[key.name] = value
    for metrics in by_step.values():
        loss = metrics.get(TRAIN_LOSS)
        if loss is not None and loss < 10:
            metrics[PERPLEXITY] = math.exp(loss)
    joined.steps = sorted(by_step.items())
    return joined


def _brought_the_same(channel: RankChannel, number: int, keys: list[Key]) -> bool:
    """Whether all ranks have these very metrics; an error where they are at different flushes."""
    text = "\n".join(f"{key.kind} {key.step} {key.name}" for key in keys)
    digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
    sign = float(int.from_bytes(digest))
    last, first, largest, smallest = channel.reduce([number, -number, sign, -sign], "max")
    if last != -first:
        raise RuntimeError(
            f"metrics: the ranks are at different flushes, {-first:.0f} to {last:.0f} (this one "
            f"at {number}); a flush must happen on every rank or on none"
        )
    return largest == -smallest


def _reduce(channel: RankChannel, keys: list[Key], values: list[float]) -> list[float]:
    """The quick way: at most one sum and one maximum for all metrics together."""
    sums, largest = [], []
    for key, value in zip(keys, values, strict=True):
        if key.kind is ReduceType.max:
            # A maximum leaves out what is not a number, so it is counted beside it.
            sums.append(float(math.isnan(value)))
            largest.append(-math.inf if math.isnan(value) else value)
        else:
            sums.append(value * value if key.kind is ReduceType.l2_norm else value)
    if not sums:
        return []
    sums = channel.reduce(sums, "sum")
    tops = iter(channel.reduce(largest, "max") if largest else [])
    result = []
    for key, total in zip(keys, sums, strict=True):
        if key.kind is ReduceType.max:
            top = next(tops)
            result.append(math.nan if total else top)
        elif key.kind is ReduceType.mean:
            result.append(total / channel.world_size)
        else:
            result.append(math.sqrt(total) if key.kind is ReduceType.l2_norm else total)
    return result


def _exchange(
    channel: RankChannel, keys: list[Key], values: list[float], unshared: set[str]
) -> dict[Key, float]:
    """The slower way: each metric over the ranks that have it, known to all of them."""
    rows = [[key.step, key.name, key.kind, value] for key, value in zip(keys, values, strict=True)]
    found: dict[tuple[int, str], list[float]] = {}
    kinds: dict[str, dict[str, list[int]]] = {}
    for rank, told in enumerate(channel.exchange([rows, sorted(unshared)])):
        for step, name, _, value in told[0]:
            found.setdefault((step, name), []).append(value)
        for name, kind in {(row[1], row[2]) for row in told[0]} | {(n, "none") for n in told[1]}:
            kinds.setdefault(name, {}).setdefault(kind, []).append(rank)
    problems = [
        f"metric {name!r} has different reduce types on different ranks: "
        + ", ".join(f"{kind} on {spell_ranks(ranks)}" for kind, ranks in sorted(held.items()))
        for name, held in sorted(kinds.items())
        if len(held) > 1
    ]
    if problems:
        raise CommonMistake(problems)
    kind_of = {name: ReduceType(next(iter(kinds[name]))) for _, name in found}
    return {
        Key(step, name, kind_of[name]): _combine(kind_of[name], have)
        for (step, name), have in sorted(found.items())
    }


def _combine(kind: ReduceType, values: list[float]) -> float:
    if kind is ReduceType.max:
        return math.nan if any(map(math.isnan, values)) else max(values)
    if kind is ReduceType.l2_norm:
        return math.sqrt(sum(value * value for value in values))
    return sum(values) / (len(values) if kind is ReduceType.mean else 1)
