"""The TensorBoard writer of a callback that may be given one, or may find the run's.

Owns: what may be given, which writer is used, and that one of the callback's own follows resumes
and ends with the run. Does not own: the writer (summary_writer.py), nor what is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from headway.callbacks.log.summary_writer import ResumableSummaryWriter
from headway.engine.state import TrainerState
from headway.errors import ConfigError


class ChosenWriter:
    """`given` is a writer with the method `verb`, a folder, or None.

    With `finds`, None is the writer that another callback of the run has.
    """

    def __init__(self, given: Any, verb: str, *, finds: bool = False) -> None:
        if isinstance(given, str | os.PathLike):
            given = ResumableSummaryWriter(given)
        if given is not None and not callable(getattr(given, verb, None)):
            raise ConfigError(
                f"summary_writer: {given!r} given; allowed: a folder, an object with {verb} like a "
                "SummaryWriter, or none"
            )
        self.given = given
        self.writer: Any = given
        """The writer that is used, if any; the run's from `begin` on."""
        self._finds = finds
        self._own: ResumableSummaryWriter | None = None

    def begin(self, args: Any, state: TrainerState, trainer: Any) -> None:
        """A run starts or goes on."""
        callbacks = list(getattr(trainer, "callbacks", {}).values())
        registered = [c for c in callbacks if isinstance(c, ResumableSummaryWriter)]
        self.writer = self.given
        if self.given is None and self._finds:
            held = [getattr(callback, "summary_writer", None) for callback in callbacks]
            held = [writer for writer in held if isinstance(writer, ResumableSummaryWriter)]
            self.writer = next(iter([*registered, *held]), None)
        # A writer that is a callback of the run hears of all this by itself. Where several
        # callbacks were given the same one, each of them may tell it: repeating changes nothing.
        is_own = isinstance(self.given, ResumableSummaryWriter) and self.given not in registered
        self._own = self.given if is_own else None
        if self._own is not None:
            self._own.begin(args, state)

    def rewind(self, global_step: int) -> None:
        """What was written for steps after `global_step` did not happen."""
        if self._own is not None:
            self._own.rewind(global_step)

    def close(self) -> None:
        """Finish the file if it is of this callback's own writer."""
        if self._own is not None:
            self._own.close()

    def state_dict(self) -> dict[str, Any] | None:
        if isinstance(self.given, ResumableSummaryWriter):
            return self.given.state_dict()
        return None

    def load_state_dict(self, state: Any) -> None:
        """Take what `state_dict` gave; anything else, as of an older version, is passed over."""
        if isinstance(self.given, ResumableSummaryWriter) and isinstance(state, Mapping):
            self.given.load_state_dict(dict(state))
