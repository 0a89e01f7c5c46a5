"""The newest checkpoint of a run directory that is whole.

Owns: the search from the newest save backwards, and which of the damaged ones are newer than what
it finds. Does not own: verification (manifest.py), what a damaged one leads to (trainers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.jsonfile import read_json_object
from headway.checkpoint.manifest import (
    DIR_PREFIXES,
    MANIFEST_NAME,
    CommittedCheckpoint,
    damaged_manifests,
    verify,
)
from headway.checkpoint.storage import Storage


@dataclass(frozen=True)
class Search:
    """What was found, and what is wrong with newer ones."""

    path: Path | None
    problems: list[str] = field(default_factory=list)
    """A line for every damaged file of a newer checkpoint; of all, if none is whole."""
    damaged: set[str] = field(default_factory=set)
    """Names of committed checkpoints whose files are not as they were written."""


def find_newest_whole(storage: Storage, found: Sequence[CommittedCheckpoint]) -> Search:
    """Verify training checkpoints, the newest first, up to one that is whole."""
    broken = {
        path: reason
        for path, reason in damaged_manifests(storage.root).items()
        if path.name.startswith(f"{DIR_PREFIXES['training']}-")
    }
    problems: list[str] = []
    damaged: set[str] = set()
    for checkpoint in reversed(found):
        if checkpoint.kind != "training":
            continue
        storage.fetch(checkpoint.path)
        wrong = verify(checkpoint.path)
        if not wrong:
            newer = [reason for path, reason in broken.items() if _is_newer(path, checkpoint)]
            return Search(checkpoint.path, [*newer, *problems], damaged)
        problems += wrong
        damaged.add(checkpoint.path.name)
    return Search(None, [*broken.values(), *problems], damaged)


def _is_newer(path: Path, than: CommittedCheckpoint) -> bool:
    """Whether a directory without a valid manifest is of a later save, as far as can be told."""
    try:
        # The counter behind a link may be another run's.
        known = {} if path.is_symlink() else read_json_object(path / MANIFEST_NAME)
        if isinstance(known.get("save_counter"), int):
            return bool(known["save_counter"] > than.save_counter)
    except CheckpointError:
        pass
    step = path.name.partition("-")[2].partition(".")[0]
    return int(step) > than.step
