"""Per-step metrics: names, how they are recorded, and the buffer that keeps them until a flush.

Recording waits for nothing: a device tensor stays where it is. Does not own the way to the host
(host_copy), over the ranks (joining), nor when a flush happens and who reads it (delivery).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from headway.errors import ConfigError, unknown
from headway.precision.scaler import LEAST_LOSS_SCALE

logger = logging.getLogger(__name__)

Value = Tensor | float | int

TRAIN_LOSS = "train/CE loss"
GRAD_NORM = "optim/total grad norm"
LEARNING_RATE = "optim/LR (group 0)"
"""Of the first group of the optimizer; the others have their number in its place."""
STEP_SKIPPED = "optim/step skipped"
LOSS_SCALE = "optim/loss scale"
PERPLEXITY = "train/PPL"
LOAD_DURATION = "checkpoint/load_duration_s"
SAVE_DURATION = "checkpoint/save_duration_s"
"""How long the training thread was busy with a save."""
SAVE_ASYNC_DURATION = "checkpoint/save_async_duration_s"
"""How long the save was written in the background."""
SAVE_WAIT = "checkpoint/save_wait_s"
"""How long a save waited for the one before it; above 0, saves take longer than their interval."""

# One metric, two names: Hugging Face's short one and the namespaced one.
ALIASES = {
    "loss": TRAIN_LOSS,
    "grad_norm": GRAD_NORM,
    "learning_rate": LEARNING_RATE,
    "perplexity": PERPLEXITY,
}


def is_overflow(metrics: Mapping[str, float]) -> bool:
    """Whether a withheld step is an overflow of scaled gradients, by design: now and then one shows
    that the loss scale is too large."""
    is_searched = metrics.get(LOSS_SCALE, 0.0) >= LEAST_LOSS_SCALE
    return is_searched and math.isfinite(metrics.get(TRAIN_LOSS, math.nan))


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


# Each rank has its share of the loss. The norm is the same on all, unless one of them is at fault:
# what follows one that is not finite must be decided by all ranks alike.
_LOOP_TYPES = {TRAIN_LOSS: ReduceType.sum, GRAD_NORM: ReduceType.max}
# What the loop computes before the update; the rest comes after it.
_MARKED = (TRAIN_LOSS, GRAD_NORM)


def learning_rate_name(group: int) -> str:
    """The metric with the learning rate of one of the optimizer's groups."""
    return f"optim/LR (group {group})"


def _tensor(value: Value) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


class Entry:
    """One metric of one step: the value so far and how many records went into it."""

    __slots__ = ("count", "reduce_type", "value")

    def __init__(self, value: Value, reduce_type: ReduceType | None) -> None:
        self.value = value
        self.count = 1
        self.reduce_type = reduce_type


Steps = dict[int, dict[str, Entry]]


class MetricBuffer:
    """Metrics since the last flush, by step and name."""

    def __init__(self) -> None:
        self._steps: Steps = {}
        self._reduce_types: dict[str, ReduceType | None] = {}
        self._told: set[str] = set()
        self._mark: torch.cuda.Event | None = None
        self._has_unmarked = False

    def mark_computed(self, mark: torch.cuda.Event | None) -> None:
        """Where in the device's queue loss and norm of the step are computed: before the update."""
        self._mark = mark

    @property
    def computed(self) -> torch.cuda.Event | None:
        """Where in the device's queue all that waits for a flush is computed; None: at its end.

        A flush that goes by it does not wait for the update. Tensors of callbacks may be of any
        time, or live ones that the update changes.
        """
        return None if self._has_unmarked else self._mark

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
        name = _full_name(_require_name(name), namespace)
        kind: ReduceType | None = _member(ReduceType, "reduce_type", reduce_type)
        merge = _member(MetricMergeStrategy, "merge_strategy", merge_strategy)
        if self._reduce_types.setdefault(name, kind) != kind:
            raise ConfigError(
                f"metric {name!r} was recorded with reduce type {self._reduce_types[name]} and "
                f"now with {kind}; a metric keeps one for the whole run"
            )
        value = _one_number(name, value)
        self._has_unmarked |= isinstance(value, Tensor)
        entries = self._steps.setdefault(step, {})
        if name in entries:
            self._merge(name, entries[name], value, merge or MetricMergeStrategy.warn)
        else:
            entries[name] = Entry(value, kind)

    def record_step(self, step: int, values: dict[str, Value]) -> None:
        """The loop's own metrics of one step: names and types known, so nothing to check."""
        entries = self._steps.setdefault(step, {})
        for name, value in values.items():
            entries[name] = Entry(value, _LOOP_TYPES.get(name))
            if name not in _MARKED and isinstance(value, Tensor):
                self._has_unmarked = True

    def _merge(self, name: str, entry: Entry, value: Value, merge: MetricMergeStrategy) -> None:
        if merge is MetricMergeStrategy.warn:
            if name not in self._told:
                self._told.add(name)
                logger.warning(
                    "metric %r was recorded twice in one step; the first value stays", name
                )
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

    def learn_types(self, kinds: dict[str, ReduceType]) -> None:
        """Names that other ranks recorded, and how: this rank must do as they do."""
        for name, kind in kinds.items():
            self._reduce_types.setdefault(name, kind)

    def pending(self) -> Steps:
        """What waits for a flush; to look at, not to change."""
        return self._steps

    def take(self) -> Steps:
        """Hand over what waits for a flush."""
        steps, self._steps, self._has_unmarked = self._steps, {}, False
        return steps


def _require_name(name: Any) -> str:
    if isinstance(name, str) and name.strip("/ "):
        return name
    raise ConfigError(f"a metric's name must be a text that is not empty, got {name!r}")


def _one_number(name: str, value: Any) -> Value:
    """The value as the buffer keeps it: a detached tensor of this rank, or a float."""
    if not isinstance(value, Tensor):
        try:
            if not isinstance(value, str):
                return float(value)
        except (TypeError, ValueError):
            pass
        raise ConfigError(f"metric {name!r} must be one number, got {value!r:.80}")
    if value.numel() != 1:
        raise ConfigError(
            f"metric {name!r} must be one number, got a tensor of shape {tuple(value.shape)}"
        )
    placements = getattr(value, "placements", None)
    if placements is None:
        return value.detach()
    if not all(placement.is_replicate() for placement in placements):
        raise ConfigError(
            f"metric {name!r} is spread over ranks ({placements}); give its full_tensor(), which "
            f"every rank must make"
        )
    local: Tensor = value.detach().to_local()  # type: ignore[attr-defined]
    return local


def _member(kind: type[Any], option: str, value: Any) -> Any:
    if value is None or type(value) is kind:  # asking the enumeration takes longer than the rest
        return value
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(unknown(option, value, [str(member) for member in kind])) from None
