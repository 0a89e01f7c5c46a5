"""Writing a save while training goes on.

Owns: the one thread in which a save is written, that at most one is under way, and that its outcome
reaches the main thread. Does not own: the copy of the state (staging.py), the writing and the
commit (manager.py), when to look for the outcome (the training loop).
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from headway.checkpoint.manager import CheckpointManager
from headway.checkpoint.staged import PendingSave

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Saved:
    """A save that is committed."""

    path: Path
    step: int
    duration_s: float
    """From the hand-over of the copied state to the commit."""


class BackgroundSaver:
    """Hands staged saves to a thread and brings their outcome back.

    With `asynchronous=False` the save is written before `start` returns; all else is the same.
    """

    def __init__(self, manager: CheckpointManager, *, asynchronous: bool = True) -> None:
        self.finished = False
        """Whether a save has ended whose outcome `collect` has not returned yet."""
        self._manager = manager
        self._asynchronous = asynchronous
        self._thread: threading.Thread | None = None
        self._step: int | None = None
        self._path: Path | None = None
        self._duration_s = 0.0
        self._error: BaseException | None = None
        self._last_error: str | None = None

    @property
    def under_way(self) -> int | None:
        """The step whose save is being written right now, if one is."""
        return None if self.finished else self._step

    @property
    def status(self) -> str:
        """One line for people: what is being written, or how the last save failed."""
        if self.under_way is not None:
            return f"writing the checkpoint of step {self.under_way}"
        return self._last_error or "idle"

    def start(self, pending: PendingSave) -> None:
        """Write a staged save; the outcome of the one before must have been collected.

        The interpreter does not exit before the thread has ended.
        """
        assert self._step is None, "at most one save is under way"
        self._step = pending.step
        if not self._asynchronous:
            self._write(pending)
            return
        self._thread = threading.Thread(
            target=self._write, args=(pending,), name=f"headway-save-{pending.step}", daemon=False
        )
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is exiting and starts no more threads
            self._thread = None
            self._write(pending)

    def _write(self, pending: PendingSave) -> None:
        started_s = time.monotonic()
        try:
            self._path = self._manager.write(pending)
            self._last_error = None
        except BaseException as error:
            self._error = error
            self._last_error = (
                f"the save of step {pending.step} failed: {type(error).__name__}: {error}"
            )
            # Said at once: the main thread may be in a long step, or at its end.
            logger.error("%s", self._last_error)
        finally:
            self._duration_s = time.monotonic() - started_s
            self.finished = True

    def collect(self) -> Saved | None:
        """Wait for the save under way, if any; returns it, or raises what it failed with."""
        if self._step is None:
            return None
        if self._thread is not None:
            self._thread.join()
        step, path, error = self._step, self._path, self._error
        self._thread = self._step = self._path = self._error = None
        self.finished = False
        if error is not None:
            error.add_note(f"while saving the checkpoint of step {step}")
            if isinstance(error, OSError) and error.errno in _FULL:
                error.add_note(
                    "the disk, or your share of it, is full; earlier checkpoints are whole. Make "
                    "room ('headway checkpoint prune' deletes old ones), then start the run again"
                )
            raise error
        assert path is not None
        return Saved(path, step, self._duration_s)
