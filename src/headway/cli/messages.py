"""What the command line says: log lines and errors on stderr, results on stdout.

Owns: the form of a log line, of an error, of a table and of numbers for people.
Does not own: what is said. Colour appears in a terminal only, and never against NO_COLOR or
TERM=dumb.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from headway.config.finite import finite

_LEVEL_WORDS = {logging.INFO: "", logging.WARNING: "warning: ", logging.ERROR: "error: "}


class _StderrHandler(logging.Handler):
    """Writes to whatever stderr is at the time, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            word = _LEVEL_WORDS.get(record.levelno, f"{record.levelname.lower()}: ")
            write_line(f"{word}{self.format(record)}")
        except Exception:
            self.handleError(record)


def write_line(text: str) -> None:
    """One line on stderr; a progress bar there is drawn anew below it."""
    bars = sys.modules.get("tqdm")
    if bars is not None:
        bars.tqdm.write(text, file=sys.stderr)
    else:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def logging_to_stderr(level: int) -> Iterator[None]:
    """Show Headway's log, and warnings, as plain lines on stderr."""
    logger = logging.getLogger("headway")
    handler = _StderrHandler()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _show_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    logging.getLogger("headway").warning("%s", message)


def say_error(problems: Sequence[str]) -> None:
    """One line per problem on stderr."""
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    sys.stderr.flush()


def print_json(value: Any) -> None:
    """The value as JSON on stdout; what JSON has no number for becomes null."""
    print(json.dumps(finite(value), indent=2, default=str))


def print_table(rows: Sequence[tuple[str, str]], *, title: str | None = None) -> None:
    """Labels and what they stand for, aligned; in colour where stdout is a terminal."""
    width = max((len(label) for label, _ in rows), default=0)
    if in_colour():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, show_header=False, title_justify="left", box=None)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in rows:
            table.add_row(label, Text(text))
        Console().print(table)
        return
    if title:
        print(title)
    for label, text in rows:
        lines = text.splitlines() or [""]
        print(f"  {label:<{width}}  {lines[0]}")
        for line in lines[1:]:
            print(f"  {'':<{width}}  {line}")


def in_colour() -> bool:
    """Whether stdout is a terminal that colour is welcome on."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout.isatty()


def spell_bytes(number: float) -> str:
    """Bytes for people: 3.2 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:,.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"


def spell_count(number: int) -> str:
    """A count for people: all digits, and a short form where there are many of them."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number:,} ({number / size:.3g}{unit})"
    return f"{number:,}"
