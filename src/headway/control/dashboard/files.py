"""Files of a run, opened so that nothing leads out of its folder.

Owns: that no symbolic link is followed, nor anything but a regular file opened, whoever may have
written into the folder. Does not own: what the files mean.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_JSON_BYTES = 8 << 20


def open_inside(root: Path, *parts: str) -> int:
    """A descriptor of the regular file below `root`; OSError if it is anything else.

    Each part is opened relative to the one before: a folder that is swapped for a link meanwhile
    leads nowhere.
    """
    for part in parts:
        if part in ("", ".", "..") or "/" in part or "\0" in part:
            raise FileNotFoundError(f"{part!r} is no name of a file")
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(
                part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at
            )
            os.close(at)
            at = inner
        # Without waiting: a pipe in the place of a file would never be opened.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        found = os.open(parts[-1], flags, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise FileNotFoundError(f"{parts[-1]} is not a regular file")
    return found


def is_file_inside(root: Path, *parts: str) -> bool:
    """Whether `open_inside` would open it."""
    try:
        os.close(open_inside(root, *parts))
    except OSError:
        return False
    return True


def read_object(
    root: Path, *parts: str, most_bytes: int = MOST_JSON_BYTES
) -> dict[str, Any] | None:
    """The JSON object in a file below `root`; None if there is none that can be read."""
    try:
        with os.fdopen(open_inside(root, *parts), "rb") as file:
            text = file.read(most_bytes + 1)
        value = json.loads(text) if len(text) <= most_bytes else None
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_end(root: Path, name: str, most_bytes: int) -> bytes:
    """The last whole lines of a file, in so many bytes; nothing if it cannot be read."""
    try:
        with os.fdopen(open_inside(root, name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = max(0, size - most_bytes)
            file.seek(start)
            text = file.read(most_bytes)
    except OSError:
        return b""
    return text.partition(b"\n")[2] if start else text


def modified_at(root: Path, *parts: str) -> float | None:
    """When a file was last written; None if there is none."""
    try:
        descriptor = open_inside(root, *parts)
    except OSError:
        return None
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
