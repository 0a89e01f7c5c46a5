"""Giving a complete checkpoint directory its name.

Owns: the renames, and what becomes of an earlier directory of that name. Does not own: what makes a
directory complete (manifest.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.manifest import is_committed, read_manifest
from headway.checkpoint.pins import is_pinned
from headway.checkpoint.storage import Storage

logger = logging.getLogger(__name__)


def inherit_lifetime(metadata: Mapping[str, Any], final: Path) -> dict[str, Any]:
    """What a save that takes the place of a permanent checkpoint says of itself: it is one too."""
    try:
        earlier = read_manifest(final).metadata
    except CheckpointError:
        return dict(metadata)
    if not earlier.get("permanent"):
        return dict(metadata)
    return {**{k: v for k, v in metadata.items() if k != "ephemeral"}, "permanent": True}


def publish(storage: Storage, temporary: Path, final: Path, nonce: str) -> None:
    """Give a complete directory its name, moving an earlier one of that name aside first."""
    aside = None
    was_committed = False
    if os.path.lexists(final):
        was_committed = is_committed(final)
        aside = final.with_name(f"{final.name}.{'old' if was_committed else 'foreign'}-{nonce}")
        storage.rename(final, aside)
    try:
        if aside is not None:
            # Else a power cut may keep the second rename alone, and with it lose the earlier.
            storage.sync_dir(final.parent)
        storage.rename(temporary, final)
    except BaseException:
        if aside is not None:
            try:
                storage.rename(aside, final)
            except Exception as error:
                logger.warning("%s keeps the name %s: %s", final, aside.name, error)
        raise
    storage.sync_dir(final.parent)
    if aside is not None and was_committed and not is_pinned(aside):
        storage.remove_tree(aside)
    elif aside is not None and was_committed:
        logger.warning("%s was pinned; it is now %s beside its successor", final, aside.name)
    elif aside is not None:
        logger.warning(
            "%s was there without a valid manifest; it is now %s and was not deleted",
            final,
            aside.name,
        )
