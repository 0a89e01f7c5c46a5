"""`AsyncCheckpointSaver`: training states written in the background, one at a time.

Owns: the snapshot before the write starts, the thread, and that no error of it is lost.
Does not own: the files (state_files.py), a run's own saves (manager.py).
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from headway.checkpoint.api import encode_training
from headway.checkpoint.state_files import EncodedState, save_state

logger = logging.getLogger(__name__)


class AsyncCheckpointSaver:
    """Saves without waiting for the disk. The last save is complete after `wait`, or at the end of
    a `with` block; the interpreter does not exit before the write has ended.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.last_checkpoint: str | None = None
        """The directory that was committed last."""

    def save(
        self,
        *,
        output_dir: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        state: Any,
        scheduler: Any = None,
        scaler: Any = None,
    ) -> None:
        """Wait for the save before (raising what went wrong with it), copy all state to host
        memory, then write in the background. When this returns, training may go on changing it.
        """
        self.wait()
        encoded = encode_training(
            model=model,
            optimizer=optimizer,
            state=state,
            scheduler=scheduler,
            scaler=scaler,
            copy=True,
        )
        # Not a daemon: the interpreter would kill that in the middle of a file.
        self._thread = threading.Thread(
            target=self._write,
            args=(encoded, output_dir, int(state.global_step)),
            name="headway-checkpoint-saver",
            daemon=False,
        )
        self._thread.start()

    def _write(self, encoded: EncodedState, directory: str | Path, step: int) -> None:
        try:
            self.last_checkpoint = save_state(encoded, directory, step)
        except BaseException as error:
            logger.error("saving %s failed: %s", directory, error)
            self._error = error

    def wait(self) -> None:
        """Wait for the save in progress; an error of it is raised here, once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.wait()
            return
        try:
            self.wait()
        except Exception:
            # The block's own error goes on; this one was logged when it happened.
            logger.debug("the last save failed too", exc_info=True)
