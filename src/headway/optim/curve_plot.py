"""Pictures of learning-rate schedules: as text, as a PNG (matplotlib), as a page (plotly).

Owns the drawing. Does not own the schedules nor where they come from; needs no torch. The two
packages come with the extra `plot` and are imported when a file is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, missing_extra, unknown

ENDINGS = (".html", ".png")
_MARKS = "*o+x#@%&"
_SAMPLES_PER_COLUMN = 4


@dataclass(frozen=True)
class RateLine:
    """The rates of some param groups over the progress of a run."""

    label: str
    rate: Callable[[float], float]


def check_output(path: str | os.PathLike[str], option: str) -> None:
    """Refuse, before any work is done, a file that cannot be written here."""
    from importlib.util import find_spec

    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        raise ConfigError(f"{option}: {unknown('ending', ending, ENDINGS)}")
    package = "plotly" if ending == ".html" else "matplotlib"
    if find_spec(package) is None:
        raise missing_extra(package, "plot", f"{option} {os.fspath(path)}")


def sample(horizon: int, count: int, also: Sequence[float] = ()) -> list[int]:
    """Whole places from 0 to the horizon, at most about `count` of them, and some others."""
    count = max(2, min(count, horizon + 1))
    places = {round(number * horizon / (count - 1)) for number in range(count)}
    return sorted(places | {round(place) for place in also if 0 <= place <= horizon})


def draw_text(
    lines: Sequence[RateLine], horizon: int, unit: str, *, width: int = 72, height: int = 15
) -> str:
    """The rates as characters, a mark for each line; later lines lie above earlier ones."""
    columns = [_column_values(line, horizon, width) for line in lines]
    top = max((value for line in columns for part in line for value in part), default=0.0)
    grid = [[" "] * width for _ in range(height)]
    for number, line in enumerate(columns):
        mark = _MARKS[number % len(_MARKS)]
        before: int | None = None
        for column, values in enumerate(line):
            rows = [_row(value, top, height) for value in values]
            last = rows[-1]
            if before is not None:  # no gap between one column and the next
                rows.append(before + (rows[0] > before) - (rows[0] < before))
            for row in range(min(rows), max(rows) + 1):
                grid[row][column] = mark
            before = last
    shown = []
    for row, cells in enumerate(grid):
        level = top * (height - 1 - row) / (height - 1)
        label = f"{level:.2e}" if row in (0, height // 2, height - 1) else ""
        shown.append(f"{label:>9} |{''.join(cells)}".rstrip())
    shown.append(f"{'':>9} +{'-' * width}")
    end = f"{horizon:,} {unit}"
    shown.append(f"{'':>11}0{end:>{width - 1}}")
    if len(lines) > 1:
        shown += [
            f"{'':>11}{_MARKS[number % len(_MARKS)]} {line.label}"
            for number, line in enumerate(lines)
        ]
    return "\n".join(shown)


def _column_values(line: RateLine, horizon: int, width: int) -> list[list[float]]:
    """What the line comes to within each column, in order."""
    parts = []
    for column in range(width):
        places = [
            horizon * (column + number / _SAMPLES_PER_COLUMN) / width
            for number in range(_SAMPLES_PER_COLUMN)
        ]
        parts.append([line.rate(int(place)) for place in places])
    return parts


def _row(value: float, top: float, height: int) -> int:
    part = value / top if top > 0 else 0.0
    return min(height - 1, max(0, round((1 - part) * (height - 1))))


def write_plot(
    path: str | os.PathLike[str],
    lines: Sequence[RateLine],
    places: Sequence[int],
    unit: str,
    title: str,
) -> None:
    """Draw into a file; the ending says which kind."""
    check_output(path, "path")
    target = Path(path)
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    draw = _write_html if target.suffix.lower() == ".html" else _write_png
    draw(target, lines, places, unit, title)


def _write_png(
    path: Path, lines: Sequence[RateLine], places: Sequence[int], unit: str, title: str
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no window
    axes: Any = figure.subplots()
    for line in lines:
        axes.plot(places, [line.rate(place) for place in places], label=line.label, linewidth=1.5)
    axes.set(xlabel=unit, ylabel="learning rate", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend()
    figure.savefig(path, dpi=120)


def _write_html(
    path: Path, lines: Sequence[RateLine], places: Sequence[int], unit: str, title: str
) -> None:
    import plotly.graph_objects as graph

    figure = graph.Figure()
    for line in lines:
        rates = [line.rate(place) for place in places]
        figure.add_trace(graph.Scatter(x=list(places), y=rates, mode="lines", name=line.label))
    figure.update_layout(title=title, xaxis_title=unit, yaxis_title="learning rate")
    figure.update_yaxes(rangemode="tozero", exponentformat="e")
    # The page holds the script itself, so that it opens without a network.
    figure.write_html(path, include_plotlyjs=True)
