"""The pieces of a learning-rate curve: shapes, segments, and the curve that they join to.

Owns the arithmetic between progress (steps or tokens) and a factor of the base rate. Does not own
which pieces a schedule of a name has (schedules.py). Needs no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Shape = Callable[[float], float]
"""Of the part that is done, 0 to 1: a decay falls from 1 to 0, a warm-up climbs from 0 to 1."""


def cosine_shape(num_cycles: float = 0.5) -> Shape:
    """Cosine waves; half a one goes from 1 to 0."""
    return lambda part: 0.5 * (1 + math.cos(2 * math.pi * num_cycles * part))


def power_shape(power: float) -> Shape:
    """What is left, to a power."""
    return lambda part: float((1 - part) ** power)


_SHAPES: dict[str, Shape] = {
    "linear": lambda part: 1 - part,
    "cosine": cosine_shape(),
    "1-sqrt": lambda part: 1 - math.sqrt(part),
    "1-square": lambda part: 1 - part * part,
}
_RISES: dict[str, Shape] = {
    "linear": lambda part: part,
    "cosine": lambda part: 0.5 * (1 - math.cos(math.pi * part)),
    "1-sqrt": lambda part: 1 - math.sqrt(1 - part),
}
WARMUP_TYPES = tuple(_RISES)
DECAY_TYPES = (*_SHAPES, "polynomial", "exponential")


@dataclass(frozen=True)
class Segment:
    """One stretch of a curve; `value` gives the factor so much progress after its start."""

    name: str
    start: float
    end: float
    """Where the next one begins, or `inf`."""
    value: Callable[[float], float]


def hold(name: str, start: float, end: float, level: float) -> Segment:
    """A level stretch."""
    return Segment(name, start, end, lambda done: level)


def climb(
    start: float, length: float, low: float, high: float, kind: str = "linear", *, lead: float
) -> Segment:
    """A warm-up. `lead` is what one update brings: the first one is already under way then, and
    the last one has the full rate."""
    rise = _RISES[kind]

    def value(done: float) -> float:
        return low + (high - low) * rise(_part((done + lead) / length))

    return Segment("warm-up", start, start + length, value)


def fall(
    name: str,
    start: float,
    length: float,
    high: float,
    low: float,
    shape: Shape | None,
    *,
    lead: float = 0.0,
) -> Segment:
    """From `high` to `low` along a shape; None is the exponential, which needs `low` above 0."""

    def value(done: float) -> float:
        part = _part((done + lead) / length)
        if shape is None:
            return max(low, float(high * (low / high) ** part))
        return low + (high - low) * shape(part)

    return Segment(name, start, start + length, value)


def decay_shape(kind: str, *, power: float = 1.0, num_cycles: float = 0.5) -> Shape | None:
    """The shape of a name; None for the exponential one."""
    if kind == "exponential":
        return None
    if kind == "polynomial":
        return power_shape(power)
    return cosine_shape(num_cycles) if kind == "cosine" else _SHAPES[kind]


class Curve:
    """A factor of the base rate for every progress; called with it. Past its end it stands still,
    and it is never negative."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        assert segments, "a curve has at least one segment"
        self.segments = tuple(segments)
        self._starts = [segment.start for segment in segments]

    def __call__(self, progress: float) -> float:
        number = max(0, bisect_right(self._starts, progress) - 1)
        segment = self.segments[number]
        return max(0.0, segment.value(min(progress, segment.end) - segment.start))

    @property
    def end(self) -> float:
        """Where it stops changing; `inf` where it never does."""
        return self.segments[-1].end

    def cut(self, end: float) -> Curve:
        """The same curve, standing still from `end` on."""
        kept = [segment for segment in self.segments if segment.start < end]
        last = kept[-1]
        kept[-1] = Segment(last.name, last.start, min(last.end, end), last.value)
        return Curve(kept)


def _part(value: float) -> float:
    return min(1.0, max(0.0, value))
