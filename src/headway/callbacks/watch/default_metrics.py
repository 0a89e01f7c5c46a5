"""Speed figures in every log record."""

from __future__ import annotations

import time
from typing import Any

from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState


class DefaultMetrics(TrainerCallback):
    """Adds `tok_per_sec` (and `mfu`, given the hardware's peak) to log records.

    Time spent evaluating or saving does not count, nor do the first `speed_metrics_start_step`
    steps, which include compilation and warm-up.
    """

    priority = 10  # before the sinks read the record

    def __init__(self, peak_hardware_flops: float | None = None) -> None:
        self.peak_hardware_flops = peak_hardware_flops
        self._since_s: float | None = None
        self._excluded_s = 0.0
        self._boundary_s = 0.0
        self._paused = False
        self._tokens = self._flos = 0.0

    def _mark(self, state: TrainerState) -> None:
        self._since_s, self._excluded_s = time.monotonic(), 0.0
        self._tokens, self._flos = state.num_input_tokens_seen, state.total_flos

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._since_s = None
        self._steps_to_skip = args.speed_metrics_start_step
        if self._steps_to_skip == 0:
            self._mark(state)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if self._paused:
            self._excluded_s += time.monotonic() - self._boundary_s
            self._paused = False

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._boundary_s = time.monotonic()
        if self._steps_to_skip > 0:
            self._steps_to_skip -= 1
            if self._steps_to_skip == 0:
                self._mark(state)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._paused = True

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._paused = True

    def on_log_step(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any]
    ) -> None:
        self._boundary_s = now = time.monotonic()
        if self._since_s is None:
            return
        seconds = now - self._since_s - self._excluded_s
        tokens = state.num_input_tokens_seen - self._tokens
        if seconds > 0 and tokens > 0:
            logs["tok_per_sec"] = round(tokens / seconds)
            if self.peak_hardware_flops:
                flops = state.total_flos - self._flos
                logs["mfu"] = flops / seconds / (self.peak_hardware_flops * args.world_size)
        if "peak_mem_allocated" in logs:
            logs["peak_mem"] = max(logs["peak_mem_allocated"])
        self._mark(state)
