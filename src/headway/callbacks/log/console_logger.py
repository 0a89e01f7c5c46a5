"""The metrics of steps on the console, in blocks."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from headway.callbacks.log.name_patterns import NamePatterns
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

# Figures of a step may come long after it, as how long a save in the background took.
_MOST_HEADS = 1000
DEFAULT_METRICS = (
    "train/CE loss",
    "train/PPL",
    "train/Z loss",
    "train/load balancing loss",
    "train/router Z loss",
    "train/block */load imbalance",
    "gpu_memory/*",
    "optim/total grad norm",
    "optim/step skipped",
    "optim/LR*",
    "throughput/*",
    "checkpoint/*",
)


class ConsoleLoggerCallback(TrainerCallback):
    """Prints the metrics of a step below a line that tells step, epoch and time left.

    Metrics come at step 1 and every `metrics_log_interval` steps (None: `log_interval`), those
    whose names match `metrics`; other steps get their line every `log_interval` steps. All of it
    is printed when the metrics arrive, so it is in the order of the steps, and each line tells of
    its own step. What comes late (how long a save took) has the line of its step above it once
    more. Evaluations are printed with all their figures.
    """

    failure_policy = "disable"

    def __init__(
        self,
        log_interval: int = 1,
        metrics_log_interval: int | None = None,
        metrics: Sequence[str] | None = None,
    ) -> None:
        _check_interval("log_interval", log_interval)
        if metrics_log_interval is not None:
            _check_interval("metrics_log_interval", metrics_log_interval)
        self.log_interval = log_interval
        self.metrics_log_interval = metrics_log_interval or log_interval
        chosen = DEFAULT_METRICS if metrics is None else metrics
        self._patterns = NamePatterns("ConsoleLoggerCallback: metrics", chosen)
        self.metrics = list(chosen)
        self._heads: dict[int, str] = {}
        """What stands above a step's metrics, of the newest steps."""
        self._untold: set[int] = set()
        self._started: tuple[float, int] = (0.0, 0)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._started = (time.monotonic(), state.global_step)
        self._untold.clear()
        # For what is recorded before the first step, as the time that loading took.
        self._heads = {state.global_step: self._head(args, state)}

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if not state.is_world_process_zero:
            return
        # Now, while state tells of this step; its metrics come later.
        self._heads[state.global_step] = self._head(args, state)
        self._untold.add(state.global_step)
        oldest = next(iter(self._heads))
        if len(self._heads) > _MOST_HEADS and oldest not in self._untold:
            del self._heads[oldest]

    def on_metrics(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        step: int,
        metrics: Mapping[str, Any],
    ) -> None:
        if not state.is_world_process_zero:
            return
        is_new = step in self._untold
        self._untold.discard(step)
        shown: dict[str, Any] = {}
        if step == 1 or step % self.metrics_log_interval == 0:
            shown = {name: metrics[name] for name in metrics if self._patterns.match(name)}
        if shown or (is_new and step % self.log_interval == 0):
            _print_block(self._heads.get(step) or f"[step={step:,}/{_total(state)}]", shown)

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any],
    ) -> None:
        if state.is_world_process_zero:
            _print_block(self._head(args, state), metrics)

    def _head(self, args: Any, state: TrainerState) -> str:
        parts = [f"step={state.global_step:,}/{_total(state)}", f"epoch={state.epoch:.2f}"]
        parts.append(f"eta={self._time_left(state)}")
        if getattr(args, "stop_at", None) is not None:
            parts.append(f"stop_at={args.stop_at}")
        return f"[{','.join(parts)}]"

    def _time_left(self, state: TrainerState) -> str:
        started_s, started_step = self._started
        done = state.global_step - started_step
        if not state.max_steps or done <= 0:
            return "???"
        left = max(0, state.max_steps - state.global_step)
        minutes = math.ceil(left * (time.monotonic() - started_s) / done / 60)
        days, minutes = divmod(minutes, 24 * 60)
        hours, minutes = divmod(minutes, 60)
        spelled = [f"{count}{unit}" for count, unit in ((days, "d"), (hours, "h")) if count]
        return " ".join([*spelled, f"{minutes}m"])


def _total(state: TrainerState) -> str:
    return f"{state.max_steps:,}" if state.max_steps else "???"


def _print_block(head: str, metrics: Mapping[str, Any]) -> None:
    lines = [head, *(f"    {name}={_figure(value)}" for name, value in metrics.items())]
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def _figure(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if 1e-4 <= abs(value) < 1:
        return f"{value:.4f}"
    return f"{value:,.2f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _check_interval(option: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"ConsoleLoggerCallback: {option} must be an integer of at least 1, got {value!r}"
        )
