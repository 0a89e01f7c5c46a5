"""Pins: a checkpoint that somebody asked to keep, noted in the checkpoint itself.

Owns: the marker file inside a checkpoint's directory. It is no part of the manifest, so pinning
changes nothing that was committed, and it travels with the directory. Also who keeps which
checkpoint for the time of a run, without a marker.
Does not own: what a pin protects from (retention.py).
"""

from __future__ import annotations

import os
from pathlib import Path

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.manifest import read_manifest
from headway.checkpoint.storage import is_url, open_storage

PIN_NAME = ".pinned"


class Keepers:
    """Names of checkpoints that stay while anybody keeps them, in this process alone."""

    def __init__(self) -> None:
        self._owners: dict[str, set[str]] = {}

    def add(self, name: str, owner: str = "") -> None:
        self._owners.setdefault(name, set()).add(owner)

    def discard(self, name: str, owner: str = "") -> None:
        """`owner` no longer keeps it; others may."""
        owners = self._owners.get(name, set())
        owners.discard(owner)
        if not owners:
            self._owners.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._owners


def is_pinned(path: str | Path) -> bool:
    """Whether a checkpoint is pinned."""
    return os.path.lexists(Path(path) / PIN_NAME)


def pin(path: str | Path) -> None:
    """Keep a committed checkpoint until it is unpinned; `CheckpointError` if it is not one."""
    _mark(path, pinned=True)


def unpin(path: str | Path) -> None:
    """Give a checkpoint back to retention; one that is not pinned stays as it is."""
    _mark(path, pinned=False)


def _mark(path: str | Path, *, pinned: bool) -> None:
    if is_url(path):
        storage = open_storage(str(path).rstrip("/").rpartition("/")[0])
        directory = storage.path_of(path)
    else:
        directory = Path(path).absolute()
        storage = open_storage(directory.parent)
    read_manifest(directory)
    marker = directory / PIN_NAME
    if marker.is_symlink():
        # Followed, it would make a file where it leads.
        raise CheckpointError(f"{marker} is a symbolic link; remove it")
    if not pinned:
        marker.unlink(missing_ok=True)
    elif not marker.exists():
        storage.create(marker).close()
    storage.sync_dir(directory)
