"""What the page asks about runs, answered from their files.

Owns: the questions, the values they take, the form of the answers. Does not own: reading (run.py),
the wire (routes.py), what only a live job knows (live.py). Blocks while it reads: it belongs into
a thread or a process of its own.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headway.config.differences import ABSENT, CIRCUMSTANTIAL, flatten
from headway.control.dashboard.columns import AXES
from headway.control.dashboard.decimation import Floats, choose_points, smooth
from headway.control.dashboard.run import Run
from headway.control.dashboard.shelf import Shelf
from headway.control.lost_run import examine
from headway.control.run_log import number_of, step_of
from headway.control.schema import BadRequest
from headway.errors import unknown

Query = Sequence[tuple[str, str]]

_UNITS = {"step": "steps", "tokens": "tokens", "time": "seconds"}
_USUAL = {
    "loss": ("loss", "train/CE loss"),
    "eval_loss": ("eval_loss",),
    "learning_rate": ("learning_rate", "optim/LR (group 0)"),
    "grad_norm": ("grad_norm", "optim/total grad norm"),
    "tokens_per_second": ("tokens_per_second", "tok_per_sec"),
    "mfu": ("mfu",),
    "memory": ("memory", "peak_mem"),
}
"""What the list of runs shows, and the names under which it may be recorded."""
_LIST_S, _GLANCE_S, _READ_S = 1.5, 0.05, 8.0
_MOST_KEYS, _MOST_DIFFED, _MOST_SAMPLES = 64, 16, 200
_LEAST_POINTS, _MOST_POINTS = 10, 20_000


class Answers:
    """Answers about the runs of a shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._about_run: dict[str, Callable[[Run, Query], Any]] = {
            "keys": self._keys,
            "series": self._series,
            "config": self._config,
            "checkpoints": self._checkpoints,
            "samples": self._samples,
            "incidents": self._incidents,
            "post_mortem": self._post_mortem,
            "known": self._known,
        }

    def ask(self, what: str, run_id: str | None = None, query: Query = ()) -> bytes:
        """The answer as JSON; `BadRequest` says what would have been allowed."""
        if run_id is not None:
            value = self._about_run[what](self._shelf.get(run_id), query)
        else:
            value = {"runs": self._runs, "diff": self._diff}[what](query)
        return json.dumps(value, allow_nan=False).encode()

    def verify(self, run_id: str, name: str) -> dict[str, Any]:
        """Read every byte of a checkpoint."""
        return self._shelf.get(run_id).checkpoints.verify(name)

    # -- all runs -----------------------------------------------------------------------------

    def _runs(self, query: Query) -> Any:
        _read_query(query, ())
        deadline, runs = time.monotonic() + _LIST_S, self._shelf.runs()
        # A glance at each comes first: short logs do not wait for the long ones.
        for patience_s, chosen in ((_GLANCE_S, runs), (_LIST_S, (r for r in runs if not r.at_end))):
            for run in chosen:
                until = min(deadline, time.monotonic() + patience_s)
                left_s = until - time.monotonic()
                # One whose curves are being read for somebody else is shown as far as it is.
                if left_s > 0 and run.lock.acquire(timeout=left_s):
                    try:
                        run.catch_up(until)
                    finally:
                        run.lock.release()
        left_out = self._shelf.num_left_out
        return {"runs": [_describe(run) for run in runs], "left_out": left_out}

    def _diff(self, query: Query) -> Any:
        given = _read_query(query, ("runs",))
        ids = [word for word in given.get("runs", "").split(",") if word]
        if not 1 <= len(ids) <= _MOST_DIFFED:
            raise BadRequest(400, f"runs: give 1 to {_MOST_DIFFED} ids of runs, with commas")
        runs = [self._shelf.get(run_id) for run_id in ids]
        flat = [_flat(run.shown_config()) for run in runs]
        rows = []
        for key in sorted({key for one in flat for key in one}):
            values = [one.get(key, ABSENT) for one in flat]
            if key not in CIRCUMSTANTIAL and any(value != values[0] for value in values):
                rows.append({"key": key, "values": values})
        return {"runs": ids, "rows": rows}

    # -- one run ------------------------------------------------------------------------------

    def _known(self, run: Run, query: Query) -> Any:
        return {"id": run.id}

    def _keys(self, run: Run, query: Query) -> Any:
        _read_query(query, ())
        keys = []
        with run.lock:
            for name in self._columns(run).names():
                column = run.columns.get(name) if run.columns else None
                if column is not None:
                    first, last = map(int, column.first_and_last_step())
                    count = column.num_recorded
                    keys.append(
                        {"name": name, "count": count, "first_step": first, "last_step": last}
                    )
            return {"keys": keys, "x": list(AXES), "complete": run.at_end}

    def _series(self, run: Run, query: Query) -> Any:
        # A name may hold a comma, so that it can also be given by itself, as often as needed.
        names = [value for key, value in query if key == "key"]
        rest = [(key, value) for key, value in query if key != "key"]
        given = _read_query(rest, ("keys", "key", "x", "points", "from", "to", "smoothing"))
        axis = given.get("x", "step")
        if axis not in AXES:
            raise BadRequest(400, "x: " + unknown("axis", axis[:64], AXES), valid_x=list(AXES))
        points = _whole_number(given, "points", 1500, _LEAST_POINTS, _MOST_POINTS)
        low, high = _bound(given, "from", -math.inf), _bound(given, "to", math.inf)
        weight = _bound(given, "smoothing", 0.0)
        if not 0 <= weight < 1:
            raise BadRequest(400, "smoothing must be a number from 0 up to below 1")
        series, until = {}, None
        with run.lock:
            columns = self._columns(run)
            names = [name for name in [*names, *given.get("keys", "").split(",")] if name]
            if not 1 <= len(names) <= _MOST_KEYS:
                raise BadRequest(
                    400,
                    f"keys: give 1 to {_MOST_KEYS} names of metrics",
                    valid_keys=columns.names(),
                )
            for name in names:
                column = columns.get(name)
                xs, ys = np.empty(0), np.empty(0)
                if column is not None:
                    xs, ys = column.points(axis)
                    until = max(until or 0.0, float(xs[-1])) if len(xs) else until
                total = 0 if column is None else column.num_recorded
                series[name] = _decimate(xs, ys, low, high, points, total, weight)
            return {
                "x": axis,
                "unit": _UNITS[axis],
                "series": series,
                "until": until,
                "complete": run.at_end,
            }

    def _columns(self, run: Run) -> Any:
        run.catch_up(time.monotonic() + _READ_S, with_columns=True)
        self._shelf.note_curves(run)
        return run.columns

    def _config(self, run: Run, query: Query) -> Any:
        _read_query(query, ())
        config, environment = run.shown_config(), run.environment()
        return {
            "config": _flat(config),
            "environment": _flat(environment),
            "files": run.config_files(),
        }

    def _checkpoints(self, run: Run, query: Query) -> Any:
        _read_query(query, ())
        listed, num_left_out = run.checkpoints.list(run.args())
        return {"checkpoints": listed, "left_out": num_left_out}

    def _samples(self, run: Run, query: Query) -> Any:
        given = _read_query(query, ("limit",))
        most = _whole_number(given, "limit", 50, 1, _MOST_SAMPLES)
        with run.lock:
            run.catch_up(time.monotonic() + _LIST_S)
            return {"samples": [_plain(sample) for sample in run.samples(most)]}

    def _incidents(self, run: Run, query: Query) -> Any:
        _read_query(query, ())
        with run.lock:
            run.catch_up(time.monotonic() + _READ_S)
            found = [_plain(incident) for incident in run.list_incidents()]
            return {"incidents": found, "total": run.num_incidents, "complete": run.at_end}

    def _post_mortem(self, run: Run, query: Query) -> Any:
        _read_query(query, ())
        with run.lock:
            run.catch_up(time.monotonic() + _READ_S)
            lost = run.state(time.time()) == "lost"
            found = examine(run) if lost else run.post_mortem()
        if found is None:
            raise BadRequest(404, "the run has left no post-mortem: it has not failed")
        return _plain(found)


