"""Removes what an interrupted save or deletion left behind.

Owns: which names are leftovers and when they may go. Does not own: the operations (storage.py).
"""

from __future__ import annotations

import functools
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from headway.checkpoint.manifest import is_committed
from headway.checkpoint.owner import NONCE_PATTERN, owner_state
from headway.checkpoint.pins import is_pinned
from headway.checkpoint.storage import Storage

ELSEWHERE_AGE_S = 24 * 3600.0
"""How long a leftover of a process on another machine must be untouched before it goes."""

_LEFTOVER = re.compile(
    rf"(?:(?P<name>.+)\.(?P<what>tmp|old)|\.trash)-(?P<nonce>{NONCE_PATTERN})", re.ASCII
)

logger = logging.getLogger(__name__)


def age_s(path: Path) -> float:
    """How long nothing in a folder was written."""
    now = time.time()
    try:
        return now - max((os.lstat(f).st_mtime for f, _, _ in os.walk(path)), default=now)
    except OSError:
        return 0.0  # it is changing right now


def may_go(nonce: str, tell_age_s: Callable[[], float]) -> bool:
    """Whether what carries a nonce is left over: its process is dead, or elsewhere and idle."""
    state = owner_state(nonce)
    return state == "dead" or (state == "elsewhere" and tell_age_s() > ELSEWHERE_AGE_S)


def clean_leftovers(storage: Storage) -> list[str]:
    """Clean up after processes that are gone; returns the names dealt with.

    Temporary and trash directories are deleted. A checkpoint that was moved aside for a successor
    is deleted if the successor is committed (unless it is pinned), and gets its own name back if
    there is none.
    """
    done = storage.collect_leftovers()
    for name in storage.list_dirs():
        match = _LEFTOVER.fullmatch(name)
        path = storage.root / name
        if match is None or not may_go(match["nonce"], functools.partial(age_s, path)):
            continue
        try:
            if _clean_one(storage, path, match):
                done.append(name)
        except OSError as error:
            logger.warning("could not clean up %s: %s", path, error)
    return done


def _clean_one(storage: Storage, path: Path, match: re.Match[str]) -> bool:
    if match["what"] is None:
        storage.delete_tree(path)
        return True
    successor = storage.root / match["name"]
    if match["what"] == "old" and not os.path.lexists(successor):
        storage.rename(path, successor)
        storage.sync_dir(storage.root)
        logger.warning("restored %s, which an interrupted save had moved aside", successor)
        return True
    if match["what"] == "old" and (is_pinned(path) or not is_committed(successor)):
        return False
    storage.remove_tree(path)
    return True
