"""Which runs there are, and the ids by which they are asked for.

Owns: finding folders that hold a run, their ids and names, which of too many are shown, and how
many curves stay in memory.
Does not own: what a run is (run.py).
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.checkpoint.manifest import MANIFEST_NAME
from headway.control.dashboard.files import is_file_inside, modified_at
from headway.control.dashboard.run import Run
from headway.control.run_log import LOG_NAMES
from headway.control.schema import BadRequest
from headway.errors import nearest

_LOOK_S = 2.0
_DEEPEST = 4
_MOST_FOLDERS = 20_000
_MOST_RUNS = 500
"""Shown at once: those of live jobs, and of the others the newest."""
_MOST_WITH_CURVES = 12
_NOT_ENTERED = re.compile(
    r"\..*|checkpoint-\d+.*|merged-\d+.*|export-\d+.*|runs?|node_modules|__.*"
)
"""Folders inside a run that hold no other one."""


@dataclass(frozen=True)
class Place:
    """A folder that is known to hold a run, and where its log is if not in there."""

    folder: Path
    logging_dir: Path | None = None
    name: str | None = None


def run_id_of(folder: Path) -> str:
    """A word that stays the same for a folder: its name, and a digest of where it lies."""
    path = os.path.realpath(folder)
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(path)).strip("-.")[:40] or "run"
    return f"{word}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:10]}"


class Shelf:
    """The runs in some folders, and those that `more` tells of; looked through again at times."""

    def __init__(
        self, roots: Iterable[Path] = (), more: Callable[[], list[Place]] | None = None
    ) -> None:
        self._roots, self._more = list(roots), more
        self._runs: dict[str, Run] = {}
        self.num_left_out = 0
        """How many runs there were beyond those that are shown."""
        self._with_curves: OrderedDict[str, None] = OrderedDict()
        self._look_again_at = 0.0
        self._lock = threading.Lock()

    def runs(self) -> list[Run]:
        """All of them, in the order in which they are found."""
        with self._lock:
            began = time.monotonic()
            if began >= self._look_again_at:
                self._look()
                took_s = time.monotonic() - began
                # A tree of many folders is looked through less often.
                self._look_again_at = began + max(_LOOK_S, 20 * took_s if took_s > 0.1 else 0.0)
            return list(self._runs.values())

    def get(self, run_id: str) -> Run:
        """The run with an id; `BadRequest` with the ids there are."""
        known = {run.id: run for run in self.runs()}
        if run_id in known:
            return known[run_id]
        hint = nearest(run_id[:64], known)
        more = f"; did you mean {hint!r}?" if hint else ""
        raise BadRequest(
            404, f"there is no run {run_id[:64]!r}{more}", valid_runs=sorted(known)[:_MOST_RUNS]
        )

    def note_curves(self, run: Run) -> None:
        """The curves of a run are in memory now; those of the one used longest ago go."""
        with self._lock:
            self._with_curves[run.id] = None
            self._with_curves.move_to_end(run.id)
            for run_id in list(self._with_curves)[:-_MOST_WITH_CURVES]:
                oldest = self._runs.get(run_id)
                # Not waiting: who holds it may wait for this one. Then it goes the next time.
                if oldest is not None and not oldest.lock.acquire(blocking=False):
                    continue
                del self._with_curves[run_id]
                if oldest is not None:
                    oldest.let_go()
                    oldest.lock.release()

    def _look(self) -> None:
        places: dict[str, Place] = {}
        for place in self._places():
            places.setdefault(run_id_of(place.folder), place)
        live = {run_id_of(place.folder): place for place in (self._more() if self._more else ())}
        places = {**live, **places}
        shown = _choose(places, live)
        self.num_left_out = len(places) - len(shown)
        found: dict[str, Run] = {}
        for run_id in shown:
            place = places[run_id]
            name = place.name or place.folder.name or str(place.folder)
            known = self._runs.get(run_id)
            found[run_id] = known or Run(run_id, name, place.folder, place.logging_dir)
        self._runs = found

    def _places(self) -> Iterable[Place]:
        for root in self._roots:
            for folder in find_run_folders(root):
                inner = os.path.relpath(folder, root)
                name = Path(os.path.realpath(root)).name if inner == "." else inner
                yield Place(folder, None, name)


def _choose(places: Mapping[str, Place], live: Container[str]) -> list[str]:
    """The ids of the runs that are shown, in the order in which they were found."""
    if len(places) <= _MOST_RUNS:
        return list(places)
    written = {run_id: _written_at(place) for run_id, place in places.items()}
    newest = sorted(places, key=lambda run_id: (run_id in live, written[run_id]), reverse=True)
    kept = set(newest[:_MOST_RUNS])
    return [run_id for run_id in places if run_id in kept]


def _written_at(place: Place) -> float:
    """When something was last written of a run."""
    parts = [*((name,) for name in LOG_NAMES), ("run", "config.json")]
    times = [modified_at(place.folder, *names) for names in parts]
    return max((t for t in times if t is not None), default=0.0)


def find_run_folders(root: Path) -> list[Path]:
    """The folder itself if it holds a run, and those below that do; no link is followed."""
    found: list[Path] = []
    level, num_entered = [root], 0
    for _ in range(_DEEPEST + 1):
        inner: list[Path] = []
        for folder in level:
            num_entered += 1
            if num_entered > _MOST_FOLDERS:
                return found
            is_run = holds_run(folder)
            if is_run:
                found.append(folder)
            inner += _subfolders(folder, is_run)
        level = inner
    return found


def holds_run(folder: Path) -> bool:
    if is_file_inside(folder, MANIFEST_NAME):
        return False  # a checkpoint, which has the configuration of its run too
    names = [(name,) for name in LOG_NAMES]
    return any(is_file_inside(folder, *parts) for parts in [*names, ("run", "config.json")])


def _subfolders(folder: Path, is_run: bool) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
    except OSError:
        return []
    skipped = _NOT_ENTERED if is_run else re.compile(r"\..*|node_modules|__.*")
    return [folder / name for name in names if not skipped.fullmatch(name)]
