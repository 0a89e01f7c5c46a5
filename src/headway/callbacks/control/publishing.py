"""What a run shows of itself while it goes on.

Owns: which facts go on the board and when, and which records of the log are incidents. Does not
own: the board (control/status.py).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from headway.control.status import StatusBoard
from headway.engine.state import TrainerState

# At most so often, so that steps of a millisecond do not pay for it.
_EVERY_S = 0.2
_PHASES = {
    "evaluate": "evaluating",
    "generate": "evaluating",
    "save": "saving",
    "close": "stopping",
}
# The beginning of a logger's name -> what an incident is called.
_KINDS = {
    "headway.callbacks.guard.divergence": "divergence",
    "headway.callbacks.guard.nan_guard": "not finite",
    "headway.engine.delivery": "not finite",
    "headway.trainers.rollback": "rollback",
    "headway.engine.events": "callback",
    "headway.callbacks.guard": "guard",
    "headway.checkpoint": "checkpoint",
    "headway.trainers.saving": "checkpoint",
}
_NO_INCIDENTS = ("headway.control",)


class Publisher:
    """Writes the board of a run; all methods but `report` are for the training thread."""

    def __init__(self, board: StatusBoard, trainer: Any) -> None:
        self._board, self._trainer = board, trainer
        self._state: TrainerState = trainer.state
        self._next_s = 0.0
        self._began_s = time.monotonic()
        self._first_step = self._state.global_step
        self._aside_s: float = trainer.timing.aside_s
        self._num_disabled = 0
        self._phase = "starting"

    def begin(self) -> None:
        """The first step is about to begin."""
        args = self._trainer.args
        self._board.publish(
            output_dir=os.path.abspath(args.output_dir),
            run_name=args.run_name,
            run_id=self._state.run_id,
            world_size=args.world_size,
            metrics={},
            last_checkpoint=None,
            last_error=None,
            disabled_callbacks={},
            offloaded=False,
            learning_rate=self._trainer.learning_rate,
        )
        self._publish()

    def end_step(self) -> None:
        """A step has ended."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _EVERY_S
            self._publish()

    def _publish(self, **more: Any) -> None:
        state, disabled = self._state, self._trainer.bus.disabled
        if len(disabled) != self._num_disabled:
            self._num_disabled = len(disabled)
            more["disabled_callbacks"] = dict(disabled)
        self._board.publish(
            global_step=state.global_step,
            max_steps=state.max_steps,
            epoch=state.epoch,
            num_input_tokens_seen=state.num_input_tokens_seen,
            eta_s=self._eta_s(),
            **more,
        )

    def _eta_s(self) -> float | None:
        """By the speed of this process so far, without what was no training."""
        state = self._state
        num_steps: int = state.global_step - self._first_step
        left = max(0, state.max_steps - state.global_step)
        if state.max_steps <= 0 or num_steps <= 0:
            return None
        aside_s = float(self._trainer.timing.aside_s) - self._aside_s
        taken_s: float = max(0.0, time.monotonic() - self._began_s - aside_s)
        return left * taken_s / num_steps

    def change_phase(self, doing: str | None) -> None:
        """What the loop does has changed."""
        commands = self._trainer.commands
        if commands.paused and doing in (None, "pause"):
            # Whoever waits for the word may start another job on the device.
            self.show_phase("paused" if commands.is_held else "pausing")
        else:
            self.show_phase(_PHASES.get(doing or "", "training"))

    def show_phase(self, phase: str) -> None:
        if phase == self._phase:
            return
        self._phase = phase
        self._publish(status=phase, offloaded=self._trainer.commands.is_offloaded)
        self._board.announce("phase", status=phase, step=self._state.global_step)

    def log(self, logs: Mapping[str, Any]) -> None:
        """A log record."""
        metrics = {**self._board.status.get("metrics", {}), **logs}
        self._publish(metrics=metrics, learning_rate=self._trainer.learning_rate)
        self._board.announce("log", step=self._state.global_step, logs=logs)

    def evaluate(self, metrics: Mapping[str, Any]) -> None:
        self._board.announce("evaluate", step=self._state.global_step, metrics=metrics)

    def save(self, step: int, path: str) -> None:
        """A checkpoint is committed."""
        checkpoint = {"path": path, "step": step, "committed": True}
        self._publish(last_checkpoint=checkpoint, last_checkpoint_step=step)
        self._board.announce("save", step=step, path=path)

    def load(self, step: int, path: str) -> None:
        """The run goes on from a checkpoint."""
        self._first_step, self._began_s = step, time.monotonic()
        self._aside_s = self._trainer.timing.aside_s
        checkpoint = {"path": path, "step": step, "committed": True}
        self._publish(last_checkpoint=checkpoint, last_checkpoint_step=step)
        self._board.announce("load", step=step, path=path)

    def fail(self, error: BaseException) -> None:
        """The run has failed."""
        text = f"{type(error).__name__}: {error}"
        step = self._state.global_step
        self._board.report_incident("error", text, step)
        self._publish(last_error={"message": text, "step": step})

    def end(self) -> None:
        """Nothing more comes."""
        outcome = self._state.outcome
        self._publish(outcome=outcome)
        self.show_phase("failed" if outcome == "failed" else "finished")
        self._board.announce("end", step=self._state.global_step, outcome=outcome)

    def report(self, record: logging.LogRecord) -> None:
        """A warning of the run, from whatever thread."""
        kind = next(
            (kind for start, kind in _KINDS.items() if record.name.startswith(start)),
            record.levelname.lower(),
        )
        self._board.report_incident(kind, record.getMessage(), self._state.global_step)


class IncidentHandler(logging.Handler):
    """Shows what the run warns of."""

    def __init__(self, publisher: Publisher) -> None:
        super().__init__(logging.WARNING)
        self._publisher = publisher

    def emit(self, record: logging.LogRecord) -> None:
        # A script without handlers of its own sees warnings by the last resort of `logging`, which
        # counts this handler for one.
        if logging.lastResort is not None and not _has_others(record.name, self):
            logging.lastResort.handle(record)
        if record.name.startswith(_NO_INCIDENTS):
            return
        try:
            self._publisher.report(record)
        except Exception:
            self.handleError(record)


def _has_others(name: str, own: logging.Handler) -> bool:
    """Whether records of a logger reach any other handler."""
    place: logging.Logger | None = logging.getLogger(name)
    while place is not None:
        if any(handler is not own for handler in place.handlers):
            return True
        place = place.parent if place.propagate else None
    return False
