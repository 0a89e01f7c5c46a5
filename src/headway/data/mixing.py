"""Mixing several datasets by weight: index -> (source, sample) as a pure function.

Owns: whose turn it is, and the running count of each source.
Does not own: the order in which the mixture itself is read (order, loader).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from heapq import heapify, heapreplace
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.data.order import SampleOrder, derive_key
from headway.errors import ConfigError, unknown

_LONGEST_TABLE = 1 << 20


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
        self._turns = _Turns(self._per_period)
        self._orders = [
            SampleOrder(size, derive_key(seed, number)) for number, size in enumerate(sizes)
        ]

    @property
    def is_deterministic(self) -> bool:
        """Whether samples by index alone use no random numbers."""
        from headway.data.fetch import uses_global_randomness

        return not any(map(uses_global_randomness, self.sources))

    @property
    def needs_seeding(self) -> bool:
        """Whether samples by `get` use the random numbers of the process."""
        from headway.data.fetch import needs_seeding

        return any(map(needs_seeding, self.sources))

    @property
    def takes_rng(self) -> bool:
        """Whether any source is given the generator of a sample."""
        return any(self._take_rng)

    @functools.cached_property
    def _take_rng(self) -> list[bool]:
        from headway.data.fetch import takes_rng

        return [takes_rng(source) for source in self.sources]

    @property
    def vocab_size_needed(self) -> int:
        """The largest need of all sources that can tell."""
        return max((getattr(source, "vocab_size_needed", 0) for source in self.sources), default=0)

    @property
    def proportions(self) -> dict[str, float]:
        """The share of each source, as scheduled."""
        period = self._turns.period
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
        period, place = divmod(self.epoch * self.num_samples + index, self._turns.period)
        source, earlier = self._turns.at(place)
        drawn = period * self._per_period[source] + earlier
        order = self._orders[source]
        passes, position = divmod(drawn, order.num_samples)
        return source, order.index(passes, position)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        source, sample = self.locate(index)
        return self.sources[source][sample]

    def get(self, index: int, rng: Any) -> Any:
        """The sample at `index`, with the generator for a source that takes one."""
        number, sample = self.locate(index)
        source = self.sources[number]
        return source.get(sample, rng) if self._take_rng[number] else source[sample]

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
    """How often each source comes in one period, the shortest in which all shares are exact."""
    total = sum(shares, Fraction(0))
    exact = [share / total for share in shares]
    period = math.lcm(*(share.denominator for share in exact))
    return [int(share * period) for share in exact]


class _Turns:
    """Whose turn it is at a place of the period.

    Draw k of a source that comes n times belongs at (k + 1/2) / n of the period; of two sources
    at the same place the first one goes before. Looked up in short periods, computed in others.
    """

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts
        self.period = sum(counts)
        self._table = _spread(counts) if self.period <= _LONGEST_TABLE else None
        # In so many binary digits, places that differ are different.
        self._digits = 2 * max(counts).bit_length() + 2

    def at(self, place: int) -> tuple[int, int]:
        """The source at a place, and how often it came before in the period."""
        if self._table is not None:
            sources, earlier = self._table
            return int(sources[place]), int(earlier[place])
        return self._compute(place)

    def _compute(self, place: int) -> tuple[int, int]:
        # What belongs before this place less half a draw per source: at most `place` draws, and
        # no more than one per source fewer, which are then made one by one.
        halves = 2 * place - len(self._counts)
        taken = [max(0, (n * halves + self.period) // (2 * self.period)) for n in self._counts]
        next_draws = [self._next(source, drawn) for source, drawn in enumerate(taken)]
        heapify(next_draws)
        for _ in range(place - sum(taken)):
            _, source, drawn = next_draws[0]
            heapreplace(next_draws, self._next(source, drawn + 1))
        _, source, drawn = next_draws[0]
        return source, drawn

    def _next(self, source: int, drawn: int) -> tuple[int, int, int]:
        where = ((2 * drawn + 1) << self._digits) // (2 * self._counts[source])
        return where, source, drawn


def _spread(counts: list[int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The source at each place of a period, and how often it came before."""
    source = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    number = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    # Exact enough: places of so short a period differ by more than float64 rounds off.
    order = np.lexsort((source, (number + 0.5) / np.asarray(counts)[source]))
    return source[order], number[order]
