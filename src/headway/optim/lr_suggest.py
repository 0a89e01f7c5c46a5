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
# factor of ten, but so many points at least. A fall within a few points needs a narrower one.
_WIDTH_DECADES, _WIDTH_POINTS, _NARROW_POINTS = 0.25, 1.5, 0.6
# A fall counts if it is so many standard errors of the curve, and this part of the first loss.
_NUM_ERRORS, _LEAST_PART = 4.0, 1e-3
# One that few points make has to be the clearer for it.
_NUM_ERRORS_STEEP, _LEAST_PART_STEEP = 10.0, 0.25
# How much of the way from loss to loss is a fall that goes down all the way.
_DIRECT = 0.95
# Standard error of a median, against that of a mean.
_MEDIAN_ERROR = 1.25
# Bends: how many of them a fall and a rise may make themselves; how near to the lowest point they
# are near; how much more uncertain few of them are.
_NUM_CORNERS, _NUM_NEIGHBOURS, _FEW_BENDS = 4, 6, 6.0


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


@dataclass(frozen=True)
class _Fall:
    """From where to where a curve through the losses falls."""

    curve: Array
    slopes: Array
    level: float
    """Where it began."""
    lowest: int
    low: float
    error: float
    """Standard error of its height, if all that neighbours differ by is chance."""
    error_about_trend: float
    """The same, if only what is not part of a trend is."""

    @property
    def height(self) -> float:
        return self.level - self.low

    @property
    def is_sure(self) -> bool:
        """Whether it is more than chance explains, and not next to nothing."""
        return self.height > max(_NUM_ERRORS * self.error, _LEAST_PART * abs(self.level))

    @property
    def is_steep(self) -> bool:
        """Whether it is far more than chance explains, although few points show it."""
        least = _LEAST_PART_STEEP * abs(self.level)
        return self.height > max(_NUM_ERRORS_STEEP * self.error_about_trend, least)


def suggest(lrs: Sequence[float], losses: Sequence[float]) -> Suggestions:
    """Suggest a rate from the losses that were measured at growing ones."""
    if len(losses) < _LEAST_POINTS:
        return Suggestions(
            reason=f"only {len(losses)} rates have a loss, and {_LEAST_POINTS} are the least; "
            "begin with a lower start_lr, or take more num_iterations"
        )
    exponents = np.log10(np.asarray(lrs, dtype=np.float64))
    values = np.asarray(losses, dtype=np.float64)
    spacing = float(exponents[-1] - exponents[0]) / (len(exponents) - 1)
    wide, narrow = max(_WIDTH_DECADES, _WIDTH_POINTS * spacing), _NARROW_POINTS * spacing
    num_first = max(3, len(values) // 10)
    usual = fall = _find_fall(exponents, values, wide, num_first)
    if not usual.is_sure:
        # A loss that falls at once, or within a few rates.
        ways = ((wide, num_first), (wide, 1), (narrow, num_first), (narrow, 1))
        falls = [_find_fall(exponents, values, *way) for way in ways]
        found = [each for each in falls if each.is_steep]
        if not found and _falls_all_the_way(values):
            found = [max(falls, key=lambda each: each.height)]
        if not found:
            return Suggestions(reason=_say_why_not(usual))
        fall = found[0]
    steepest = int(np.argmin(fall.slopes[: fall.lowest + 1]))
    above = np.flatnonzero(fall.curve[: fall.lowest + 1] > fall.level - fall.height / 2)
    half_way = int(above[-1]) if len(above) else 0
    rates = {
        "steepest": float(10 ** exponents[steepest]),
        "minimum/10": float(10 ** exponents[fall.lowest] / 10),
        "valley": float(10 ** exponents[half_way]),
    }
    return Suggestions(sorted(rates.values())[1], rates)


def _find_fall(exponents: Array, values: Array, width: float, num_first: int) -> _Fall:
    """The fall from the first losses to the lowest point of the curve.

    Of losses that only rise it has no height, whatever the curve does: neither the first losses
    lie above those next to the lowest point, nor do these lie above `low`.
    """
    start = float(np.median(values[:num_first]))
    # How far up a loss has run away at the end says nothing about where it fell.
    ceiling = start + max(start - float(values.min()), 0.0)
    capped = np.minimum(values, max(ceiling, float(values[0])))
    curve, slopes, errors = fit_curve(exponents, capped, width)
    lowest = int(np.argmin(curve))
    num_first = max(1, min(num_first, lowest))
    level = float(np.median(values[:num_first]))
    # A line through neighbours of which some rise steeply may lie below them all.
    nearby = capped[lowest - 1 : lowest + 2] if lowest else capped[:1]
    low = max(float(curve[lowest]), float(nearby.min()))
    part = _MEDIAN_ERROR / math.sqrt(num_first) if num_first > 1 else 1.0
    error = math.hypot(float(errors[lowest]), part)
    steps, bends = _scatter(capped, lowest), _scatter_about_trend(capped, lowest)
    return _Fall(curve, slopes, level, lowest, low, steps * error, bends * error)


def _falls_all_the_way(values: Array) -> bool:
    """Whether next to every step down to the lowest loss goes down: chance rarely does so."""
    steps = np.diff(values[: int(np.argmin(values)) + 1])
    height, first = -float(steps.sum()), abs(float(values[0]))
    least = 3 if height > first / 2 else 4
    if height <= _LEAST_PART_STEEP * first or np.count_nonzero(steps < 0) < least:
        return False
    return height >= _DIRECT * float(np.abs(steps).sum())


def _say_why_not(fall: _Fall) -> str:
    if fall.height <= _LEAST_PART * abs(fall.level):
        return (
            f"the loss never fell: it began at {fall.level:.4g}, and its lowest level is "
            f"{fall.low:.4g}"
        )
    return (
        f"the loss never fell by more than chance explains: it began at {fall.level:.4g}, its "
        f"lowest level is {fall.low:.4g}, and the difference is uncertain by {fall.error:.2g}; "
        "more seeds, more rates or a larger batch make it surer"
    )


def fit_curve(exponents: Array, values: Array, width: float) -> tuple[Array, Array, Array]:
    """Height and slope at each point of a line through its neighbours.

    `width`, in factors of ten, says how far away neighbours count. The third is the standard error
    of the height, for values that scatter by 1.
    """
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
    # Neighbours' differences: of a trend over many points next to nothing is in them.
    steps = np.abs(np.diff(values[: max(lowest + 1, len(values) // 2)]))
    return float(np.mean(steps)) * math.sqrt(math.pi) / 2


def _scatter_about_trend(values: Array, lowest: int) -> float:
    """The same from the bends of the losses: a trend has none but at its ends, however steep.

    Losses may scatter more where they are lowest than they do at first.
    """
    bends = np.abs(np.diff(values, 2))
    away = np.abs(np.arange(1, len(values) - 1) - lowest)
    return max(_mean_bend(bends), _mean_bend(bends[away <= _NUM_NEIGHBOURS])) / math.sqrt(
        6 * 2 / math.pi
    )


def _mean_bend(bends: Array) -> float:
    """Without the largest, which may be the ends of trends."""
    if not len(bends):
        return 0.0
    kept = np.sort(bends)[: len(bends) - min(_NUM_CORNERS, len(bends) // 3)]
    return float(np.mean(kept)) * (1 + _FEW_BENDS / len(bends))
