"""Finding and judging checkpoints without a manager.

Owns: convenience functions over the manifest, for directories of any name. Does not own: fallback
to older checkpoints (manager.py).
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import zipfile
from pathlib import Path

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.header import read_header
from headway.checkpoint.manifest import (
    LINK_REASON,
    MANIFEST_NAME,
    CommittedCheckpoint,
    Manifest,
    linked_checkpoints,
    look_at_sizes,
    read_manifest,
    save_order,
    verify,
)
from headway.checkpoint.meta import (
    MODEL_EXCLUDED_MARKER,
    find_weights,
    is_half_checkpoint,
    missing_weight_files,
    weight_files,
)
from headway.checkpoint.owner import NONCE_PATTERN
from headway.checkpoint.remote import local_copy
from headway.checkpoint.storage import Storage, is_url, open_storage
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
    One that lacks a file, or has one of another size than was written, is named and passed over
    (on local disks; `validate_checkpoint` reads the files). Without any, `model_dir` itself is
    returned if it is a checkpoint or, where no kind is asked for, a whole model folder; else None.
    """
    storage = open_storage(model_dir)
    for path in linked_checkpoints(storage.root):
        logger.warning("%s %s; it is passed over", path, LINK_REASON)
    matching = [c for c in reversed(committed_in(storage)) if kind in (None, c.kind)]
    for checkpoint in sorted(matching, key=lambda c: c.kind != "training"):
        # At an address, the files are where looking at them is not free.
        there = is_url(model_dir) or not _pass_over(checkpoint.path, checkpoint.manifest)
        if there:
            return storage.locate(checkpoint.path)
    try:
        with local_copy(model_dir) as directory:
            return str(model_dir) if _is_checkpoint(directory, kind) else None
    except FileNotFoundError:
        return None


def find_whole_checkpoint(given: str | Path) -> str | None:
    """`find_latest_checkpoint`, for which damaged ones and no others are a `CheckpointError`."""
    found = find_latest_checkpoint(given)
    if found is None and (damaged := list_checkpoints(given)):
        names = ", ".join(checkpoint.path.name for checkpoint in damaged)
        raise CheckpointError(
            f"{given} holds no whole checkpoint, only damaged ones: {names}; what is damaged in "
            f"them: headway checkpoint verify {shlex.quote(str(given))}"
        )
    return found


def _pass_over(directory: Path, manifest: Manifest) -> bool:
    problems = look_at_sizes(directory, manifest)
    for problem in problems:
        logger.warning("passing over a damaged checkpoint: %s", problem)
    return bool(problems)


def _is_checkpoint(directory: Path, kind: str | None) -> bool:
    if os.path.lexists(directory / MANIFEST_NAME):
        try:
            manifest = read_manifest(directory)
        except CheckpointError:
            return False
        return kind in (None, manifest.kind) and not _pass_over(directory, manifest)
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
    must have every weight file that its index names, each as long as it says itself, or the marker
    that says it has none.
    """
    try:
        with local_copy(checkpoint_path) as directory:
            is_committed = os.path.lexists(directory / MANIFEST_NAME)
            problems = verify(directory) if is_committed else _look_at_folder(directory)
    except (FileNotFoundError, CheckpointError) as error:
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
    missing = missing_weight_files(directory, weights)
    problems = [f"{path} is missing" for path in missing]
    for path in (directory / name for name in weight_files(directory, weights)):
        problem = None if path in missing else _look_at_file(path, weights.safetensors)
        problems += [problem] if problem else []
    return problems


def _look_at_file(path: Path, safetensors: bool) -> str | None:
    """What is wrong with a weight file, as far as its header or directory tells."""
    if safetensors:
        try:
            read_header(path)
        except CheckpointError as error:
            return str(error)
        return None
    with open(path, "rb") as file:
        begins_as_zip = file.read(4) == b"PK\x03\x04"
    if begins_as_zip and not zipfile.is_zipfile(path):
        return f"{path} is cut off: it has no directory at its end"
    return f"{path} is empty" if not path.stat().st_size else None
