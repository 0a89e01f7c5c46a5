"""Per-step metrics: recorded as they are, reduced late, delivered for every step.

Owns the buffer between recording (device tensors, no host sync) and flushing (one transfer).
Does not own when a flush happens (loop) nor who reads the result (callbacks).
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from headway.dist.agreement import CommonMistake, exchange, spell_ranks
from headway.errors import ConfigError, unknown

logger = logging.getLogger(__name__)

Value = Tensor | float | int

TRAIN_LOSS = "train/CE loss"
GRAD_NORM = "optim/total grad norm"
LEARNING_RATE = "optim/LR (group 0)"
STEP_SKIPPED = "optim/step skipped"
LOSS_SCALE = "optim/loss scale"
PERPLEXITY = "train/PPL"

# One metric, two names: Hugging Face's short one and the namespaced one.
ALIASES = {
    "loss": TRAIN_LOSS,
    "grad_norm": GRAD_NORM,
    "learning_rate": LEARNING_RATE,
    "perplexity": PERPLEXITY,
}


def _full_name(name: str, namespace: str | None) -> str:
    """A metric's name under its namespace; a short name without one stands for the full name."""
    if namespace is None:
        return ALIASES.get(name, name)
    return f"{namespace.rstrip('/')}/{name.lstrip('/')}"


class ReduceType(StrEnum):
    """How one step's values of a metric are joined over ranks."""

    mean = "mean"
    sum = "sum"
    max = "max"
    l2_norm = "l2_norm"


class MetricMergeStrategy(StrEnum):
    """What happens when a metric is recorded twice in one step."""

    warn = "warn"
    latest = "latest"
    oldest = "oldest"
    mean = "mean"
    sum = "sum"
    max = "max"
    min = "min"


Reduce = Callable[[Tensor, str], Tensor]
# Each rank has its share of the loss; the other figures of the loop are the same on all.
_LOOP_TYPES = {TRAIN_LOSS: ReduceType.sum}


def _tensor(value: Value) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


class _Entry:
    """One metric of one step: the value so far and how many records went into it."""

    __slots__ = ("count", "reduce_type", "value")

    def __init__(self, value: Value, reduce_type: ReduceType | None) -> None:
        self.value = value
        self.count = 1
        self.reduce_type = reduce_type


class MetricBuffer:
    """Metrics since the last flush, by step and name.

    With `reduce`, which joins a tensor over ranks, a flush is something all ranks do together.
    """

    def __init__(self, reduce: Reduce | None = None) -> None:
        self.reduce = reduce
        self._steps: dict[int, dict[str, _Entry]] = {}
        self._reduce_types: dict[str, ReduceType | None] = {}

    @property
    def num_steps(self) -> int:
        """Steps waiting to be flushed."""
        return len(self._steps)

    def record(
        self,
        step: int,
        name: str,
        value: Value,
        reduce_type: ReduceType | str | None = None,
        namespace: str | None = None,
        merge_strategy: MetricMergeStrategy | str = MetricMergeStrategy.warn,
    ) -> None:
        """Store a value under a step. A tensor stays where it is until the flush.

        Without `reduce_type` each rank keeps its own value. A name keeps one reduce type for the
        whole run.
        """
        name = _full_name(name, namespace)
        kind: ReduceType | None = _member(ReduceType, "reduce_type", reduce_type)
        merge = _member(MetricMergeStrategy, "merge_strategy", merge_strategy)
        if self._reduce_types.setdefault(name, kind) != kind:
            raise ConfigError(
                f"metric {name!r} was recorded with reduce type {self._reduce_types[name]} and "
                f"now with {kind}; a metric keeps one for the whole run"
            )
        if isinstance(value, Tensor):
            value = value.detach()
            if value.numel() != 1:
                raise ConfigError(
                    f"metric {name!r} must be one number, got a tensor of shape "
                    f"{tuple(value.shape)}"
                )
        entries = self._steps.setdefault(step, {})
        if name in entries:
            self._merge(name, entries[name], value, merge or MetricMergeStrategy.warn)
        else:
            entries[name] = _Entry(value, kind)

    def record_step(self, step: int, values: dict[str, Value]) -> None:
        """The loop's own metrics of one step: names and types known, so nothing to check."""
        entries = self._steps.setdefault(step, {})
        for name, value in values.items():
            entries[name] = _Entry(value, _LOOP_TYPES.get(name))

    def _merge(self, name: str, entry: _Entry, value: Value, merge: MetricMergeStrategy) -> None:
        if merge is MetricMergeStrategy.warn:
            logger.warning("metric %r was recorded twice in one step; the first value stays", name)
        elif merge is MetricMergeStrategy.latest:
            entry.value = value
        elif merge is not MetricMergeStrategy.oldest:
            old, new = _tensor(entry.value), _tensor(value)
            if old.device != new.device:
                old = old.to(new.device)
            if merge is MetricMergeStrategy.sum:
                entry.value = old + new
            elif merge is MetricMergeStrategy.mean:
                # A running mean over all records, so that a third one is not weighed double.
                entry.count += 1
                entry.value = old + (new - old) / entry.count
            elif merge is MetricMergeStrategy.max:
                entry.value = torch.maximum(old, new)
            else:
                entry.value = torch.minimum(old, new)

    def get(self, step: int, name: str, namespace: str | None = None) -> Value | None:
        """The value recorded for a step that is not flushed yet; reading it may sync."""
        name = _full_name(name, namespace)
        entry = self._steps.get(step, {}).get(name)
        return None if entry is None else entry.value

    def flush(self) -> list[tuple[int, dict[str, float]]]:
        """Hand out every buffered step, in order, as host numbers: one transfer for all."""
        steps, self._steps = self._steps, {}
        if not steps:
            return []
        if self.reduce is not None:
            _reduce_over_ranks(steps, self.reduce)
        slots: list[tuple[dict[str, float], str]] = []
        waiting: list[Tensor] = []
        result: list[tuple[int, dict[str, float]]] = []
        for step in sorted(steps):
            numbers: dict[str, float] = {}
            result.append((step, numbers))
            for name, entry in steps[step].items():
                value = entry.value
                if isinstance(value, Tensor):
                    numbers[name] = math.nan  # keeps the order of recording
                    slots.append((numbers, name))
                    waiting.append(value)
                else:
                    numbers[name] = float(value)
        for (numbers, name), number in zip(slots, _to_host(waiting), strict=True):
            numbers[name] = number
        for _, numbers in result:
            loss = numbers.get(TRAIN_LOSS)
            if loss is not None and loss < 10:
                numbers[PERPLEXITY] = math.exp(loss)
        return result


