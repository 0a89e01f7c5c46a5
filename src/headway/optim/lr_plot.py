"""A picture of a search for a learning rate: loss over rate, with what is suggested.

Owns: the two kinds of file, a PNG (matplotlib) and a page that can be zoomed (plotly), both from
the extra `plot`. Does not own: the figures in it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError, missing_extra, unknown

if TYPE_CHECKING:
    from headway.optim.lr_finder import LRFinderResult

ENDINGS = (".html", ".png")
_COLOURS = {"steepest": "#d62728", "minimum/10": "#2ca02c", "valley": "#ff7f0e"}


def check_ending(path: str | os.PathLike[str], option: str, *more: str) -> str:
    """The ending of a file that can be written, `more` ones included; `ConfigError` for others."""
    ending = Path(path).suffix.lower()
    if ending not in (*ENDINGS, *more):
        raise ConfigError(f"{option}: {unknown('ending', ending, (*ENDINGS, *more))}")
    return ending


def check_package(path: str | os.PathLike[str], option: str) -> None:
    """Refuse, before any work is done, a picture whose package is not installed."""
    from importlib.util import find_spec

    package = "plotly" if check_ending(path, option) == ".html" else "matplotlib"
    if find_spec(package) is None:
        raise missing_extra(package, "plot", f"{option}={os.fspath(path)}")


def plot(result: LRFinderResult, path: str | os.PathLike[str]) -> None:
    """Draw a result into a file; the ending says which kind."""
    draw = _draw_html if check_ending(path, "path") == ".html" else _draw_png
    Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    draw(result, Path(path))


def _title(result: LRFinderResult) -> str:
    if result.suggested_lr is None:
        return f"no suggestion: {result.reason}"
    return f"suggested learning rate: {result.suggested_lr:.3g}"


def _bounds(result: LRFinderResult) -> tuple[float, float]:
    """The losses to show: one that has run away would press all others to the bottom."""
    low, high = min(result.losses), max(result.losses)
    ceiling = result.losses[0] + (result.losses[0] - low)
    margin = 0.05 * max(min(high, ceiling) - low, 1e-12)
    return low - margin, max(min(high, ceiling), result.losses[0]) + margin


def _draw_png(result: LRFinderResult, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib", "plot", f"path={path}") from error
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no window
    axes: Any = figure.subplots()
    for run in result.runs if len(result.runs) > 1 else ():
        axes.plot(run.lrs, run.losses, color="#1f77b4", alpha=0.2, linewidth=0.8)
    axes.plot(result.lrs, result.losses, color="#1f77b4", alpha=0.5, linewidth=1, label="loss")
    axes.plot(result.lrs, result.smoothed_losses, color="black", linewidth=1.5, label="smoothed")
    for name, rate in result.suggestions.items():
        axes.axvline(rate, color=_COLOURS[name], linestyle="--", label=f"{name}: {rate:.2e}")
        low, high = result.spread.get(name, (rate, rate))
        if high > low:
            axes.axvspan(low, high, color=_COLOURS[name], alpha=0.1)
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss", title=_title(result))
    if result.losses:
        axes.set_ylim(*_bounds(result))
    axes.legend()
    figure.savefig(path, dpi=120)


def _draw_html(result: LRFinderResult, path: Path) -> None:
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise missing_extra("plotly", "plot", f"path={path}") from error
    figure = graph_objects.Figure()
    for number, run in enumerate(result.runs if len(result.runs) > 1 else ()):
        figure.add_scatter(x=run.lrs, y=run.losses, name=f"seed {number}", opacity=0.3)
    figure.add_scatter(x=result.lrs, y=result.losses, name="loss", opacity=0.6)
    figure.add_scatter(x=result.lrs, y=result.smoothed_losses, name="smoothed")
    for name, rate in result.suggestions.items():
        figure.add_vline(
            x=rate,
            line={"dash": "dash", "color": _COLOURS[name]},
            annotation_text=f"{name}: {rate:.2e}",
        )
    figure.update_xaxes(type="log", title="learning rate", exponentformat="power")
    figure.update_yaxes(title="loss")
    if result.losses:
        figure.update_yaxes(range=_bounds(result))
    figure.update_layout(title=_title(result))
    # The script is in the file: it opens without a network.
    figure.write_html(path, include_plotlyjs=True)
