"""Finding and judging checkpoints without a manager.

Owns: convenience functions over the manifest, for directories of any name. Does not own: fallback
to older checkpoints (manager.py).
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.manifest import (
    MANIFEST_NAME,
    CommittedCheckpoint,
    read_manifest,
    save_order,
    verify,
)
from headway.checkpoint.meta import (
    MODEL_EXCLUDED_MARKER,
    find_weights,
    is_half_checkpoint,
    missing_weight_files,
)
from headway.checkpoint.owner import NONCE_PATTERN
from headway.checkpoint.remote import local_copy
from headway.checkpoint.storage import Storage, open_storage
from headway.errors import ConfigError

# Unfinished, deleted or set aside by `modify`: with or without a manifest, none of them counts.
_NOT_CHECKPOINTS = re.compile(
    rf"\.trash-.*|.*\.(?:tmp|foreign)-{NONCE_PATTERN}|.*\.backup-\d+", re.ASCII
)

logger = logging.getLogger(__name__)


def list_checkpoints(directory: str | Path) -> list[CommittedCheckpoint]:
    """The committed checkpoints in a directory, whatever their names, by save counter."""
    return committed_in(open_storage(directory))


def committed_in(storage: Storage) -> list[CommittedCheckpoint]:
    """The same for a storage."""
    storage.refresh()
    found = []
    for name in storage.list_dirs():
        if _NOT_CHECKPOINTS.fullmatch(name):
            continue
        path = storage.root / name
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        found.append(
            CommittedCheckpoint(path, manifest.step, manifest.save_counter, manifest.kind, manifest)
        )
    return sorted(found, key=save_order)


def find_latest_checkpoint(model_dir: str | Path, *, kind: str | None = None) -> str | None:
    """The newest committed checkpoint in a run directory, by save counter.

    Checkpoints that can be resumed come before folders of weights; `kind` admits one kind alone.
    Without any, `model_dir` itself is returned if it is a checkpoint or, where no kind is asked
    for, a whole model folder; else None.
    """
    storage = open_storage(model_dir)
    found = committed_in(storage)
    for wanted in (kind,) if kind else ("training", None):
        matching = [c for c in found if wanted is None or c.kind == wanted]
        if matching:
            return storage.locate(matching[-1].path)
    try:
        with local_copy(model_dir) as directory:
            return str(model_dir) if _is_checkpoint(directory, kind) else None
    except FileNotFoundError:
        return None


def _is_checkpoint(directory: Path, kind: str | None) -> bool:
    if os.path.lexists(directory / MANIFEST_NAME):
        try:
            return kind in (None, read_manifest(directory).kind)
        except CheckpointError:
            return False
    return kind is None and not _look_at_folder(directory)


def next_checkpoint_path(model_dir: str | Path, checkpoint_id: int | str) -> str:
    """The directory for the checkpoint of an id, usually the step."""
    if not re.fullmatch(r"\d+", str(checkpoint_id), re.ASCII):
        raise ConfigError(
            f"checkpoint_id is {checkpoint_id!r}; allowed: a number of 0 or more, such as the step"
        )
    return f"{str(model_dir).rstrip('/')}/checkpoint-{int(checkpoint_id)}"


def validate_checkpoint(checkpoint_path: str | Path) -> bool:
    """Whether a checkpoint is whole; logs what is not.

    A committed one must have every file as it was written. A folder of weights without a manifest
    must have every weight file that its index names, or the marker that says it has none.
    """
    try:
        with local_copy(checkpoint_path) as directory:
            is_committed = os.path.lexists(directory / MANIFEST_NAME)
            problems = verify(directory) if is_committed else _look_at_folder(directory)
    except FileNotFoundError as error:
        problems = [str(error)]
    for problem in problems:
        logger.warning("%s", problem)
    return not problems


def _look_at_folder(directory: Path) -> list[str]:
    if is_half_checkpoint(directory):
        return [f"{directory / MANIFEST_NAME} is missing: the checkpoint was never committed"]
    if (directory / MODEL_EXCLUDED_MARKER).is_file():
        return []
    weights = find_weights(directory)
    if weights is None:
        return [f"{directory} holds neither a manifest nor weights"]
    return [f"{name} is missing" for name in missing_weight_files(directory, weights)]
