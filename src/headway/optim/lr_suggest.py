"""Which learning rate the losses of a range test suggest, by three rules.

Owns: a curve through the losses that does not lag behind them, the rules, and the judgement that
there is nothing to suggest. Does not own: the test (lr_range).

A running mean lags: it shows a fall some iterations, and so some factor of the rate, after it
happened, and a rate read from it is too high. Here a line is fitted to the neighbours on both
sides of each point, so that both height and slope belong where they are read, and a single noisy
loss moves neither much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

_LEAST_POINTS = 5
# Width of the neighbourhood of a point, as the standard deviation of a bell curve: a quarter of a
# factor of ten, but so many points at least.
_WIDTH_DECADES, _WIDTH_POINTS = 0.25, 1.5
# A fall counts if it is so many standard errors of the curve, and this part of the first loss.
_NUM_ERRORS, _LEAST_PART = 4.0, 1e-3
# Standard error of a median, against that of a mean.
_MEDIAN_ERROR = 1.25


@dataclass
class Suggestions:
    """The rate of each rule, and the one to use."""

    suggested_lr: float | None = None
    """The middle one of the rules' rates."""
    by_rule: dict[str, float] = field(default_factory=dict)
    """`steepest`: where the loss falls fastest. `minimum/10`: a tenth of the rate at which it is
    lowest. `valley`: where half of the fall to the lowest loss is done."""
    reason: str | None = None
    """Why there are none."""


def suggest(lrs: Sequence[float], losses: Sequence[float]) -> Suggestions:
    """Suggest a rate from the losses that were measured at growing ones."""
    if len(losses) < _LEAST_POINTS:
        return Suggestions(
            reason=f"only {len(losses)} rates were tried before the loss ran away; begin with a "
            "lower start_lr"
        )
    exponents = np.log10(np.asarray(lrs, dtype=np.float64))
    values = np.asarray(losses, dtype=np.float64)
    num_first = max(3, len(values) // 10)
    level = float(np.median(values[:num_first]))
    # How far up a loss has run away at the end says nothing about where it fell.
    capped = np.minimum(values, level + max(level - float(values.min()), 0.0))
    curve, slopes, errors = fit_curve(exponents, capped)
    lowest = int(np.argmin(curve))
    fall = level - float(curve[lowest])
    error = _scatter(capped, lowest) * math.hypot(errors[lowest], _MEDIAN_ERROR / num_first**0.5)
    if lowest == 0 or fall <= max(_NUM_ERRORS * error, _LEAST_PART * abs(level)):
        return Suggestions(
            reason=f"the loss never fell: it began at {level:.4g}, and its lowest level is "
            f"{float(curve[lowest]):.4g}, which chance explains"
        )
    steepest = int(np.argmin(slopes[: lowest + 1]))
    above = np.flatnonzero(curve[: lowest + 1] > level - fall / 2)
    half_way = int(above[-1]) if len(above) else 0
    rates = {
        "steepest": float(10 ** exponents[steepest]),
        "minimum/10": float(10 ** exponents[lowest] / 10),
        "valley": float(10 ** exponents[half_way]),
    }
    return Suggestions(sorted(rates.values())[1], rates)


def fit_curve(exponents: Array, values: Array) -> tuple[Array, Array, Array]:
    """Height and slope at each point of a line through its neighbours.

    The third is the standard error of the height, for values that scatter by 1.
    """
    spacing = float(exponents[-1] - exponents[0]) / (len(exponents) - 1)
    width = max(_WIDTH_DECADES, _WIDTH_POINTS * spacing)
    offsets = exponents[None, :] - exponents[:, None]
    weights = np.exp(-0.5 * (offsets / width) ** 2)
    weights /= weights.sum(axis=1, keepdims=True)
    centre = (weights * offsets).sum(axis=1, keepdims=True)
    leverage = weights * (offsets - centre)
    leverage /= (leverage * offsets).sum(axis=1, keepdims=True)
    heights = weights - centre * leverage
    return heights @ values, leverage @ values, np.sqrt((heights**2).sum(axis=1))


def _scatter(values: Array, lowest: int) -> float:
    """How much losses differ from one batch to the next, as a standard deviation."""
    # Neighbours' differences: of the trend next to nothing is in them.
    steps = np.abs(np.diff(values[: max(lowest + 1, len(values) // 2)]))
    return float(np.mean(steps)) * math.sqrt(math.pi) / 2
