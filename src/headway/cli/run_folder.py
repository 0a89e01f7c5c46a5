"""A run as its folder tells it: the log, the configuration, what it ran on, its incidents.

Owns: finding these files and reading curves from the log. Does not own: how they are shown.
Needs no torch, and works while the run is still going on.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headway.callbacks.log.json_reader import read_json_log
from headway.control.run_log import (
    LOG_NAMES,
    REWINDS,
    IncidentFinder,
    Places,
    incident_of_dump,
    log_folders,
    metrics_of,
    number_of,
    step_of,
)
from headway.errors import ConfigError, nearest, unknown

AXES = {"step": "steps", "tokens": "tokens", "time": "hours"}


@dataclass(frozen=True)
class Run:
    """What is known of a run."""

    folder: Path
    log_folder: Path
    name: str
    records: list[dict[str, Any]]
    config: dict[str, Any]
    environment: dict[str, Any]

    @property
    def summary(self) -> dict[str, Any] | None:
        """The record written at the end; None if the run did not get there."""
        last = self.records[-1] if self.records else {}
        return last if last.get("type") == "summary" else None


@dataclass(frozen=True)
class Series:
    """One metric over the course of a run."""

    xs: list[float] = field(default_factory=list)
    ys: list[float] = field(default_factory=list)

    def at(self, x: float) -> float | None:
        """The value at a place between the first point and the last, linearly in between."""
        if not self.xs or not self.xs[0] <= x <= self.xs[-1]:
            return None
        if (known := dict(self._points()).get(x)) is not None:
            return known
        for (x0, y0), (x1, y1) in itertools.pairwise(self._points()):
            if x0 <= x <= x1:
                return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        return self.ys[-1]

    def first_below(self, level: float) -> float | None:
        """Where the value first is at most `level`."""
        return next((x for x, y in self._points() if y <= level), None)

    def smooth(self, weight: float) -> Series:
        """A running mean that keeps `weight` of what was before; 0 changes nothing."""
        mean, total, smoothed = 0.0, 0.0, []
        for value in self.ys:
            if not math.isfinite(value):
                smoothed.append(value)
                continue
            mean = weight * mean + (1 - weight) * value
            total = weight * total + (1 - weight)  # so that the first points are not too low
            smoothed.append(mean / total)
        return Series(self.xs, smoothed)

    def _points(self) -> list[tuple[float, float]]:
        return list(zip(self.xs, self.ys))


def open_run(path: str) -> Run:
    """Read a run's folder, or one of its log files."""
    given = Path(path)
    if not given.exists():
        siblings = [p.name for p in given.parent.iterdir()] if given.parent.is_dir() else []
        hint = nearest(given.name, siblings)
        did_you_mean = f"; did you mean {given.parent / hint}?" if hint else ""
        raise ConfigError(f"RUN: {path} does not exist{did_you_mean}")
    log = given if given.is_file() else _find_log(given)
    folder = log.parent if given.is_file() else given
    records = [record for record in read_json_log(log) if "global_step" in record]
    if not records:
        raise ConfigError(f"RUN: {log} holds no record of a run")
    return Run(
        folder,
        log.parent,
        folder.resolve().name,
        records,
        _read_object(folder / "run" / "config.json"),
        _read_object(folder / "run" / "environment.json"),
    )


def open_runs(paths: list[str]) -> list[Run]:
    """Read several runs, named so that they can be told apart."""
    runs = [open_run(path) for path in paths]
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else replace(run, name=path)
        for run, path in zip(runs, paths)
    ]


def _find_log(folder: Path) -> Path:
    config = _read_object(folder / "run" / "config.json")
    for place in log_folders(folder, config, _read_object(folder / "run" / "environment.json")):
        for name in LOG_NAMES:
            if (place / name).is_file():
                return place / name
    inner = [p for p in sorted(folder.iterdir()) if any((p / n).is_file() for n in LOG_NAMES)]
    hint = f"; there is one in {inner[0]}" if inner else ""
    raise ConfigError(f"RUN: {folder} holds no {' or '.join(LOG_NAMES)}, the log of a run{hint}")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def metric_names(runs: list[Run]) -> list[str]:
    """Every metric that some run has recorded, in the order of appearance."""
    names: dict[str, None] = {}
    for run in runs:
        for record in run.records:
            names |= dict.fromkeys(metrics_of(record))
    return list(names)


def choose_metrics(runs: list[Run], wanted: list[str] | None) -> list[str]:
    """The metrics to show: those asked for, else the losses."""
    known = metric_names(runs)
    if not wanted:
        return [name for name in ("loss", "eval_loss") if name in known] or known[:1]
    problems = [f"--metric: {unknown('metric', n, known)}" for n in wanted if n not in known]
    if problems:
        raise ConfigError(problems)
    return wanted


def read_series(run: Run, metric: str, by: str = "step") -> Series:
    """A metric over steps, tokens, or hours of training.

    Hours are counted while a process trained: the time between a stop and the resume is left out.
    Of two records of one step the later one counts; what came after the step to which a run was
    rolled back, or from which it was resumed, did not happen.
    """
    found: dict[int, tuple[float, float]] = {}
    places = Places()
    for record in run.records:
        place, step = places.find(record), step_of(record)
        if record.get("type") in REWINDS:
            found = {known: point for known, point in found.items() if known <= step}
        if place is None:
            continue
        on_axes = {"step": place.step, "tokens": place.tokens, "time": place.seconds / 3600}
        value, x = number_of(record.get(metric)), on_axes[by]
        if value is not None and x is not None:
            found[step] = x, value
    return Series([x for x, _ in found.values()], [y for _, y in found.values()])


def find_incidents(run: Run) -> list[tuple[int, str]]:
    """What did not go as planned, as (step, what): restarts, rollbacks, values that are not
    finite, dumps of a crash."""
    finder = IncidentFinder()
    found = [incident for record in run.records for incident in finder.look(record)]
    last_step = step_of(run.records[-1])
    for path in sorted(run.folder.glob("last_metrics-rank*.json")):
        found.append(incident_of_dump(path.name, _read_object(path), last_step))
    return sorted(((i.step, i.message) for i in found), key=lambda incident: incident[0])
