"""Mixing several datasets by weight: index -> (source, sample) as a pure function.

Owns: the repeating schedule of sources and the running count of each.
Does not own: the order in which the mixture itself is read (order, loader).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.data.order import SampleOrder, derive_key
from headway.errors import ConfigError, unknown

_MAX_PERIOD = 1 << 20


class MixedDataset:
    """One dataset from several, each drawn in proportion to its weight.

    Without weights every source counts by its size. A source that is used up starts again in
    another order. The second epoch goes on where the first one ended, so with the loader's
    `set_epoch` a source larger than its share is seen in full before anything repeats.
    """

    def __init__(
        self,
        sources: Sequence[Any] | Mapping[str, Any],
        weights: Sequence[float] | Mapping[str, float] | None = None,
        *,
        num_samples: int | None = None,
        seed: int = 0,
    ) -> None:
        self.names, self.sources = _name_sources(sources)
        sizes = [len(source) for source in self.sources]
        empty = [name for name, size in zip(self.names, sizes) if size == 0]
        if empty:
            raise ConfigError(f"sources: {', '.join(empty)} is empty")
        shares = [Fraction(size) for size in sizes]
        if weights is not None:
            shares = _read_weights(weights, self.names, isinstance(sources, Mapping))
        self.num_samples = sum(sizes) if num_samples is None else int(num_samples)
        if self.num_samples < 1:
            raise ConfigError(f"num_samples must be at least 1, got {num_samples}")
        self.seed = seed
        self.epoch = 0
        self._per_period = _divide(shares)
        self._schedule, self._earlier = _spread(self._per_period)
        self._orders = [
            SampleOrder(size, derive_key(seed, number)) for number, size in enumerate(sizes)
        ]

    @property
    def is_deterministic(self) -> bool:
        return all(getattr(source, "is_deterministic", False) for source in self.sources)

    @property
    def vocab_size_needed(self) -> int:
        """The largest need of all sources that can tell."""
        return max((getattr(source, "vocab_size_needed", 0) for source in self.sources), default=0)

    @property
    def proportions(self) -> dict[str, float]:
        """The share of each source, as scheduled."""
        period = len(self._schedule)
        return {name: count / period for name, count in zip(self.names, self._per_period)}

    def set_epoch(self, epoch: int) -> None:
        """Go on after `epoch` passes over the mixture."""
        self.epoch = epoch
        for source in self.sources:  # a mixture among them draws others in each epoch too
            if callable(getattr(source, "set_epoch", None)):
                source.set_epoch(epoch)

    def locate(self, index: int) -> tuple[int, int]:
        """Which source, and which of its samples, stands at `index` of the current epoch."""
        index = int(index)
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} is outside 0..{self.num_samples - 1}")
        period, within = divmod(self.epoch * self.num_samples + index, len(self._schedule))
        source = int(self._schedule[within])
        drawn = period * self._per_period[source] + int(self._earlier[within])
        order = self._orders[source]
        passes, position = divmod(drawn, order.num_samples)
        return source, order.index(passes, position)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        source, sample = self.locate(index)
        return self.sources[source][sample]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        places = [self.locate(index) for index in indices]
        items: list[Any] = [None] * len(places)
        for number, source in enumerate(self.sources):
            rows = [row for row, (owner, _) in enumerate(places) if owner == number]
            if not rows:
                continue
            samples = [places[row][1] for row in rows]
            fetch = getattr(source, "__getitems__", None)
            found = fetch(samples) if fetch else [source[sample] for sample in samples]
            for row, item in zip(rows, found):
                items[row] = item
        return items


def _name_sources(sources: Sequence[Any] | Mapping[str, Any]) -> tuple[list[str], list[Any]]:
    if isinstance(sources, Mapping):
        names, datasets = [str(name) for name in sources], list(sources.values())
    else:
        datasets = list(sources)
        names = [f"source {number}" for number in range(len(datasets))]
    if not datasets:
        raise ConfigError("sources: there is nothing to mix")
    for name, dataset in zip(names, datasets):
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"sources: {name} is a {type(dataset).__name__}, which has no length or no "
                "indexing; only map-style datasets can be mixed"
            )
    return names, datasets


def _read_weights(
    weights: Sequence[float] | Mapping[str, float], names: list[str], named: bool
) -> list[Fraction]:
    if isinstance(weights, Mapping):
        if not named:
            raise ConfigError("weights are a mapping, but sources are a list without names")
        strangers = [str(key) for key in weights if key not in names]
        if strangers:
            raise ConfigError([f"weights: {unknown('source', key, names)}" for key in strangers])
        missing = [name for name in names if name not in weights]
        if missing:
            raise ConfigError(f"weights: no weight for {', '.join(missing)}")
        values = [weights[name] for name in names]
    else:
        values = list(weights)
    if len(values) != len(names):
        raise ConfigError(f"weights: {len(values)} weights for {len(names)} sources")
    for name, value in zip(names, values):
        if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            raise ConfigError(f"weights: {name} has weight {value!r}; it must be above 0")
    # Through the decimal text, so that 0.1 means a tenth.
    return [Fraction(str(value)) for value in values]


def _divide(shares: list[Fraction]) -> list[int]:
    """How often each source comes in one period: exact if the period stays small."""
    total = sum(shares, Fraction(0))
    exact = [share / total for share in shares]
    period = math.lcm(*(share.denominator for share in exact))
    if period <= _MAX_PERIOD:
        return [int(share * period) for share in exact]
    counts = [max(1, int(share * _MAX_PERIOD)) for share in exact]
    by_need = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i] * _MAX_PERIOD)
    for number in by_need[: max(0, _MAX_PERIOD - sum(counts))]:
        counts[number] += 1
    return counts


def _spread(
    counts: list[int],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The sources of one period, evenly spread, and how often each came before in it."""
    source = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    number = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
    # Draw k of a source that comes n times belongs at (k + 1/2) / n of the period.
    ideal = (number + 0.5) / np.asarray(counts)[source]
    order = np.lexsort((source, ideal))
    return source[order], number[order]
