"""Ends a run before the time of its job is up, with a checkpoint that is committed by then.

Owns: reading a limit, and how long before it the run has to stop. Does not own: stopping, which is
what `stop_at` does (engine/triggers.py): rank 0's clock decides, and an evaluation is cut short.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from headway.callbacks.watch.ranges import require_positive
from headway.config.duration import Duration
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerState
from headway.errors import ConfigError

logger = logging.getLogger(__name__)

SLURM = "slurm"
END_VARIABLE = "SLURM_JOB_END_TIME"
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")
_NUM_STEPS = 50
_ALLOWED = "'HH:MM:SS', 'D-HH:MM:SS', a duration such as '71h', a number of seconds, or 'slurm'"


class TimeLimitCallback(TrainerCallback):
    """Saves and stops so early that the checkpoint is there when `limit` is over.

    `limit`: `HH:MM:SS`, `D-HH:MM:SS`, a duration of wall time, seconds, or `slurm`: the end that
    Slurm gives the job (SLURM_JOB_END_TIME). A time counts from when this object is made. The run
    stops `margin_s` before, or earlier: `safety_factor` times the longest save that was seen, plus
    the longest of the latest steps.
    """

    def __init__(self, limit: Any, *, margin_s: float = 60.0, safety_factor: float = 2.0) -> None:
        kind = type(self).__name__
        require_positive(f"{kind}: margin_s", margin_s)
        require_positive(f"{kind}: safety_factor", safety_factor)
        if safety_factor < 1:
            raise ConfigError(
                f"{kind}: safety_factor: {safety_factor!r} given; allowed: a number from 1 up"
            )
        self.limit, self.margin_s, self.safety_factor = limit, margin_s, safety_factor
        self._made_at_s = time.monotonic()
        self._limit_s = None if limit == SLURM else read_limit(limit, f"{kind}: limit")
        if self._limit_s is not None and self._limit_s <= margin_s:
            raise ConfigError(
                f"{kind}: limit: {limit!r} given; allowed: more than margin_s={margin_s:g} seconds"
            )
        self.longest_save_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._parts_s: dict[int, dict[str, float]] = {}
        self._began_s = 0.0
        self._end_s: float | None = None

    @property
    def needed_s(self) -> float:
        """How long before the limit the run has to stop."""
        step_s = max(self._steps_s, default=0.0)
        return max(self.margin_s, self.safety_factor * self.longest_save_s + step_s)

    def on_train_begin(self, state: TrainerState, trainer: Any) -> None:
        self._steps_s.clear()
        self._parts_s.clear()
        if not state.is_world_process_zero:
            return
        if self._limit_s is None:
            self._end_s = time.monotonic() + read_slurm_end() - time.time()
        else:
            self._end_s = self._made_at_s + self._limit_s
        if not trainer.saves_at_end:
            logger.warning("TimeLimitCallback: save_strategy='no', so it will stop without a save")
        left_s = self._end_s - time.monotonic()
        if left_s <= self.needed_s:
            logger.warning(
                "TimeLimitCallback: %.0f s are left, and %.0f s are needed to end in time "
                "(margin_s=%g, the longest save took %.0f s): the run stops at once",
                max(0.0, left_s),
                self.needed_s,
                self.margin_s,
                self.longest_save_s,
            )
        self._set(trainer)

    def on_step_begin(self) -> None:
        self._began_s = time.monotonic()

    def on_step_end(self, trainer: Any) -> None:
        self._steps_s.append(time.monotonic() - self._began_s + trainer.timing.fetch_s)
        self._set(trainer)

    def on_metrics(self, step: int, metrics: Mapping[str, float], trainer: Any) -> None:
        from headway.engine.metrics import SAVE_ASYNC_DURATION, SAVE_DURATION

        # The two of one save may come with different flushes.
        found = {
            key: metrics[key] for key in (SAVE_DURATION, SAVE_ASYNC_DURATION) if key in metrics
        }
        if found:
            parts = self._parts_s.setdefault(step, {})
            parts.update(found)
            self.longest_save_s = max(self.longest_save_s, sum(parts.values()))
            for old in sorted(self._parts_s)[:-2]:
                del self._parts_s[old]
            self._set(trainer)

    def _set(self, trainer: Any) -> None:
        if self._end_s is not None:
            trainer.stop_by(self._end_s - self.needed_s)

    def state_dict(self) -> dict[str, Any]:
        return {"version": 1, "longest_save_s": self.longest_save_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.longest_save_s = max(self.longest_save_s, float(state.get("longest_save_s") or 0.0))


def read_limit(given: Any, option: str = "limit") -> float:
    """A limit of time in seconds."""
    if isinstance(given, int | float) and not isinstance(given, bool):
        require_positive(option, given)
        return float(given)
    if isinstance(given, str) and (match := _CLOCK.fullmatch(given.strip())):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    problem = f"{option}: {given!r} given; allowed: {_ALLOWED}"
    if isinstance(given, str) and given.strip().lower() in (SLURM, "slrum", "slum"):
        problem += f"; did you mean {SLURM!r}?"
    if not isinstance(given, str | Duration):
        raise ConfigError(problem)
    try:
        duration = Duration.parse(given)
    except ConfigError:
        raise ConfigError(problem) from None
    if duration.unit != "seconds" or not duration.value:
        raise ConfigError(problem)
    return float(duration.value)


def read_slurm_end() -> float:
    """When Slurm ends the job, in seconds of the epoch."""
    text = os.environ.get(END_VARIABLE, "").strip()
    if not text.isdigit():
        raise ConfigError(
            f"TimeLimitCallback: limit='slurm' needs {END_VARIABLE} to be a number of seconds, "
            f"got {text or 'nothing'!r}; is this a job of Slurm?"
        )
    return float(text)