def _describe(run: Run) -> dict[str, Any]:
    now, figures = time.time(), run.latest
    latest = {
        name: _wire(figures[recorded])
        for name, names in _USUAL.items()
        for recorded in [next((n for n in names if n in figures), None)]
        if recorded is not None
    }
    max_steps = run.max_steps
    if max_steps is None:
        max_steps = number_of(run.args().get("max_steps"))
    epoch, state = number_of(run.last.get("epoch")), run.state(now)
    return {
        "id": run.id,
        "name": run.name,
        "run_name": run.run_name,
        "output_dir": str(run.folder),
        "state": state,
        "step": step_of(run.last),
        "max_steps": int(max_steps) if max_steps and 0 < max_steps < 2**53 else None,
        "epoch": _wire(epoch),
        "started_at": _wire(run.started_at),
        "updated_at": _wire(run.updated_at()),
        "controllable": False,
        "job_id": None,
        "latest": latest,
        "incidents": run.num_incidents,
        "post_mortem": state == "lost" or run.has_post_mortem,
        "complete": run.at_end,
    }


def _decimate(
    xs: Floats, ys: Floats, low: float, high: float, points: int, total: int, weight: float
) -> dict[str, Any]:
    # Before any point is left out: the middle of the lowest and the highest is no mean.
    means = smooth(ys, weight) if weight else None
    if low > -math.inf or high < math.inf:
        # One more on each side, so that the line leaves the picture where it should.
        first = max(0, int(np.searchsorted(xs, low, side="left")) - 1)
        last = int(np.searchsorted(xs, high, side="right")) + 1
        xs, ys = xs[first:last], ys[first:last]
        means = None if means is None else means[first:last]
        total = len(xs)
    kept = choose_points(xs, ys, points)
    answer = {
        "x": _numbers(xs[kept]),
        "y": [_wire(value) for value in ys[kept].tolist()],
        "total": total,
        "decimated": len(kept) < total,
    }
    if means is not None:
        answer["smooth"] = [y if math.isfinite(y) else None for y in means[kept].tolist()]
    return answer


def _numbers(xs: Floats) -> list[float] | list[int]:
    """Places on an axis; whole ones without a point, which is shorter."""
    numbers: list[float] = xs.tolist()
    if all(number.is_integer() for number in numbers):
        return [int(number) for number in numbers]
    return numbers


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in flatten(config) if config}


def _plain(value: Any) -> Any:
    """What was read from JSON, in strict JSON: a log may hold NaN."""
    if isinstance(value, float):
        return _wire(value)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value


def _wire(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _read_query(query: Query, allowed: Sequence[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for key, value in query:
        if key not in allowed:
            word = unknown("parameter", key[:64], allowed) if allowed else "no parameter is taken"
            raise BadRequest(400, word, valid_parameters=list(allowed))
        if key in given:
            raise BadRequest(400, f"{key} is given twice", valid_parameters=list(allowed))
        given[key] = value
    return given


def _whole_number(given: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    text = given.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        raise BadRequest(
            400, f"{name} must be a whole number from {least} to {most}, not {text[:64]!r}"
        )
    return int(text)


def _bound(given: dict[str, str], name: str, default: float) -> float:
    text = given.get(name, "")
    if not text:
        return default
    try:
        number = float(text[:64])
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadRequest(400, f"{name} must be a number on the axis x, not {text[:64]!r}")
    return number