def _reduce_over_ranks(steps: dict[int, dict[str, _Entry]], reduce: Reduce) -> None:
    """Put the value of all ranks in the place of this rank's: one collective for each type."""
    by_type: dict[ReduceType, list[tuple[str, _Entry]]] = {}
    for step in sorted(steps):
        for name, entry in sorted(steps[step].items()):
            if entry.reduce_type is not None:
                by_type.setdefault(entry.reduce_type, []).append((f"{step} {name}", entry))
    listed = [f"{kind.value} {what}" for kind in sorted(by_type) for what, _ in by_type[kind]]
    # Ranks that bring different metrics would add up unlike things, or wait for ever.
    digest = float(zlib.crc32("\n".join(listed).encode()))
    largest, smallest = reduce(torch.tensor([digest, -digest], dtype=torch.float64), "max").tolist()
    if largest != -smallest:
        raise CommonMistake(_find_partial(_exchange_lists(listed)))
    for kind in sorted(by_type):
        entries = [entry for _, entry in by_type[kind]]
        joined = reduce(torch.stack([_wide(entry.value) for entry in entries]), kind.value)
        for entry, value in zip(entries, joined.unbind()):
            entry.value = value


def _exchange_lists(listed: list[str]) -> list[list[str]]:
    """What every rank recorded, by rank; this rank's alone where ranks are no process group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return exchange(listed)
    return [listed]


def _find_partial(lists: list[list[str]]) -> list[str]:
    """One problem per metric that some rank lacks; the first step where it does."""
    must = "record a metric with a reduce type on every rank at the same step, with the same type"
    problems: dict[tuple[str, str], str] = {}
    for what in dict.fromkeys(what for listed in lists for what in listed):
        kind, step, name = what.split(" ", 2)
        having = [rank for rank, listed in enumerate(lists) if what in listed]
        lacking = [rank for rank in range(len(lists)) if rank not in having]
        if lacking:
            problems.setdefault(
                (kind, name),
                f"metric {name!r} ({kind}) was recorded at step {step} on {spell_ranks(having)} "
                f"and not on {spell_ranks(lacking)}; {must}",
            )
    shown = ", ".join(lists[0][:8])
    return [*problems.values()] or [f"the ranks recorded different metrics; {must} (here: {shown})"]


def _wide(value: Value) -> Tensor:
    tensor = _tensor(value).reshape(())
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def _to_host(values: list[Tensor]) -> list[float]:
    """Move scalars to the host at once: one transfer per device, in double precision so that
    integer counters survive."""
    if not values:
        return []
    by_device: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        by_device.setdefault(value.device, []).append(index)
    numbers = [0.0] * len(values)
    for device, indices in by_device.items():
        wide = torch.float32 if device.type == "mps" else torch.float64
        stacked = torch.stack([values[i].reshape(()).to(wide) for i in indices])
        for i, number in zip(indices, stacked.tolist(), strict=True):
            numbers[i] = number
    return numbers


def _member(kind: type[Any], option: str, value: Any) -> Any:
    if value is None:
        return None
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(unknown(option, value, [str(member) for member in kind])) from None
