"""What the records of a run's log say: numbers, places on the axes of curves, incidents.

Owns: the names of the log and what its records mean, one record after another, so that a log can
be read whole or as it grows. Does not own: files (callbacks/log/json_reader.py, cli/run_folder.py,
dashboard/), nor how anything is shown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG_NAMES = ("trainer_logs.jsonl", "trainer_logs.json")
SAMPLES_NAME = "eval_text.jsonl"
STARTS = ("start", "resume")
REWINDS = (*STARTS, "rollback")
"""Records after whose step nothing has happened yet, whatever was recorded before."""
_NOT_MEASURED = (*REWINDS, "summary")
_NOT_METRICS = {"type", "timestamp", "global_step", "step", "max_steps"}
_BETWEEN = " \t\r\n,[]\ufeff\0"


def log_folders(
    folder: Path, config: Mapping[str, Any], environment: Mapping[str, Any]
) -> list[Path]:
    """Where the log of the run in a folder may lie: there, or in the `logging_dir` it had."""
    args, started_in = config.get("args"), environment.get("directory", ".")
    chosen = args.get("logging_dir") if isinstance(args, dict) else None
    if not isinstance(chosen, str) or not isinstance(started_in, str) or "\0" in chosen:
        return [folder]
    # A relative folder is meant from where the run was started.
    return [folder, Path(started_in, chosen)]


def find_records(text: str) -> Iterator[dict[str, Any] | None]:
    """Every object at the start of a line or after another; None for a place in between that
    cannot be read."""
    decoder = json.JSONDecoder()
    position, end = 0, len(text)
    while True:
        while position < end and text[position] in _BETWEEN:
            position += 1
        if position >= end:
            return
        try:
            record, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            following = text.find("\n", position)
            if following < 0:
                return
            if text[following:].strip(_BETWEEN):
                yield None
            position = following
            continue
        yield record if isinstance(record, dict) else None


def number_of(value: Any) -> float | None:
    """A recorded value as a number: NaN is written as text, and lists hold a value per rank."""
    if isinstance(value, float):  # almost all of them
        return value
    if isinstance(value, str):
        return float(value) if value.lower().lstrip("-") in ("nan", "inf") else None
    if isinstance(value, list):
        numbers = [n for n in map(number_of, value) if n is not None]
        # Of numbers among which is NaN, the largest depends on their order.
        return next((n for n in numbers if math.isnan(n)), max(numbers, default=None))
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number beyond any float
        return None


def metrics_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a record that make curves; none for one that only says what happened."""
    if record.get("type") in _NOT_MEASURED:
        return {}
    numbers: dict[str, float] = {}
    for key, value in record.items():
        number = value if value.__class__ is float else number_of(value)
        if number is not None and key not in _NOT_METRICS:
            numbers[key] = number
    return numbers


@dataclass(frozen=True)
class Place:
    """Where a record lies on the axes."""

    step: float
    tokens: float | None
    seconds: float
    """Of training: the time between a stop and the resume is left out."""


class Places:
    """Finds the places of a log's records, which must be given in order."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._before_s: float | None = None
        self._tokens: float | None = None

    def find(self, record: Mapping[str, Any]) -> Place | None:
        """None for a record that only says what happened."""
        now_s, kind = number_of(record.get("timestamp")), record.get("type")
        if now_s is not None and math.isfinite(now_s):
            if self._before_s is not None and kind not in STARTS:
                self._seconds += max(0.0, now_s - self._before_s)
            self._before_s = now_s
        if kind in _NOT_MEASURED:
            return None
        self._tokens = number_of(record.get("total_tokens", self._tokens))
        step = number_of(record.get("global_step"))
        if step is None or not math.isfinite(step):
            return None
        return Place(step, self._tokens, self._seconds)


@dataclass(frozen=True)
class Incident:
    """Something that did not go as planned."""

    kind: str
    step: int
    message: str
    timestamp: float | None = None


class IncidentFinder:
    """Finds restarts, rollbacks and values that are not finite in a log's records, in order."""

    def __init__(self) -> None:
        self._before_s: float | None = None

    def look(self, record: Mapping[str, Any]) -> list[Incident]:
        step, now_s = step_of(record), number_of(record.get("timestamp"))
        found = [
            Incident(kind, step, message, now_s) for kind, message in self._messages(record, now_s)
        ]
        self._before_s = now_s or self._before_s
        return found

    def _messages(
        self, record: Mapping[str, Any], now_s: float | None
    ) -> Iterator[tuple[str, str]]:
        kind, source = record.get("type"), record.get("loaded_checkpoint", "?")
        if kind == "resume":
            away_s = now_s - self._before_s if now_s and self._before_s else -1.0
            # Below 0 where the clock was set back, or another machine's is behind.
            away = f", {away_s:,.0f} s after the last record" if away_s >= 0 else ""
            yield "resume", f"resumed from {source}{away}"
        elif kind == "rollback":
            yield "rollback", f"rolled back to {source}"
        if record.get("skipped_steps"):
            yield "withheld", f"{record['skipped_steps']} steps withheld, not finite"
        strange = [
            key
            for key, value in record.items()
            if value.__class__ is not int and not math.isfinite(number_of(value) or 0.0)
        ]
        if strange:
            yield "not_finite", f"not finite: {', '.join(strange)}"


def incident_of_dump(name: str, dump: Mapping[str, Any], last_step: int) -> Incident:
    """What a process that failed left behind, as `last_metrics-rank*.json`."""
    error = f": {dump['error']}" if dump.get("error") else ""
    step = step_of(dump) if "global_step" in dump else last_step
    when = number_of(dump.get("timestamp"))
    return Incident("failure", step, f"a process failed and left {name}{error}", when)


def step_of(record: Mapping[str, Any]) -> int:
    """The step of a record; 0 where it has none."""
    step = number_of(record.get("global_step"))
    return int(step) if step is not None and math.isfinite(step) else 0
