"""The figures of a run's log in memory, a column for each metric, of limited size.

Owns: order after a resume (the later record of a step wins), and thinning what grows too large.
Does not own: reading (tail.py), what is sent (answers.py).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping

import numpy as np

from headway.control.dashboard.decimation import Floats, Indexes, choose_points
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
        self._arrays = [array("d") for _ in range(4)]
        self._in_order = True

    def __len__(self) -> int:
        return len(self._arrays[0])

    def append(self, place: Place, value: float) -> None:
        steps = self._arrays[0]
        if steps and place.step <= steps[-1]:
            self._in_order = False
        tokens = math.nan if place.tokens is None else place.tokens
        for column, number in zip(self._arrays, (place.step, tokens, place.seconds, value)):
            column.append(number)
        self.num_recorded += 1

    def points(self, axis: str) -> tuple[Floats, Floats]:
        """The places on an axis, which do not decrease, and the values."""
        self.order()
        xs, ys = self._read(AXES.index(axis)), self._read(3)
        known = np.isfinite(xs)
        if not known.all():
            xs, ys = xs[known], ys[known]
        if len(xs) > 1 and (xs[1:] < xs[:-1]).any():
            by_place = np.argsort(xs, kind="stable")
            xs, ys = xs[by_place], ys[by_place]
        return xs, ys

    def first_and_last_step(self) -> tuple[float, float]:
        self.order()
        return self._arrays[0][0], self._arrays[0][-1]

    def cut(self, step: float) -> None:
        """Drop what comes after a step."""
        self.order()
        steps = self._read(0)
        count = int(np.searchsorted(steps, step, side="right"))
        if count < len(steps):
            self._keep(np.arange(count, dtype=np.int64))
            self.num_recorded = count

    def thin(self, most: int) -> None:
        """Keep about half of so many points; the extremes stay."""
        self.order()
        if len(self) > most:
            self._keep(choose_points(self._read(0), self._read(3), most // 2))

    def order(self) -> None:
        """Sort by step; of two records of one step the later one stays."""
        if self._in_order:
            return
        steps = self._read(0)
        by_step = np.argsort(steps, kind="stable")
        ordered = steps[by_step]
        last_of_each = np.append(ordered[1:] != ordered[:-1], True)
        kept = by_step[last_of_each]
        self.num_recorded -= len(steps) - len(kept)
        self._keep(kept)
        self._in_order = True

    def _read(self, number: int) -> Floats:
        # A copy: an array whose memory is lent out cannot grow.
        return np.array(self._arrays[number], dtype=np.float64)

    def _keep(self, chosen: Indexes) -> None:
        for number in range(len(self._arrays)):
            kept = array("d")
            kept.frombytes(self._read(number)[chosen].tobytes())
            self._arrays[number] = kept


class Columns:
    """All metrics of a run."""

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {}
        self._most_points = _MOST_POINTS

    def add(self, place: Place, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= _MOST_METRICS:
                    continue
                column = self._columns[name] = Column()
            column.append(place, value)
            if len(column) > self._most_points:
                column.thin(self._most_points)

    def cut(self, step: float) -> None:
        """The run goes on from this step: what came after did not happen."""
        for column in self._columns.values():
            column.cut(step)

    def limit(self) -> None:
        """Keep the whole within bounds; to be called after every piece of a log."""
        while (
            sum(map(len, self._columns.values())) > _MOST_POINTS_IN_ALL
            and self._most_points > _LEAST_POINTS
        ):
            self._most_points //= 2
            for column in self._columns.values():
                column.thin(self._most_points)

    def names(self) -> list[str]:
        return [name for name, column in self._columns.items() if len(column)]

    def get(self, name: str) -> Column | None:
        column = self._columns.get(name)
        return column if column is not None and len(column) else None
