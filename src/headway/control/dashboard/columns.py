"""The figures of a run's log in memory, a column for each metric, of limited size.

Owns: order after a resume (the later record of a step wins), and thinning what grows too large.
Does not own: reading (tail.py), what is sent (answers.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from headway.control.dashboard.decimation import Floats, choose_points
from headway.control.run_log import Place

AXES = ("step", "tokens", "time")
_MOST_METRICS = 512
_MOST_POINTS = 1 << 17
"""Of one metric; beyond, only the lowest and highest of each stretch are kept."""
_MOST_POINTS_IN_ALL = 1 << 21
_LEAST_POINTS = 2048


class Column:
    """One metric: its values and where they lie on each axis, by step."""

    def __init__(self) -> None:
        self.num_recorded = 0
        """How many points there were before thinning."""
        self._rows: Floats = np.empty((0, len(AXES) + 1))
        self._new: list[tuple[float, float, float, float]] = []

    def __len__(self) -> int:
        return len(self._rows) + len(self._new)

    def append(self, step: float, tokens: float, seconds: float, value: float) -> None:
        self._new.append((step, tokens, seconds, value))

    def points(self, axis: str) -> tuple[Floats, Floats]:
        """The places on an axis, which do not decrease, and the values."""
        self.settle()
        xs, ys = self._rows[:, AXES.index(axis)], self._rows[:, -1]
        known = np.isfinite(xs)
        if not known.all():
            xs, ys = xs[known], ys[known]
        if len(xs) > 1 and (xs[1:] < xs[:-1]).any():
            by_place = np.argsort(xs, kind="stable")
            xs, ys = xs[by_place], ys[by_place]
        return xs, ys

    def first_and_last_step(self) -> tuple[float, float]:
        self.settle()
        return float(self._rows[0, 0]), float(self._rows[-1, 0])

    def cut(self, step: float) -> None:
        """Drop what comes after a step."""
        self.settle()
        count = int(np.searchsorted(self._rows[:, 0], step, side="right"))
        if count < len(self._rows):
            self._rows = self._rows[:count].copy()
            self.num_recorded = count

    def thin(self, most: int) -> None:
        """Where there are more than so many points, keep half of that; the extremes stay."""
        self.settle()
        if len(self._rows) > most:
            self._rows = self._rows[choose_points(self._rows[:, 0], self._rows[:, -1], most // 2)]

    def settle(self) -> None:
        """Put what is new into its order: of two records of one step the later one stays."""
        if not self._new:
            return
        rows = np.concatenate([self._rows, np.array(self._new)])
        self.num_recorded += len(self._new)
        self._new = []
        steps = rows[:, 0]
        if (steps[1:] <= steps[:-1]).any():
            by_step = np.argsort(steps, kind="stable")
            ordered = steps[by_step]
            kept = by_step[np.append(ordered[1:] != ordered[:-1], True)]
            self.num_recorded -= len(rows) - len(kept)
            rows = rows[kept]
        self._rows = rows


class Columns:
    """All metrics of a run."""

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {}
        self._most_points = _MOST_POINTS

    def add(self, place: Place, metrics: Mapping[str, float]) -> None:
        tokens = math.nan if place.tokens is None else place.tokens
        for name, value in metrics.items():
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= _MOST_METRICS:
                    continue
                column = self._columns[name] = Column()
            column.append(place.step, tokens, place.seconds, value)

    def cut(self, step: float) -> None:
        """The run goes on from this step: what came after did not happen."""
        for column in self._columns.values():
            column.cut(step)

    def limit(self) -> None:
        """Keep the whole within bounds; to be called after every piece of a log."""
        columns = self._columns.values()
        for column in columns:
            column.thin(self._most_points)
        while sum(map(len, columns)) > _MOST_POINTS_IN_ALL and self._most_points > _LEAST_POINTS:
            self._most_points //= 2
            for column in columns:
                column.thin(self._most_points)

    def names(self) -> list[str]:
        return [name for name, column in self._columns.items() if len(column)]

    def get(self, name: str) -> Column | None:
        column = self._columns.get(name)
        return column if column is not None and len(column) else None
