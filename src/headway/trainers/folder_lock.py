"""One run at a time in an output folder.

Owns: the lock. Does not own: what is in the folder. Two runs would delete each other's checkpoints
and write into each other's logs.

A lock of the process, by the system: it is gone when the process is, however that ended, and worker
processes do not inherit it. Where a file system has none, there is none.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from pathlib import Path

from headway.errors import ConfigError

logger = logging.getLogger(__name__)

LOCK_NAME = "run/lock"


class FolderLock:
    """Held from the first step of a run to its end."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._file: int | None = None
        self._place: tuple[int, int] | None = None
        """Which folder the lock was taken in."""

    def check(self) -> None:
        """Refuse a folder in which somebody trains; no file is made for it."""
        if (self._folder / LOCK_NAME).is_file():
            self.take()
            self.release()

    def take(self) -> None:
        path = self._folder / LOCK_NAME
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return  # whoever writes there next says what is wrong with the folder
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # which of them, the system may choose
            owner = os.pread(file, 200, 0).decode(errors="replace").strip()
            os.close(file)
            raise ConfigError(
                f"output_dir: {self._folder} is in use by another run ({owner or 'unknown'}), "
                "which would lose its checkpoints; give another folder, or end that run first"
            ) from None
        except OSError:  # no locks on this file system
            os.close(file)
            return
        self._file, self._place = file, _identity(self._folder)
        with contextlib.suppress(OSError):  # a full disk; the lock holds without a name
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def renew(self) -> None:
        """Take the folder anew where it was moved or deleted since: what comes goes to another."""
        if self._place is None:
            return
        found = _identity(self._folder / LOCK_NAME)
        if self._file is not None and found is not None and found == _identity(self._file):
            return
        before = self._place
        self.release()
        self._place = before  # until this succeeds, the next save tries again
        self.take()
        # Some network file systems give a file another number now and then.
        if found is None and self._place != before:
            logger.warning(
                "output_dir: %s was moved or deleted while the run went on; what is written from "
                "now on is in a new folder of that name, without the earlier checkpoints and logs",
                self._folder,
            )

    def release(self) -> None:
        """The file stays: another run may wait to open it."""
        file, self._file, self._place = self._file, None, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)


def _identity(path: Path | int) -> tuple[int, int] | None:
    """What tells a file or folder from another that comes under its name."""
    try:
        found = os.stat(path)
    except OSError:  # also of an open file: a network file system's, deleted by another machine
        return None
    return found.st_dev, found.st_ino
