"""Line charts: as text, as a PNG (matplotlib), as a page or a part of one (plotly).

Owns the drawing. Does not own what is drawn; needs no torch. The two packages come with the extra
`plot` and are imported when a file is written.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, missing_extra, unknown

ENDINGS = (".html", ".png")
_MARKS = "*o+x#@%&"
_NARROWEST, _WIDEST = 40, 100
_MOST_POINTS = 5000


@dataclass(frozen=True)
class Line:
    """Points joined by a line."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]

    def points(self) -> list[tuple[float, float]]:
        """Those that can be drawn: JSON logs may hold NaN and infinities."""
        return [(x, y) for x, y in zip(self.xs, self.ys) if math.isfinite(x) and math.isfinite(y)]


@dataclass(frozen=True)
class Chart:
    """Some lines over one axis."""

    title: str
    x_label: str
    lines: Sequence[Line]
    log_y: bool = False
    from_zero: bool = False
    markers: dict[float, str] = field(default_factory=dict)
    """Places on the axis that deserve a word."""


def check_output(path: str | os.PathLike[str], option: str, *endings: str) -> None:
    """Refuse, before any work is done, a file that cannot be written here."""
    from importlib.util import find_spec

    target, allowed = Path(path), endings or ENDINGS
    ending = target.suffix.lower()
    if ending not in allowed:
        raise ConfigError(f"{option}: {unknown('ending', ending, allowed)}")
    package = "plotly" if ending == ".html" else "matplotlib"
    if find_spec(package) is None:
        raise missing_extra(package, "plot", f"{option} {os.fspath(path)}")
    if target.is_dir():
        raise ConfigError(f"{option}: {path} is a folder, not a file to write")


def write_charts(path: str | os.PathLike[str], charts: Sequence[Chart], title: str) -> None:
    """Draw charts below one another into a file; the ending says which kind."""
    target = Path(path)
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    if target.suffix.lower() == ".png":
        _write_png(target, charts, title)
        return
    # The page holds the script itself, so that it opens without a network.
    parts = [html_part(chart, with_script=number == 0) for number, chart in enumerate(charts)]
    target.write_text(html_page(title, parts), encoding="utf-8")


def html_page(title: str, parts: Sequence[str]) -> str:
    """A whole page of its parts."""
    from html import escape

    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f"</title></head><body>\n<h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def html_part(chart: Chart, *, with_script: bool) -> str:
    """A chart as part of a page; one of them must bring the script."""
    import plotly.graph_objects as graph

    figure = graph.Figure()
    for line in chart.lines:
        points = _thin(line.points())
        xs, ys = [x for x, _ in points], [y for _, y in points]
        figure.add_trace(graph.Scatter(x=xs, y=ys, mode="lines", name=line.label))
    for place, word in chart.markers.items():
        figure.add_vline(x=place, line={"dash": "dot", "width": 1}, annotation_text=word)
    figure.update_layout(title=chart.title, xaxis_title=chart.x_label, showlegend=True)
    figure.update_yaxes(
        type="log" if chart.log_y else "linear",
        exponentformat="e",
        rangemode="tozero" if chart.from_zero else "normal",
    )
    part: str = figure.to_html(full_html=False, include_plotlyjs=with_script)
    return part


def _write_png(path: Path, charts: Sequence[Chart], title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 4 * len(charts)), layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no window
    figure.suptitle(title)
    all_axes: Any = figure.subplots(len(charts), squeeze=False)
    for axes, chart in zip(all_axes[:, 0], charts):
        for line in chart.lines:
            points = _thin(line.points())
            axes.plot(*zip(*points) if points else ([], []), label=line.label, linewidth=1.2)
        for place in chart.markers:
            axes.axvline(place, linestyle=":", linewidth=0.8, color="grey")
        axes.set(xlabel=chart.x_label, title=chart.title, yscale="log" if chart.log_y else "linear")
        if chart.from_zero:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if len(chart.lines) > 1:
            axes.legend()
    figure.savefig(path, dpi=120)


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most some thousand points: the lowest and the highest of each stretch, in order."""
    if len(points) <= _MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def draw_text(chart: Chart, *, width: int | None = None, height: int = 15) -> str:
    """The chart as characters, a mark for each line; later lines lie above earlier ones."""
    if width is None:
        room = shutil.get_terminal_size((80, 24)).columns - 12
        width = min(_WIDEST, max(_NARROWEST, room))
    drawn = [_scale(line.points(), chart.log_y) for line in chart.lines]
    everything = [point for points in drawn for point in points]
    if not everything:
        return f"{chart.title}: nothing to draw"
    left, right = min(x for x, _ in everything), max(x for x, _ in everything)
    low, high = min(y for _, y in everything), max(y for _, y in everything)
    if chart.from_zero:
        low = min(0.0, low)
    grid = [[" "] * width for _ in range(height)]
    for number, points in enumerate(drawn):
        cells = [
            (_place(x, left, right, width), height - 1 - _place(y, low, high, height))
            for x, y in points
        ]
        for column, row in _join(cells):
            grid[row][column] = _MARKS[number % len(_MARKS)]
    shown = [chart.title] if chart.title else []
    digits = _digits(low, high)
    for row, cells_of_row in enumerate(grid):
        level = low + (high - low) * (height - 1 - row) / (height - 1)
        level = 10**level if chart.log_y else level
        label = f"{level:.{digits}g}" if row in (0, height // 2, height - 1) else ""
        shown.append(f"{label:>9} |{''.join(cells_of_row)}".rstrip())
    shown.append(f"{'':>9} +{'-' * width}")
    start, end = f"{left:,.4g}", f"{_spell(right)} {chart.x_label}"
    shown.append(f"{'':>11}{start}{end:>{max(1, width - len(start))}}")
    if len(chart.lines) > 1:
        shown += [
            f"{'':>11}{_MARKS[number % len(_MARKS)]} {line.label}"
            for number, line in enumerate(chart.lines)
        ]
    return "\n".join(shown)


def _digits(low: float, high: float) -> int:
    """As many as tell the levels of an axis apart, at least three."""
    largest = max(abs(low), abs(high))
    if high <= low or largest == 0:
        return 3
    return min(6, max(3, 2 + math.ceil(math.log10(largest / (high - low)))))


def _spell(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,.3g}"


def _scale(points: list[tuple[float, float]], log_y: bool) -> list[tuple[float, float]]:
    if not log_y:
        return points
    return [(x, math.log10(y)) for x, y in points if y > 0]


def _place(value: float, low: float, high: float, count: int) -> int:
    part = (value - low) / (high - low) if high > low else 0.0
    return min(count - 1, max(0, round(part * (count - 1))))


def _join(cells: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The cells of a line without gaps from one point to the next."""
    joined = cells[:1]
    for (column, row), (next_column, next_row) in itertools.pairwise(cells):
        steps = max(abs(next_column - column), abs(next_row - row), 1)
        joined += [
            (
                column + round((next_column - column) * number / steps),
                row + round((next_row - row) * number / steps),
            )
            for number in range(1, steps + 1)
        ]
    return joined
