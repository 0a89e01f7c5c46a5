"""Every log record of a run as JSON in a file."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from headway.callbacks.log.json_lines import JsonLogWriter, log_folder
from headway.callbacks.log.json_values import plain_value
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError, unknown

logger = logging.getLogger(__name__)

FILE_NAMES = {"lines": "trainer_logs.jsonl", "array": "trainer_logs.json"}


class JsonLogger(TrainerCallback):
    """Writes each record of the log, evaluations and the summary included, in one write.

    The file is `trainer_logs.jsonl` (`format="lines"`) or, as one JSON array, `trainer_logs.json`
    (`format="array"`), in `logging_dir` if that was set, else in `output_dir`. Further arguments
    by name are recorded when the run starts.

    A resumed run drops the records that came after its checkpoint, but for the summary of a run
    that has nothing left to train; a fresh one keeps an older file under another name. A record
    that cannot be written, as on a full disk, is left out, and the next one is tried again.
    """

    failure_policy = "disable"

    def __init__(self, file_name: str | None = None, format: str = "lines", **kwargs: Any) -> None:
        if format not in tuple(FILE_NAMES):
            raise ConfigError("JsonLogger: " + unknown("format", str(format), FILE_NAMES))
        file_name = FILE_NAMES[format] if file_name is None else file_name
        self.writer = JsonLogWriter(file_name, format, option="JsonLogger: file_name")
        self.kwargs = plain_value(kwargs)
        self._start_step = 0
        self._started: dict[str, float] = {}
        self._loaded: str | None = None
        self._active = False
        self._logged: tuple[int, dict[str, Any]] = (-1, {})
        self._failed, self._num_lost = False, 0
        self._head: tuple[int, float, dict[str, Any], str] | None = None
        """The record that began the file, for one that takes its place."""
        self._summary: dict[str, Any] | None = None
        """That of the run so far, as long as nothing is trained beyond it."""

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._start_step = state.global_step
        self._started = {"epoch": state.epoch, "timestamp": time.time()}
        self._active = state.is_world_process_zero
        self._failed, self._num_lost = False, 0
        problem = _find_obstacle(log_folder(args) / self.writer.filename)
        if self._active and problem is not None:
            self._active = False
            logger.warning("JsonLogger: %s; the run goes on without this log", problem)

    def on_load(self, args: Any, state: TrainerState, control: TrainerControl, path: str) -> None:
        self._loaded = str(path)
        if self.writer.is_open:  # what came after that step did not happen
            self.writer.rewind(state.global_step)
            self._write_start("rollback", args, state, None)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        if self._active and not self.writer.is_open and not self._failed:
            self._open(args, state, trainer)
        self._summary = None

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        trainer: Any,
    ) -> None:
        if not self._active:
            return
        if not self.writer.is_open:
            self._open(args, state, trainer)
        self._logged = (state.global_step, logs)
        self._write(state.global_step, state, logs, record_type(logs))

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: dict[str, Any]
    ) -> None:
        step, logs = self._logged
        if step == state.global_step and metrics.keys() <= logs.keys():
            return  # the trainer logs what it evaluates
        if self._active:
            self._write(state.global_step, state, metrics, "eval")

    def on_close(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if self._summary is not None:
            self._write(self._start_step, state, self._summary, "summary")
        self._active, self._loaded, self._summary = False, None, None
        if self._num_lost:
            logger.warning("JsonLogger: %d records could not be written", self._num_lost)
            self._num_lost = 0
        self.writer.close()

    def close(self) -> None:
        """Stop writing; what is written stays."""
        self.writer.close()

    def state_dict(self) -> dict[str, Any]:
        return self.writer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.writer.load_state_dict(state)

    def _open(self, args: Any, state: TrainerState, trainer: Any) -> None:
        # Not before a step has worked: a run that fails at once changes nothing on disk.
        try:
            self.writer.open(log_folder(args), self._start_step)
        except OSError as error:
            self._tell_failure(error)
            return
        last = self.writer.dropped_last or {}
        if last.get("type") == "summary" and last.get("global_step") == self._start_step:
            self._summary = last
        self._write_start("start" if self._start_step == 0 else "resume", args, state, trainer)

    def _write_start(self, kind: str, args: Any, state: TrainerState, trainer: Any) -> None:
        facts: dict[str, Any] = {"global_step": state.global_step}
        if kind != "rollback":
            facts = {
                **self._started,  # the file is opened after a step, its first record is of before
                "global_step": self._start_step,
                "run_id": getattr(trainer, "run_id", None),
                "run_name": getattr(args, "run_name", None),
                "max_steps": state.max_steps,
            }
        facts["loaded_checkpoint"] = self._loaded
        if self.writer.kept_aside is not None:
            facts["kept_aside"] = self.writer.kept_aside.name
        if kind != "rollback":
            facts["kwargs"] = self.kwargs
        facts = {key: value for key, value in facts.items() if value not in (None, {})}
        if kind != "rollback":
            self._head = (self._start_step, state.epoch, facts, kind)
        self._write(self._start_step, state, facts, kind)

    def _write(self, step: int, state: TrainerState, data: dict[str, Any], kind: str) -> None:
        if not self.writer.is_open:
            self._num_lost += self._failed
            return
        try:
            if self.writer.reopen_if_gone():
                logger.warning(
                    "JsonLogger: %s was moved or deleted; a new one begins", self.writer.path
                )
                if self._head is not None:
                    self.writer.write_record(*self._head)
            self.writer.write_record(step, state.epoch, data, type=kind)
        except OSError as error:
            self._num_lost += 1
            self._tell_failure(error)

    def _tell_failure(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            logger.warning(
                "JsonLogger: a record could not be written, the next one is tried again: %s", error
            )


def record_type(logs: dict[str, Any]) -> str:
    """What a record of the log is: train, eval or summary."""
    if is_summary(logs):
        return "summary"
    measured = any(key.endswith(("_loss", "_runtime")) or key.startswith("eval/") for key in logs)
    if "loss" in logs or not measured:
        return "train"
    return "eval"


def is_summary(logs: dict[str, Any]) -> bool:
    """Whether a record ends a run; an evaluation of training data may be named train too."""
    return "train_runtime" in logs and "train_samples" in logs


def _find_obstacle(path: Path) -> str | None:
    """Why a file cannot be written, as far as that shows without writing."""
    if path.is_dir():
        return f"{path} is a folder"
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if existing != path and not existing.is_dir():
        return f"{path} cannot be written, because {existing} is not a folder"
    needed = os.W_OK if existing == path else os.W_OK | os.X_OK
    if not os.access(existing, needed):
        return f"{path} cannot be written: no permission to write to {existing}"
    return None
