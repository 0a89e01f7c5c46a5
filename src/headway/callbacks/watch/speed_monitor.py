"""Throughput of every step, per device.

Owns: the `throughput/...` metrics. Does not own: what counts as training (training_time.py), how
time is taken on a device (step_stamps.py), what a device can do (device_peaks.py).
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from headway.callbacks.watch import training_time
from headway.callbacks.watch.device_peaks import device_name, peak_flops, working_dtype
from headway.callbacks.watch.ranges import require_count, require_positive
from headway.callbacks.watch.sharing import on_all_ranks
from headway.callbacks.watch.step_stamps import HostStamps, Stamps, stamps_for
from headway.callbacks.watch.training_time import TrainingTime
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)

_TOKENS_PER_PARAMETER = 20
"""Of the rule of thumb known by the name Chinchilla."""


class SpeedMonitorCallback(TrainerCallback):
    """Records tokens, steps and operations per second and device, and what data loading takes.

    The first step is left out. Figures of a step are means over ranks, those of data loading the
    slowest rank's; "actual avg" is since the start, evaluations and saves included, and
    `throughput/goodput (%)` the share of that time that was training.

    `num_flops_per_token`, `num_params` (without embeddings) and `device_peak_flops_per_second`
    (of one device) are found out where they are None.
    """

    priority = -2  # after others have done their work in the step
    failure_policy = "disable"

    def __init__(
        self,
        num_flops_per_token: float | None = None,
        num_params: int | None = None,
        device_peak_flops_per_second: float | None = None,
    ) -> None:
        require_positive("num_flops_per_token", num_flops_per_token, optional=True)
        require_count("num_params", num_params, least=1, optional=True)
        require_positive(
            "device_peak_flops_per_second", device_peak_flops_per_second, optional=True
        )
        self.num_flops_per_token = num_flops_per_token
        self.num_params = num_params
        self.device_peak_flops_per_second = device_peak_flops_per_second
        self._peak, self._num_params = device_peak_flops_per_second, num_params
        self._time = TrainingTime()
        self._stamps: Stamps = HostStamps()
        self._num_ranks = 1
        self.reset()

    # What others ask

    @property
    def bps_avg(self) -> float | None:
        """Steps per second since the start; None before there is a figure."""
        return self._bps_avg

    @property
    def tps_avg(self) -> float | None:
        """Tokens per second and device since the start."""
        return self._tps_avg

    @property
    def mfu_avg(self) -> float | None:
        """Share of the device's peak since the start, in percent."""
        return self._mfu_avg

    def reset(self) -> None:
        """Start anew, as after a change of the batch size; the next step is left out again."""
        self._bps_avg: float | None = None
        self._tps_avg: float | None = None
        self._mfu_avg: float | None = None
        self._start_s: float | None = None
        self._excluded_before_s = 0.0
        self._total_steps = self._total_tokens = 0
        self._total_flops = 0.0
        self._tokens_seen, self._flos_seen = 0, 0.0
        self._step_began: Any = None
        self._step_ended: Any = None
        self._running: deque[_Step] = deque()
        self._last_done: _Step | None = None
        self._first_step: int | None = None
        """The first step that has figures."""
        self._has_done = False
        """Whether it is known of all ranks that their devices are through with that step."""

    # Events

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any, model: Any
    ) -> None:
        device = trainer.strategy.device
        self._time.begin(trainer.timing)
        self._stamps, self._num_ranks = stamps_for(device), args.world_size
        self.reset()
        if self.device_peak_flops_per_second is None:
            # Where one rank does not know, none records the metric: names must be equal.
            peaks = on_all_ranks(lambda: self._find_peak(args, state, device, model))
            self._peak = peaks[args.process_index] if all(peaks) else None
        if self.num_params is None and model is not None:
            self._num_params = _count_params(model)

    def _find_peak(self, args: Any, state: TrainerState, device: Any, model: Any) -> float | None:
        name = device_name(device)
        peak = None if name is None else peak_flops(name, working_dtype(args, model))
        if name is not None and peak is None and state.is_world_process_zero:
            logger.warning(
                "no throughput/device/MFU: the peak of %r is not known; give "
                "SpeedMonitorCallback device_peak_flops_per_second",
                name,
            )
        return peak

    def on_load(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self.reset()  # after a rollback the counters of the run are those of an earlier step

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._time.begin_step()
        if self._time.was_interrupted:
            self._step_began = self._stamps.take()

    def on_metrics(
        self, args: Any, state: TrainerState, control: TrainerControl, step: int
    ) -> None:
        self._time.deliver(step, state.global_step)
        # The values of a step are here: the steps before it are over on the device.
        self._has_done |= self._first_step is not None and step > self._first_step

    def on_log_step(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._time.drain()

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._time.interrupt()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._time.interrupt()

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        self._time.end_step()
        ended = self._stamps.take()
        if self._start_s is None:
            self._start_s = training_time.clock()
            self._excluded_before_s = self._time.excluded_s
        else:
            self._add_step(state, ended)
            self._record(state, trainer)
        self._step_ended = ended
        self._tokens_seen, self._flos_seen = state.num_input_tokens_seen, state.total_flos

    # Figures

    def _add_step(self, state: TrainerState, ended: Any) -> None:
        tokens = state.num_input_tokens_seen - self._tokens_seen
        flops = state.total_flos - self._flos_seen
        if self.num_flops_per_token is not None:
            flops = self.num_flops_per_token * tokens
        if self._first_step is None:
            self._first_step = state.global_step
        interrupted = self._time.was_interrupted
        began = self._step_began if interrupted else self._step_ended
        # From the end of the last step its fetch is inside; else it came before `began`.
        apart_s = self._time.fetch_s if interrupted else 0.0
        self._running.append(
            _Step(
                began,
                ended,
                apart_s,
                self._time.fetch_s,
                tokens / self._num_ranks,
                flops / self._num_ranks,
            )
        )
        self._total_steps += 1
        self._total_tokens += tokens
        self._total_flops += flops

    def _record(self, state: TrainerState, trainer: Any) -> None:
        while self._running and self._stamps.is_over(self._running[0].ended):
            self._last_done = self._running.popleft()
        # All ranks are to record the same names, whichever of their devices is ahead.
        if self._last_done is not None and (self._has_done or not self._stamps.waits):
            self._record_step(self._last_done, trainer)
        self._record_average(trainer)
        trainer.record_metric("throughput/total tokens", state.num_input_tokens_seen)
        flops = state.total_flos
        if self.num_flops_per_token is not None:
            flops = self.num_flops_per_token * state.num_input_tokens_seen
        trainer.record_metric("throughput/total petaflops", flops / 1e15)
        if self._num_params:
            multiple = state.num_input_tokens_seen / (_TOKENS_PER_PARAMETER * self._num_params)
            trainer.record_metric("throughput/chinchilla multiple", multiple)

    def _record_step(self, step: _Step, trainer: Any) -> None:
        """On a device that works behind the host: of the newest step that is done."""
        seconds = self._stamps.seconds(step.began, step.ended) + step.apart_s
        if seconds <= 0:  # a clock too coarse for the step
            seconds = 1e-9
        record, prefix = trainer.record_metric, "throughput/device"
        record(f"{prefix}/data loading (s)", step.fetch_s, "max")
        record(f"{prefix}/data loading (%)", min(100.0, 100 * step.fetch_s / seconds), "max")
        record(f"{prefix}/TPS", step.tokens / seconds, "mean")
        record(f"{prefix}/BPS", 1 / seconds, "mean")
        if self._total_flops > 0:
            record(f"{prefix}/flopsPS", step.flops / seconds, "mean")
            if self._peak:
                record(f"{prefix}/MFU", 100 * step.flops / seconds / self._peak, "mean")

    def _record_average(self, trainer: Any) -> None:
        assert self._start_s is not None, "set at the first step"
        seconds = max(1e-9, training_time.clock() - self._start_s)
        record, prefix = trainer.record_metric, "throughput/device"
        self._tps_avg = self._total_tokens / self._num_ranks / seconds
        self._bps_avg = self._total_steps / seconds
        record(f"{prefix}/TPS (actual avg)", self._tps_avg, "mean")
        record(f"{prefix}/BPS (actual avg)", self._bps_avg, "mean")
        excluded_s = self._time.excluded_s - self._excluded_before_s
        record("throughput/goodput (%)", 100 * max(0.0, 1 - excluded_s / seconds), "mean")
        if self._total_flops > 0:
            flops_s = self._total_flops / self._num_ranks / seconds
            record(f"{prefix}/flopsPS (actual avg)", flops_s, "mean")
            if self._peak:
                self._mfu_avg = 100 * flops_s / self._peak
                record(f"{prefix}/MFU (actual avg)", self._mfu_avg, "mean")


class _Step:
    """One step on this rank, whose end the device may not have reached yet."""

    __slots__ = ("apart_s", "began", "ended", "fetch_s", "flops", "tokens")

    def __init__(
        self, began: Any, ended: Any, apart_s: float, fetch_s: float, tokens: float, flops: float
    ) -> None:
        self.began, self.ended = began, ended
        self.apart_s, self.fetch_s = apart_s, fetch_s
        self.tokens, self.flops = tokens, flops


def _count_params(model: Any) -> int:
    """Parameters without embeddings; a part of a pipeline tells for the whole model."""
    from headway.models.operations import count_matmul_parameters

    told = getattr(model, "matmul_parameters", None)
    return int(told()) if callable(told) else count_matmul_parameters(model)
