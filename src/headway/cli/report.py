"""`headway report RUN`: everything about a run in one page that needs nothing else to open."""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.cli.charts import Chart
    from headway.cli.run_folder import Run

_LOSSES = ("loss", "eval_loss")
_ALSO_SHOWN = ("learning_rate", "grad_norm", "tok_per_sec", "mfu", "weight_norm", "peak_mem")
_MOST_SAMPLES, _MOST_INCIDENTS = 20, 200
_STYLE = """<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; }
th, td { text-align: left; vertical-align: top; padding: 0.15rem 1rem 0.15rem 0; }
td { overflow-wrap: anywhere; } th { font-weight: 600; white-space: nowrap; }
pre { background: #f4f4f4; padding: 0.6rem; white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin-bottom: 1rem; }
</style>"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.usage = "headway report RUN [--output FILE.html]"
    parser.add_argument("run", metavar="RUN", help="output_dir of a run")
    parser.add_argument("--output", metavar="FILE", help="the page to write (RUN/report.html)")


def run(options: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    from headway.cli.charts import check_output
    from headway.cli.run_folder import open_run

    if options.output is not None:
        check_output(options.output, "--output", ".html")
    read = open_run(options.run)
    target = Path(options.output or read.folder / "report.html")
    check_output(target, "--output", ".html")
    page = make_page(read)
    try:
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        _replace(target, page)
    except OSError as error:
        raise ConfigError(f"--output: {target} cannot be written: {error.strerror}") from error
    print(f"written: {target}")
    return 0


def _replace(target: Path, text: str) -> None:
    """Write so that a reader sees the page before or the whole new one."""
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def make_page(read: Run) -> str:
    """The report of a run as a page."""
    from headway.cli.charts import html_page, html_part

    parts = [_STYLE, _table(_overview(read)), _post_mortem(read), "<h2>Curves</h2>"]
    charts = _charts(read)
    parts += [html_part(chart, with_script=number == 0) for number, chart in enumerate(charts)]
    parts += ["<h2>Incidents</h2>", _incidents(read)]
    parts += ["<h2>Checkpoints</h2>", _checkpoints(read)]
    samples = _samples(read)
    if samples:
        parts += ["<h2>Samples</h2>", samples]
    parts += ["<h2>Configuration</h2>", _nested(read.config, "run/config.json")]
    parts += ["<h2>Environment</h2>", _nested(read.environment, "run/environment.json")]
    return html_page(read.name, parts)


def _overview(read: Run) -> list[tuple[str, Any]]:
    from headway.control.run_log import step_of

    first, last = read.records[0], read.records[-1]
    ended = "yes" if read.summary else "no: it is going on, or it was cut off"
    rows: list[tuple[str, Any]] = [
        ("folder", read.folder),
        ("first record", _when(first.get("timestamp"))),
        ("last record", _when(last.get("timestamp"))),
        ("step", f"{step_of(last):,}"),
        ("ended by itself", ended),
    ]
    for key, value in (read.summary or {}).items():
        if key not in ("type", "timestamp", "global_step", "step"):
            rows.append((key, f"{value:,.6g}" if isinstance(value, float) else value))
    return rows


def _when(seconds: Any) -> str:
    if not isinstance(seconds, int | float):
        return "?"
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):  # no clock showed that
        return "?"


def _charts(read: Run) -> list[Chart]:
    from headway.cli.charts import Chart, Line
    from headway.cli.run_folder import AXES, find_incidents, metric_names, read_series

    known = metric_names([read])
    restarts = {float(step): "resumed" for step, what in find_incidents(read) if "resumed" in what}
    charts = []
    for by in AXES:
        lines = [
            Line(name, series.xs, series.ys)
            for name in _LOSSES
            if name in known
            for series in (read_series(read, name, by),)
        ]
        marks = restarts if by == "step" else {}
        charts.append(Chart(f"loss by {by}", AXES[by], lines, markers=marks))
    for name in _ALSO_SHOWN:
        if name in known:
            series = read_series(read, name)
            charts.append(Chart(name, AXES["step"], [Line(name, series.xs, series.ys)]))
    return charts


def _post_mortem(read: Run) -> str:
    """How the run failed, if it did and nothing has mended it since."""
    from headway.engine.post_mortem import describe, read_report, render_text

    report = read_report(read.folder)
    if report is None:
        return ""
    try:
        title, text = describe(report), render_text(report)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return "<h2>Post-mortem</h2><p>post_mortem.json cannot be read.</p>"
    return (
        f"<h2>Post-mortem</h2><p><b>{escape(title)}</b></p>"
        f"<details open><summary>post_mortem.txt</summary><pre>{escape(text)}</pre></details>"
    )


def _incidents(read: Run) -> str:
    from headway.cli.run_folder import find_incidents

    found = find_incidents(read)
    if not found:
        return "<p>None.</p>"
    more = (
        f"<p>… and {len(found) - _MOST_INCIDENTS} more.</p>" if len(found) > _MOST_INCIDENTS else ""
    )
    return _table((f"step {step:,}", what) for step, what in found[:_MOST_INCIDENTS]) + more


def _checkpoints(read: Run) -> str:
    from headway.checkpoint.manifest import committed
    from headway.cli.messages import spell_bytes

    rows = []
    for found in committed(read.folder):
        size = spell_bytes(sum(file.size for file in found.manifest.files.values()))
        metric = "" if found.manifest.metric is None else f", metric {found.manifest.metric:g}"
        rows.append((found.path.name, f"{found.kind}, {size}, {found.manifest.created}{metric}"))
    return _table(rows) if rows else "<p>None in its folder.</p>"


def _samples(read: Run) -> str:
    """What the model wrote in the course of the run, the latest first."""
    from headway.callbacks.log.json_reader import read_json_log
    from headway.control.run_log import SAMPLES_NAME

    log = read.log_folder / SAMPLES_NAME
    if not log.is_file():
        return ""
    shown: list[str] = []
    for record in reversed(read_json_log(log)[-_MOST_SAMPLES:]):
        samples = record.get("samples")
        texts = "".join(
            f"<pre><b>{escape(str(sample.get('prompt', '')))}</b>"
            f"{escape(str(sample.get('text', '')))}</pre>"
            for sample in (samples if isinstance(samples, list) else [])
            if isinstance(sample, dict)
        )
        opened = " open" if not shown else ""
        step = record.get("global_step", "?")
        shown.append(
            f"<details{opened}><summary>step {escape(str(step))}</summary>{texts}</details>"
        )
    return "\n".join(shown)


def _nested(value: dict[str, Any], source: str) -> str:
    from headway.config.differences import flatten

    if not value:
        return f"<p>{escape(source)} is not there.</p>"
    return f"<details><summary>{escape(source)}</summary>{_table(flatten(value))}</details>"


def _table(rows: Iterable[tuple[str, Any]] | Sequence[tuple[str, Any]]) -> str:
    lines = [
        f"<tr><th>{escape(str(label))}</th><td>{escape(str(value))}</td></tr>"
        for label, value in rows
    ]
    return f"<table>{''.join(lines)}</table>"
