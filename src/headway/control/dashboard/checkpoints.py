"""The checkpoints of a run, as far as can be told without reading their tensors; and with it.

Owns: what each of them is called, whether it is whole, which one is best, what a verification
found. Does not own: what makes a checkpoint complete (checkpoint/manifest.py).
"""

from __future__ import annotations

import datetime
import math
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.checkpoint.best import is_better
from headway.checkpoint.manifest import (
    DIR_PREFIXES,
    MANIFEST_NAME,
    CommittedCheckpoint,
    committed,
    damaged_manifests,
    look_at_sizes,
    verify,
)
from headway.checkpoint.owner import NONCE_PATTERN, owner_state
from headway.config.arguments import greater_is_better
from headway.control.schema import BadRequest

_MOST_SHOWN = 200
_DRAFT = re.compile(
    rf"(?P<name>(?:{'|'.join(DIR_PREFIXES.values())})-(?P<step>\d{{1,18}})[\w.-]*?)"
    rf"\.tmp-(?P<nonce>{NONCE_PATTERN})",
    re.ASCII,
)


class Checkpoints:
    """Those of one run folder. What was verified stays so while its manifest is the same."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._verified: dict[str, tuple[str, list[str]]] = {}
        self._verifying = threading.Lock()
        self._under_way: str | None = None

    def list(self, args: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
        """The newest first, with the best one, and how many older ones are left out; `args` are
        the run's arguments, which say what is best."""
        found = committed(self._folder)
        best = _find_best(found, args)
        shown = found[-_MOST_SHOWN:]
        shown = [one for one in found[:-_MOST_SHOWN] if one.path.name == best] + shown
        listed = [self._describe(one, one.path.name == best) for one in shown]
        known = {one.path.name for one in found}
        for path, reason in damaged_manifests(self._folder).items():
            if path.name not in known:
                listed.append(_entry(path, "damaged", reason))
        listed += _find_drafts(self._folder)
        listed.sort(key=lambda one: (one["step"] or 0, one["name"]), reverse=True)
        return listed, len(found) - len(shown)

    def _describe(self, one: CommittedCheckpoint, best: bool) -> dict[str, Any]:
        digest, problems = self._verified.get(one.path.name, ("", []))
        looked = look_at_sizes(one.path, one.manifest)
        state = "damaged" if looked else "complete"
        if not looked and digest == one.manifest.digest:
            state, looked = ("damaged", problems) if problems else ("verified", [])
        if one.path.name == self._under_way:
            state = "verifying"
        size = sum(file.size for file in one.manifest.files.values())
        return {
            **_entry(one.path, state, "; ".join(looked[:5])),
            "step": one.step,
            "bytes": size,
            "saved_at": _saved_at(one),
            "kind": one.kind,
            "best": best,
            "metric": _plain(one.manifest.metric),
        }

    def verify(self, name: str) -> dict[str, Any]:
        """Read every byte of a checkpoint of the list; one at a time, it may take minutes."""
        found = {one.path.name: one for one in committed(self._folder)}
        one = found.get(name)
        if one is None:
            raise BadRequest(
                404,
                f"there is no committed checkpoint {name[:80]!r}",
                valid_names=sorted(found)[:_MOST_SHOWN],
            )
        if not self._verifying.acquire(blocking=False):
            raise BadRequest(429, "a checkpoint of this run is being verified; try again later")
        try:
            self._under_way = name
            problems = verify(one.path, num_threads=1)
            self._verified[name] = one.manifest.digest, problems
        finally:
            self._under_way = None
            self._verifying.release()
        return {
            "name": name,
            "state": "damaged" if problems else "verified",
            "problems": problems[:100],
            "message": "; ".join(problems[:5]) or "every file is as it was written",
        }


def _entry(path: Path, state: str, message: str) -> dict[str, Any]:
    step = re.search(r"-(\d{1,18})", path.name)
    return {
        "name": path.name,
        "path": str(path),
        "step": int(step[1]) if step else None,
        "bytes": None,
        "saved_at": None,
        "kind": None,
        "best": False,
        "state": state,
        "message": message,
    }


def _find_drafts(folder: Path) -> list[dict[str, Any]]:
    """Saves that are under way, or that nobody will finish."""
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    drafts = [match for name in sorted(names) if (match := _DRAFT.fullmatch(name))]
    listed = []
    for draft in drafts[:_MOST_SHOWN]:
        gone = owner_state(draft["nonce"]) == "dead"
        message = "left by a process that is gone" if gone else "being written"
        listed.append(_entry(folder / draft.string, "incomplete", message))
    return listed


def _find_best(found: list[CommittedCheckpoint], args: Mapping[str, Any]) -> str | None:
    # By the metric that decides which checkpoints are kept.
    names = ("metric_for_best_model", "greater_is_better")
    if args.get("preserve_best_model") is True:
        names = ("best_model_metric", "best_model_greater_is_better")
    greater = args.get(names[1])
    if not isinstance(greater, bool):
        greater = greater_is_better(str(args.get(names[0]) or "loss"))
    best: CommittedCheckpoint | None = None
    for one in found:
        metric = one.manifest.metric
        current = None if best is None else best.manifest.metric
        if metric is not None and is_better(metric, current, greater_is_better=greater):
            best = one
    return None if best is None else best.path.name


def _saved_at(one: CommittedCheckpoint) -> float | None:
    """Unix time of a save."""
    try:
        return datetime.datetime.fromisoformat(one.manifest.created).timestamp()
    except (ValueError, OverflowError):
        pass
    try:
        return os.lstat(one.path / MANIFEST_NAME).st_mtime
    except OSError:
        return None


def _plain(metric: float | None) -> float | str | None:
    return metric if metric is None or math.isfinite(metric) else str(metric)
