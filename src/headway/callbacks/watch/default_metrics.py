"""Speed and memory in every log record.

Owns: `tok_per_sec`, `mfu` and `peak_mem`. Does not own: what counts as training (training_time.py),
what a device can do (device_peaks.py).
"""

from __future__ import annotations

import logging
from typing import Any

from headway.callbacks.watch.device_peaks import device_name, peak_flops, working_dtype
from headway.callbacks.watch.ranges import require_positive
from headway.callbacks.watch.sharing import on_all_ranks
from headway.callbacks.watch.training_time import TrainingTime
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)


class DefaultMetrics(TrainerCallback):
    """Adds `tok_per_sec`, `mfu` and `peak_mem` to log records, the same figures on all ranks.

    `peak_hardware_flops` is what all devices of the run can do together, in operations a second;
    None: found by the name of the devices, and no `mfu` where that is not known. Time spent
    evaluating, saving or generating does not count, nor do the first `speed_metrics_start_step`
    steps, which include compilation and warm-up.
    """

    priority = 10  # before the sinks read the record
    failure_policy = "disable"

    def __init__(self, peak_hardware_flops: float | None = None) -> None:
        require_positive("peak_hardware_flops", peak_hardware_flops, optional=True)
        self.peak_hardware_flops = peak_hardware_flops
        self._time = TrainingTime()
        self._steps_to_skip = 0
        self._own_peak: float | None = None
        self._since_s: float | None = None
        self._elsewhere_s = self._aside_s = 0.0
        self._tokens, self._flos = 0, 0.0

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any, model: Any
    ) -> None:
        self._time.begin(trainer.timing)
        self._since_s = None
        self._steps_to_skip = args.speed_metrics_start_step
        if self._steps_to_skip == 0:
            self._mark(state)
        if self.peak_hardware_flops is None:
            self._own_peak = self._find_peak(args, state, trainer.strategy.device, model)

    def _find_peak(self, args: Any, state: TrainerState, device: Any, model: Any) -> float | None:
        name = device_name(device)
        if name is None:
            return None
        dtype = working_dtype(args, model)
        peak = peak_flops(name, dtype)
        if peak is None and state.is_world_process_zero:
            logger.warning(
                "no mfu: the peak of %r in %s is not known; give DefaultMetrics "
                "peak_hardware_flops, the sum over all devices",
                name,
                dtype,
            )
        return peak

    def on_load(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        # A rollback sets the counters back: what was measured so far is of another state.
        if self._since_s is not None:
            self._since_s, self._steps_to_skip = None, 1

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._time.begin_step()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._time.end_step()
        if self._steps_to_skip > 0:
            self._steps_to_skip -= 1
            if self._steps_to_skip == 0:
                self._mark(state)

    def on_metrics(
        self, args: Any, state: TrainerState, control: TrainerControl, step: int
    ) -> None:
        self._time.deliver(step, state.global_step)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._time.interrupt()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._time.interrupt()

    def on_log_step(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any]
    ) -> None:
        self._time.drain()
        if logs.get("peak_mem_allocated"):
            logs["peak_mem"] = max(logs["peak_mem_allocated"])
        tokens = state.num_input_tokens_seen - self._tokens
        if self._since_s is None or tokens <= 0:
            return
        seconds, peak = self._of_all_ranks()
        if seconds > 0:
            logs["tok_per_sec"] = round(tokens / seconds)
            flops = state.total_flos - self._flos
            if peak and flops > 0:
                logs["mfu"] = flops / seconds / peak
        self._mark(state)

    def _of_all_ranks(self) -> tuple[float, float | None]:
        """Seconds of training on the slowest rank since the last record; the peak of all."""

        def measure() -> list[float]:
            assert self._since_s is not None, "looked at before"
            elsewhere_s = self._time.elsewhere_s - self._elsewhere_s
            wall_s = self._time.moment_s() - self._since_s
            aside_s = self._time.aside_s - self._aside_s
            return [wall_s - elsewhere_s, aside_s, self._own_peak or 0.0]

        measured = on_all_ranks(measure)
        peaks = [peak for *_, peak in measured]
        peak = self.peak_hardware_flops or (sum(peaks) if all(peaks) else None)
        # Whoever sets time aside keeps the others waiting.
        aside_s = max(aside_s for _, aside_s, _ in measured)
        return max(seconds for seconds, *_ in measured) - aside_s, peak

    def _mark(self, state: TrainerState) -> None:
        self._since_s = self._time.moment_s()
        self._elsewhere_s, self._aside_s = self._time.elsewhere_s, self._time.aside_s
        self._tokens, self._flos = state.num_input_tokens_seen, state.total_flos
