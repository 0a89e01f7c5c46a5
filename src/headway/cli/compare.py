"""`headway compare RUN_A RUN_B`: what differs between two runs, and which got further."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from headway.cli.plot import add_curve_arguments, check_curve_options, make_chart

if TYPE_CHECKING:
    from headway.cli.run_folder import Run, Series

# Other places and times do not make another experiment.
_CIRCUMSTANCES = ("created", "directory", "command")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.usage = (
        "headway compare RUN_A RUN_B [--metric NAME ...] [--smooth WEIGHT] [--log-y] "
        "[--output FILE.png|FILE.html] [--json]"
    )
    parser.add_argument("first", metavar="RUN_A", help="output_dir of a run, or its log")
    parser.add_argument("second", metavar="RUN_B", help="the run to compare it with")
    add_curve_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Print the differences; draw the curves by step, tokens and time where a file is named."""
    from headway.cli.charts import write_charts
    from headway.cli.messages import print_json
    from headway.cli.run_folder import AXES, choose_metrics, open_runs

    check_curve_options(options)
    runs = open_runs([options.first, options.second])
    metrics = choose_metrics(runs, options.metric)
    facts = compare_runs(runs, metrics, options.smooth)
    if options.output is not None:
        charts = [make_chart(runs, m, by, options) for m in metrics for by in AXES]
        write_charts(options.output, charts, " and ".join(r.name for r in runs))
    if options.json:
        print_json(facts)
    else:
        _print(runs, facts)
        if options.output is not None:
            print(f"\ndrawn into {options.output}")
    return 0


def compare_runs(runs: list[Run], metrics: list[str], smooth: float = 0.0) -> dict[str, Any]:
    """Configuration, circumstances and curves of two runs, side by side."""
    from headway.cli.run_folder import AXES, read_series
    from headway.config.differences import CIRCUMSTANTIAL, differences

    first, second = runs
    config = differences(first.config, second.config)
    environments = [
        {key: value for key, value in one.environment.items() if key not in _CIRCUMSTANCES}
        for one in runs
    ]
    curves = []
    for metric in metrics:
        for by in AXES:
            pair = [read_series(one, metric, by).smooth(smooth) for one in runs]
            if all(series.xs for series in pair):
                curves.append({"metric": metric, "by": by, **_compare_series(*pair)})
    return {
        "runs": [one.name for one in runs],
        "config": {key: pair for key, pair in config.items() if key not in CIRCUMSTANTIAL},
        "environment": differences(*environments),
        "curves": curves,
    }


def _compare_series(first: Series, second: Series) -> dict[str, Any]:
    """Both curves where both have values, and where each reaches the better of the two ends."""
    place = min(first.xs[-1], second.xs[-1])
    values = first.at(place), second.at(place)
    bests = [min(filter(math.isfinite, one.ys), default=None) for one in (first, second)]
    level = None if None in bests else max(bests)  # type: ignore[type-var]
    return {
        "at": place,
        "values": values,
        "difference": None if None in values else values[1] - values[0],  # type: ignore[operator]
        "level": level,
        "reached_at": [None if level is None else s.first_below(level) for s in (first, second)],
    }


def _print(runs: list[Run], facts: dict[str, Any]) -> None:
    from headway.cli.messages import print_table
    from headway.cli.run_folder import AXES

    for kind in ("config", "environment"):
        rows = [(key, f"{a!s}  ->  {b!s}") for key, (a, b) in facts[kind].items()]
        print_table(
            rows or [("", "no difference")], title=f"{kind}: {runs[0].name} -> {runs[1].name}"
        )
        print()
    for curve in facts["curves"]:
        unit = AXES[curve["by"]]
        first, second = (_spell(value) for value in curve["values"])
        reached = [_spell(place) for place in curve["reached_at"]]
        rows = [
            (f"at {_spell(curve['at'])} {unit}", f"{first}  ->  {second}"),
            (f"{_spell(curve['level'])} reached at", f"{reached[0]}  ->  {reached[1]} {unit}"),
        ]
        print_table(rows, title=f"{curve['metric']} by {curve['by']}")


def _spell(value: float | None) -> str:
    if value is None:
        return "never"
    whole = math.isfinite(value) and value == int(value)
    return f"{value:,.0f}" if whole and abs(value) >= 100 else f"{value:,.5g}"
