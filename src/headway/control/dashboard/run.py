"""One run as its folder tells it, read as far as it has come.

Owns: the files of a run (log, configuration, samples, what a failure left) and what follows from
them. Does not own: which runs there are (shelf.py), what a live job says (live.py), the form of
answers (answers.py).
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headway.config.snapshot import redact
from headway.control.dashboard.checkpoints import Checkpoints
from headway.control.dashboard.columns import Columns
from headway.control.dashboard.files import is_file_inside, modified_at, read_end, read_object
from headway.control.dashboard.tail import LogTail, Piece, parse_line
from headway.control.run_log import (
    LOG_NAMES,
    REWINDS,
    SAMPLES_NAME,
    STARTS,
    Incident,
    IncidentFinder,
    Places,
    incident_of_dump,
    log_folders,
    metrics_of,
    number_of,
    step_of,
)
from headway.engine.process_note import FOLDER_NAME, NOTE_NAME, look_at_process

POST_MORTEM_NAME = "post_mortem.json"
CONFIG_FILES = ("config.json", "environment.json")
_DUMP = re.compile(r"last_metrics-rank\d{1,9}\.json", re.ASCII)
_MOST_INCIDENTS = 1000
_MOST_LATEST = 512
_MOST_DUMPS = 64
_MOST_SAMPLE_BYTES = 4 << 20
_MOST_TEXT = 1000
QUIET_S = 120.0
"""A log that nobody wrote to for so long, without an end, is that of a lost run."""


class Run:
    """Everything here may be called from several threads; `lock` is held while something is."""

    def __init__(
        self, run_id: str, name: str, folder: Path, logging_dir: Path | None = None
    ) -> None:
        self.id, self.name, self.folder = run_id, name, folder
        self.logging_dir = logging_dir
        self.lock = threading.RLock()
        self.columns: Columns | None = None
        """The curves; None while nobody has asked for them."""
        self.checkpoints = Checkpoints(folder)
        self._tail: LogTail | None = None
        self._failure = -1.0, 0.0
        """When the post-mortem was written that was read last, and of when it is."""
        self._forget()

    def _forget(self) -> None:
        """Begin to read the log anew."""
        self.at_end = False
        self.latest: dict[str, float] = {}
        self.incidents: deque[Incident] = deque(maxlen=_MOST_INCIDENTS)
        self.num_incidents = 0
        self.num_records = 0
        self.last: dict[str, Any] = {}
        self.max_steps: float | None = None
        self.started_at: float | None = None
        self.resumed_at: float | None = None
        self.run_name: str | None = None
        self._places, self._finder = Places(), IncidentFinder()
        if self.columns is not None:
            self.columns = Columns()

    # -- the log ------------------------------------------------------------------------------

    def catch_up(self, deadline: float, *, with_columns: bool = False) -> None:
        """Read what is new, until `deadline` by the monotonic clock; `at_end` tells how far."""
        if with_columns and self.columns is None:
            self.columns, self._tail = Columns(), None
            self._forget()
        tail = self._find_tail()
        if tail is None:
            self.at_end = True
            return
        while True:
            piece = tail.read()
            if piece.anew:
                self._forget()
            self._take(piece)
            self.at_end = piece.at_end
            if piece.at_end or time.monotonic() >= deadline:
                return

    def let_go(self) -> None:
        """Give the memory of the curves back; they are read again when somebody asks."""
        self.columns = None

    @property
    def log_bytes(self) -> int:
        return 0 if self._tail is None else self._tail.size_bytes

    @property
    def log_name(self) -> str | None:
        return None if self._tail is None else self._tail.name

    @property
    def log_folder(self) -> Path:
        """Where the log is, and samples beside it."""
        return self.folder if self._tail is None else self._tail.folder

    def _find_tail(self) -> LogTail | None:
        if self._tail is not None and is_file_inside(self._tail.folder, self._tail.name):
            return self._tail
        places = [self.folder, *([self.logging_dir] if self.logging_dir else [])]
        if self.logging_dir is None:
            places = log_folders(self.folder, self.config(), self.environment())
        for place in places:
            for name in LOG_NAMES:
                if is_file_inside(place, name):
                    self._tail = LogTail(place, name)
                    return self._tail
        return self._tail

    def _take(self, piece: Piece) -> None:
        for record in piece.records:
            if "global_step" in record:
                self._take_record(record)
        if self.columns is not None and piece.records:
            self.columns.limit()

    def _take_record(self, record: dict[str, Any]) -> None:
        kind, place = record.get("type"), self._places.find(record)
        found = self._finder.look(record)
        self.incidents.extend(found)
        self.num_incidents += len(found)
        self.num_records += 1
        self.last = {key: record.get(key) for key in ("type", "timestamp", "global_step", "epoch")}
        when = number_of(record.get("timestamp"))
        if self.started_at is None:
            self.started_at = when
        # Told at the start, and when a command made the run longer or shorter.
        self.max_steps = number_of(record.get("max_steps")) or self.max_steps
        if kind in STARTS:
            self.resumed_at = when
            self.run_name = _text(record.get("run_name")) or self.run_name
        if kind in REWINDS and self.columns is not None:
            self.columns.cut(step_of(record))
        if place is None:
            return
        metrics = metrics_of(record)
        for name, value in metrics.items():
            if name in self.latest or len(self.latest) < _MOST_LATEST:
                self.latest[name] = value
        if self.columns is not None:
            self.columns.add(place, metrics)

    # -- what follows from it -----------------------------------------------------------------

    def updated_at(self) -> float | None:
        said = number_of(self.last.get("timestamp"))
        if said is not None and math.isfinite(said):
            return said
        if self._tail is not None and self._tail.modified_at is not None:
            return self._tail.modified_at
        # The log begins after the first step, which may take minutes.
        return modified_at(self.folder, "run", CONFIG_FILES[0])

    def state(self, now: float) -> str:
        """What the files tell of how the run is; a live job knows better."""
        if not self.at_end:
            return "reading"  # how it ended, and whether, is in the last line
        step, done = step_of(self.last), self.last.get("type") == "summary"
        if self._failed_at() > (self.resumed_at or 0.0):
            return "failed"
        if done:
            return "stopped" if self.max_steps and step < self.max_steps else "finished"
        process = look_at_process(self.process_note())
        if process is not None:
            return "lost" if process == "gone" else "running"
        quiet_s = now - (self.updated_at() or 0.0)
        return "lost" if quiet_s > QUIET_S else "running"

    def _failed_at(self) -> float:
        """When a process of the run last failed, as far as it left word; else 0."""
        times = [self._post_mortem_at()]
        times += [number_of(dump.get("timestamp")) for _, dump in self._dumps()]
        return max((t for t in times if t is not None and math.isfinite(t)), default=0.0)

    def _post_mortem_at(self) -> float | None:
        """Of when the post-mortem is; in a copy of the folder its file is newer."""
        written = modified_at(self.folder, POST_MORTEM_NAME)
        if written is None:
            return None
        if self._failure[0] != written:
            said = number_of((self.post_mortem() or {}).get("time"))
            self._failure = written, said if said is not None and math.isfinite(said) else written
        return self._failure[1]

    def _dumps(self) -> list[tuple[str, dict[str, Any]]]:
        try:
            with os.scandir(self.folder) as entries:
                names = sorted(e.name for e in entries if _DUMP.fullmatch(e.name))
        except OSError:
            return []
        read = ((name, read_object(self.folder, name)) for name in names[:_MOST_DUMPS])
        return [(name, dump) for name, dump in read if dump is not None]

    def list_incidents(self) -> list[dict[str, Any]]:
        """Those of the log and those that failures left, in order."""
        last_step = step_of(self.last)
        found = [*self.incidents]
        found += [incident_of_dump(name, dump, last_step) for name, dump in self._dumps()]
        return [asdict(incident) for incident in found]

    # -- other files --------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        return read_object(self.folder, "run", CONFIG_FILES[0]) or {}

    def environment(self) -> dict[str, Any]:
        return read_object(self.folder, "run", CONFIG_FILES[1]) or {}

    def process_note(self) -> dict[str, Any] | None:
        """Which process the run is, while it has not ended."""
        return read_object(self.folder, FOLDER_NAME, NOTE_NAME)

    def shown_config(self) -> dict[str, Any]:
        """The configuration as it may be shown: whoever wrote it, without secrets."""
        shown: dict[str, Any] = redact(self.config())
        return shown

    def config_files(self) -> list[str]:
        return [f"run/{name}" for name in CONFIG_FILES if is_file_inside(self.folder, "run", name)]

    def args(self) -> dict[str, Any]:
        args = self.config().get("args")
        return args if isinstance(args, dict) else {}

    @property
    def has_post_mortem(self) -> bool:
        return is_file_inside(self.folder, POST_MORTEM_NAME)

    def post_mortem(self) -> dict[str, Any] | None:
        return read_object(self.folder, POST_MORTEM_NAME)

    def samples(self, most: int) -> list[dict[str, Any]]:
        """What the model wrote, the newest first."""
        found: list[dict[str, Any]] = []
        lines = read_end(self.log_folder, SAMPLES_NAME, _MOST_SAMPLE_BYTES).split(b"\n")
        for record in (r for line in reversed(lines) for r in parse_line(line)):
            inner = record.get("samples")
            facts = {"step": step_of(record), "timestamp": number_of(record.get("timestamp"))}
            for sample in inner if isinstance(inner, list) else []:
                if isinstance(sample, dict):
                    found.append({**sample, **facts})
            if len(found) >= most:
                break
        return found[:most]


def _text(value: Any) -> str | None:
    return value[:_MOST_TEXT] if isinstance(value, str) and value else None
