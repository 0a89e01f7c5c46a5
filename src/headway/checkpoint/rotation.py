"""Deleting old checkpoints outside a manager.

Owns: `maybe_delete_oldest_checkpoint` and the check of an output directory. Does not own: the rule
(retention.py).
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from headway.checkpoint.discovery import list_checkpoints
from headway.checkpoint.manifest import MANIFEST_NAME
from headway.checkpoint.meta import find_weights
from headway.checkpoint.pins import is_pinned
from headway.checkpoint.retention import Entry, choose_deletions
from headway.checkpoint.storage import Storage
from headway.errors import ConfigError

logger = logging.getLogger(__name__)


def maybe_delete_oldest_checkpoint(
    model_dir: str | Path,
    max_checkpoints: int,
    best_checkpoint: str | Path | None = None,
    preserved_checkpoints: Collection[str | Path] | None = None,
) -> list[str]:
    """Delete the oldest `checkpoint-*` beyond a number; returns the deleted directories.

    The newest, the pinned, the permanent and the preserved ones stay and do not count.
    `best_checkpoint` is the older way to preserve one.
    """
    storage = Storage(model_dir)
    preserved = {Path(path).resolve() for path in preserved_checkpoints or ()}
    if best_checkpoint is not None:
        preserved.add(Path(best_checkpoint).resolve())
    entries = [
        Entry(
            id=found.path.name,
            save_counter=found.save_counter,
            step=found.step,
            permanent=bool(found.manifest.metadata.get("permanent")),
            pinned=is_pinned(found.path) or found.path.resolve() in preserved,
        )
        for found in list_checkpoints(storage.root)
        if found.path.name.startswith("checkpoint-")
    ]
    victims = choose_deletions(entries, limit=max_checkpoints)
    for name in victims:
        logger.info("deleting %s", storage.root / name)
        storage.remove_tree(storage.root / name)
    return [str(storage.root / name) for name in victims]


def validate_output_dir(output_dir: str | Path, overwrite: bool = False) -> None:
    """Refuse a directory that holds a checkpoint, or weights, unless `overwrite`."""
    directory = Path(output_dir)
    if overwrite or not directory.exists():
        return
    if not directory.is_dir():
        raise ConfigError(f"output_dir: {directory} is a file")
    there = [found.path.name for found in list_checkpoints(directory)]
    weights = find_weights(directory)
    if weights is not None:
        there.append(weights.file_name)
    if (directory / MANIFEST_NAME).exists():
        there.append(MANIFEST_NAME)
    if there:
        raise ConfigError(
            f"output_dir: {directory} already holds {there[-1]}; choose another directory, or pass "
            "overwrite=True"
        )
