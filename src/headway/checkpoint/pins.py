"""Pins: a checkpoint that somebody asked to keep, noted in the checkpoint itself.

Owns: the marker file inside a checkpoint's directory. It is no part of the manifest, so pinning
changes nothing that was committed, and it travels with the directory.
Does not own: what a pin protects from (retention.py).
"""

from __future__ import annotations

import os
from pathlib import Path

from headway.checkpoint.manifest import read_manifest

PIN_NAME = ".pinned"


def is_pinned(path: str | Path) -> bool:
    """Whether a checkpoint is pinned."""
    return os.path.lexists(Path(path) / PIN_NAME)


def pin(path: str | Path) -> None:
    """Keep a committed checkpoint until it is unpinned; `CheckpointError` if it is not one."""
    directory = Path(path)
    read_manifest(directory)
    (directory / PIN_NAME).touch()


def unpin(path: str | Path) -> None:
    """Give a checkpoint back to retention; one that is not pinned stays as it is."""
    directory = Path(path)
    read_manifest(directory)
    (directory / PIN_NAME).unlink(missing_ok=True)
