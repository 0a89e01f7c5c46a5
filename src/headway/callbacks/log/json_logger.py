"""Every log record as one line of JSON."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any, TextIO

from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)


class JsonLogger(TrainerCallback):
    """Writes `trainer_logs.jsonl` into the output directory.

    A record is one whole line, handed to the system in one write. A resumed run drops the records
    that came after its checkpoint; a fresh run keeps an older file aside.
    """

    def __init__(self, file_name: str = "trainer_logs.jsonl") -> None:
        self.file_name = file_name
        self._file: TextIO | None = None
        self._start_step = 0
        self._loaded: dict[str, Any] | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._start_step = state.global_step

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any]
    ) -> None:
        if not state.is_world_process_zero:
            return
        if self._file is None:
            # Not before there is something to write: a run that fails at once leaves no file.
            self._file = _open(Path(args.output_dir) / self.file_name, self._start_step)
            if self._loaded is not None:
                self._write(self._loaded)
        self._write({"step": state.global_step, "time": time.time(), **logs})

    def on_load(self, args: Any, state: TrainerState, control: TrainerControl, path: str) -> None:
        self._loaded = {"step": state.global_step, "time": time.time(), "loaded_checkpoint": path}
        if self._file is not None:  # a rollback: what came after that step did not happen
            self._file.close()
            self._file = _open(Path(args.output_dir) / self.file_name, state.global_step)
            self._write(self._loaded)

    def on_close(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(_finite(record), default=str) + "\n")
        self._file.flush()


def _open(path: Path, step: int) -> TextIO:
    """The log, holding what an earlier process wrote up to `step`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        if step == 0:
            os.replace(path, _aside(path))
        else:
            _drop_after(path, step)
    return path.open("a", encoding="utf-8")


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: those become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _aside(path: Path) -> Path:
    number = 1
    while (kept := path.with_suffix(f".old-{number}{path.suffix}")).exists():
        number += 1
    logger.info("keeping the log of an earlier run as %s", kept)
    return kept


def _drop_after(path: Path, step: int) -> None:
    """Cut the file after the last record of `step` or before; a torn last line goes too."""
    keep = 0
    with open(path, "rb+") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or record.get("step", 0) > step:
                break
            keep += len(line)
        file.truncate(keep)
