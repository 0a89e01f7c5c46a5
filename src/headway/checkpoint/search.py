"""The checkpoint to resume from: the newest of a run directory that is whole, or a named one.

Owns: the search from the newest save backwards, which of the damaged ones are newer than what it
finds, and the refusal of a named one that does not resume. Does not own: verification
(manifest.py), what a damaged one leads to (trainers).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.jsonfile import read_json_object
from headway.checkpoint.manifest import (
    DIR_PREFIXES,
    MANIFEST_NAME,
    CommittedCheckpoint,
    Manifest,
    committed,
    damaged_manifests,
    read_manifest,
    shard_names,
    verify,
)
from headway.checkpoint.storage import Storage
from headway.errors import ConfigError


@dataclass(frozen=True)
class Search:
    """What was found, and what is wrong with newer ones."""

    path: Path | None
    problems: list[str] = field(default_factory=list)
    """A line for every damaged file of a newer checkpoint; of all, if none is whole."""
    damaged: set[str] = field(default_factory=set)
    """Names of committed checkpoints whose files are not as they were written."""


def find_newest_whole(
    storage: Storage,
    found: Sequence[CommittedCheckpoint],
    suspects: Collection[str] | None = None,
) -> Search:
    """Verify training checkpoints, the newest first, up to one that is whole.

    With `suspects`, names of checkpoints, the large tensor files of no others are read.
    """
    broken = {
        path: storage.tell(reason)
        for path, reason in damaged_manifests(storage.root).items()
        if path.name.startswith(f"{DIR_PREFIXES['training']}-")
    }
    problems: list[str] = []
    damaged: set[str] = set()
    for checkpoint in reversed(found):
        if checkpoint.kind != "training":
            continue
        storage.fetch(checkpoint.path)
        wrong = verify(checkpoint.path, unread=choose_unread(checkpoint, suspects))
        if not wrong:
            newer = [reason for path, reason in broken.items() if _is_newer(path, checkpoint)]
            return Search(checkpoint.path, [*newer, *problems], damaged)
        problems += map(storage.tell, wrong)
        damaged.add(checkpoint.path.name)
    return Search(None, [*broken.values(), *problems], damaged)


def choose_unread(
    checkpoint: CommittedCheckpoint, suspects: Collection[str] | None
) -> Collection[str]:
    """The files of a checkpoint that whoever loads it will verify."""
    if suspects is None or checkpoint.path.name in suspects:
        return ()
    return shard_names(checkpoint.manifest)


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


def read_resumable(
    given: Path, path: Path, list_others: Callable[[], Sequence[CommittedCheckpoint]]
) -> Manifest:
    """The manifest of a checkpoint at `path`, asked for as `given`; a mistake if none resumes."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        reason = str(error) if path.exists() else f"{path} does not exist"
        raise ConfigError(_refuse(given, path, list_others(), reason)) from error
    if manifest.kind != "training":
        reason = f"it is of kind {manifest.kind!r}, and only kind 'training' resumes"
        if "quantized" in manifest.metadata:
            reason += "; its weights are quantized, so that they cannot be trained"
        raise ConfigError(_refuse(given, path, list_others(), reason))
    return manifest


def _refuse(given: Path, path: Path, others: Sequence[CommittedCheckpoint], reason: str) -> str:
    inside = [c.path for c in committed(path) if c.kind == "training"]
    beside = [c.path for c in others if c.kind == "training"]
    there = ", ".join(str(found) for found in inside or beside)
    return (
        f"resume_from_checkpoint={str(given)!r} is not a checkpoint to resume from: {reason}. "
        f"Checkpoints there: {there or 'none'}"
    )
