"""`headway plot RUN...`: the curves of runs, in the terminal or in a file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.cli.charts import Chart
    from headway.cli.run_folder import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.usage = (
        "headway plot RUN... [--metric NAME ...] [--by step|tokens|time] [--smooth WEIGHT] "
        "[--log-y] [--output FILE.png|FILE.html] [--json]"
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="output_dir of a run, or its log")
    add_curve_arguments(parser)
    parser.add_argument(
        "--by", default="step", metavar="AXIS", help="step (default), tokens, or time"
    )


def add_curve_arguments(parser: argparse.ArgumentParser) -> None:
    """What all verbs that show curves take."""
    parser.add_argument(
        "--metric", action="append", metavar="NAME", help="loss and eval_loss by default; repeat"
    )
    parser.add_argument(
        "--smooth", type=float, default=0.0, metavar="WEIGHT", help="0 (default) up to below 1"
    )
    parser.add_argument("--log-y", action="store_true", help="a logarithmic scale of values")
    parser.add_argument("--output", metavar="FILE", help="draw into this .png or .html file")
    parser.add_argument("--json", action="store_true", help="print JSON, with all points")


def run(options: argparse.Namespace) -> int:
    """Draw each metric of the runs in a chart of its own."""
    from headway.cli.charts import draw_text, write_charts
    from headway.cli.messages import print_json
    from headway.cli.run_folder import choose_metrics, open_runs, read_series

    check_curve_options(options)
    check_axis(options.by)
    runs = open_runs(options.runs)
    metrics = choose_metrics(runs, options.metric)
    if options.json:
        curves = [
            {"run": r.name, "metric": m, "x": series.xs, "y": series.ys}
            for m in metrics
            for r in runs
            for series in (read_series(r, m, options.by).smooth(options.smooth),)
        ]
        print_json({"by": options.by, "curves": curves})
    charts = [make_chart(runs, m, options.by, options) for m in metrics]
    if options.output is not None:
        write_charts(options.output, charts, ", ".join(r.name for r in runs))
        if not options.json:
            print(f"drawn into {options.output}")
    elif not options.json:
        print("\n\n".join(draw_text(chart) for chart in charts))
    return 0


def check_curve_options(options: argparse.Namespace) -> None:
    """Refuse what cannot be drawn, before anything is read."""
    from headway.cli.charts import check_output

    if not 0 <= options.smooth < 1:
        raise ConfigError(f"--smooth: must be at least 0 and below 1, got {options.smooth}")
    if options.output is not None:
        check_output(options.output, "--output")


def check_axis(by: str) -> None:
    """Refuse an axis that there is not."""
    from headway.cli.run_folder import AXES
    from headway.errors import unknown

    if by not in AXES:
        raise ConfigError(f"--by: {unknown('axis', by, AXES)}")


def make_chart(runs: list[Run], metric: str, by: str, options: argparse.Namespace) -> Chart:
    """One metric of some runs."""
    from headway.cli.charts import Chart, Line
    from headway.cli.run_folder import AXES, read_series

    lines = []
    for one in runs:
        series = read_series(one, metric, by).smooth(options.smooth)
        lines.append(Line(one.name, series.xs, series.ys))
    return Chart(metric, AXES[by], lines, log_y=options.log_y)
