"""Checkpoints of an earlier run whose folder a fresh run takes over.

Owns: moving them out of sight, so that the new run can neither load nor count nor delete them.
Does not own: whether that was allowed (trainers).
"""

from __future__ import annotations

from pathlib import Path

from headway.checkpoint.manifest import committed
from headway.checkpoint.storage import Storage

REPLACED_PREFIX = "replaced-"


def set_aside(output_dir: str | Path) -> Path | None:
    """Move the committed checkpoints into `replaced-<n>/`; None if there are none."""
    storage = Storage(output_dir)
    found = committed(storage.root)
    if not found:
        return None
    number = 1
    while (folder := storage.root / f"{REPLACED_PREFIX}{number}").exists():
        number += 1
    storage.make_dir(folder)
    for checkpoint in found:
        storage.rename(checkpoint.path, folder / checkpoint.path.name)
    storage.sync_dir(folder)
    storage.sync_dir(storage.root)
    return folder
