"""Curves as a screen shows them: the lowest and the highest of each stretch, and running means.

Owns: which points stay, and the mean of those up to each point. Does not own: where they come from
(columns.py), the wire (answers.py).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indexes = NDArray[np.int64]

_MOST_FADED = 200.0
"""e to that power times any loss is a float."""


def choose_points(xs: Floats, ys: Floats, most: int) -> Indexes:
    """Which points to keep, at most `most` (10 or more), in order; `xs` must not decrease.

    The axis is cut into equal stretches, as the columns of a screen are. Of each stay the lowest
    value, the highest and the first that is not finite; and of all the first and the last.
    """
    if len(xs) <= most:
        return np.arange(len(xs), dtype=np.int64)
    finite = np.isfinite(ys)
    per_stretch = 2 if finite.all() else 3
    stretches = _cut(xs, (most - 2) // per_stretch)
    kept = [np.array([0, len(xs) - 1], dtype=np.int64)]
    whole = np.flatnonzero(finite)
    if len(whole):
        starts = _first_of_each(stretches[whole])
        lengths = np.diff(np.append(starts, len(whole)))
        for extreme in (np.minimum, np.maximum):
            values = np.repeat(extreme.reduceat(ys[whole], starts), lengths)
            hits = whole[ys[whole] == values]
            kept.append(hits[_first_of_each(stretches[hits])])
    strange = np.flatnonzero(~finite)
    kept.append(strange[_first_of_each(stretches[strange])])
    return np.unique(np.concatenate(kept))


def smooth(ys: Floats, weight: float) -> Floats:
    """A running mean that keeps `weight` of what was before; NaN where a value is not finite."""
    finite = np.isfinite(ys)
    parts = ys[finite] * (1 - weight)
    # sum of weight^(t-k) part[k] = weight^t * sum of part[k] / weight^k, as far as floats go
    faded = weight ** np.arange(1, max(1, int(_MOST_FADED / -math.log(weight))) + 1)
    before = 0.0
    for start in range(0, len(parts), len(faded)):
        piece = parts[start : start + len(faded)]
        piece[:] = faded[: len(piece)] * (before + np.cumsum(piece / faded[: len(piece)]))
        before = piece[-1]
    means = np.full(len(ys), np.nan)
    # The first ones have not the whole weight yet.
    means[finite] = parts / (1 - weight ** np.arange(1, len(parts) + 1))
    return means


def _cut(xs: Floats, count: int) -> Indexes:
    """The number of the stretch in which each point lies."""
    width = xs[-1] - xs[0]
    if not width > 0:
        return np.arange(len(xs), dtype=np.int64) * count // len(xs)
    numbers: Indexes = np.minimum((xs - xs[0]) * (count / width), count - 1).astype(np.int64)
    return numbers


def _first_of_each(numbers: NDArray[Any]) -> Indexes:
    """Where, in numbers that do not decrease, another one begins."""
    if not len(numbers):
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
