"""How often the loss or the gradient norm jumps.

Owns: what counts as a spike, and the share of steps with one. Does not own: what to do about it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from headway.callbacks.watch.ranges import (
    require_count,
    require_flag,
    require_name,
    require_positive,
)
from headway.engine.events import TrainerCallback

logger = logging.getLogger(__name__)

_LEAST_STD = 1e-10
# The squares of larger values are not finite.
_LARGEST = 1e150


class StabilityMonitorCallback(TrainerCallback):
    """Adds `spike/SpikeScore` and `spike/SpikeScore (total)` to the metrics of each step.

    A step spikes if its loss or its gradient norm lies above the mean of the last `window_size`
    calm values by more than `threshold_std` standard deviations, or is not finite. The score is
    the share of such steps among the last `rolling_window`, from when there are so many; the
    total one among all, from `window_size` steps on. Steps without either metric do not count.
    """

    priority = 10  # the score is part of the metrics that sinks read
    failure_policy = "disable"

    def __init__(
        self,
        window_size: int = 128,
        rolling_window: int = 10000,
        threshold_std: float = 6.0,
        enabled: bool = True,
        loss_metric_name: str = "train/CE loss",
        grad_norm_metric_name: str = "optim/total grad norm",
    ) -> None:
        require_count("window_size", window_size, least=2)
        require_count("rolling_window", rolling_window, least=1)
        require_positive("threshold_std", threshold_std)
        require_flag("enabled", enabled)
        require_name("loss_metric_name", loss_metric_name)
        require_name("grad_norm_metric_name", grad_norm_metric_name)
        self.window_size = window_size
        self.rolling_window = rolling_window
        self.threshold_std = threshold_std
        self.enabled = enabled
        self.loss_metric_name = loss_metric_name
        self.grad_norm_metric_name = grad_norm_metric_name
        self._loss_history = CalmWindow(window_size, threshold_std)
        self._grad_norm_history = CalmWindow(window_size, threshold_std)
        self._spikes: deque[int] = deque()
        """Numbers of the steps that spiked, of the last `rolling_window`."""
        self._total_spike_count = self._total_step_count = 0
        self._told_absent = False

    def _forget_run(self) -> None:
        self.load_state_dict({})

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if not self.enabled:
            return
        loss = _find(metrics, self.loss_metric_name)
        norm = _find(metrics, self.grad_norm_metric_name)
        if loss is None and norm is None:
            self._tell_absent(metrics)
            return
        # Both windows take their value: no short cut.
        found = [
            history.spikes(value)
            for history, value in ((self._loss_history, loss), (self._grad_norm_history, norm))
            if value is not None
        ]
        self._count(any(found))
        if self._total_step_count >= self.rolling_window:
            metrics["spike/SpikeScore"] = len(self._spikes) / self.rolling_window
        if self._total_step_count >= self.window_size:
            metrics["spike/SpikeScore (total)"] = self._total_spike_count / self._total_step_count

    def _count(self, spiked: bool) -> None:
        self._total_step_count += 1
        if spiked:
            self._total_spike_count += 1
            self._spikes.append(self._total_step_count)
        while self._spikes and self._spikes[0] <= self._total_step_count - self.rolling_window:
            self._spikes.popleft()

    def _tell_absent(self, metrics: Mapping[str, float]) -> None:
        # Records of other callbacks alone are no step.
        if self._told_absent or not _is_step(metrics):
            return
        self._told_absent = True
        logger.warning(
            "StabilityMonitorCallback watches nothing: neither %r nor %r is among the metrics (%s)",
            self.loss_metric_name,
            self.grad_norm_metric_name,
            ", ".join(metrics),
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": 1,
            "loss_history": self._loss_history.values(),
            "grad_norm_history": self._grad_norm_history.values(),
            "spike_history": list(self._spikes),
            "total_spike_count": self._total_spike_count,
            "total_step_count": self._total_step_count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Windows that have become shorter keep their newest values."""
        self._loss_history.fill(state.get("loss_history") or ())
        self._grad_norm_history.fill(state.get("grad_norm_history") or ())
        self._total_spike_count = int(state.get("total_spike_count") or 0)
        self._total_step_count = total = int(state.get("total_step_count") or 0)
        history = list(state.get("spike_history") or ())
        if history and isinstance(history[0], bool):  # one flag a step, the newest last
            first = total - len(history) + 1
            history = [first + place for place, spiked in enumerate(history) if spiked]
        self._spikes = deque(n for n in map(int, history) if n > total - self.rolling_window)


class CalmWindow:
    """The newest values that were no spikes, with their mean and deviation at hand.

    Both are kept up to date value by value, and made anew once in a window's length so that the
    rounding of many updates does not add up.
    """

    def __init__(self, size: int, threshold_std: float) -> None:
        self._size, self._threshold_std = size, threshold_std
        self._values: deque[float] = deque()
        self._mean = self._squares = 0.0
        self._num_updates = self._num_in_a_row = 0

    def spikes(self, value: float) -> bool:
        """Whether the value is a spike; one that is not joins the window."""
        if not abs(value) < _LARGEST:
            return True
        if self._is_far(value):
            self._num_in_a_row += 1
            if self._num_in_a_row >= self._size:
                # As long as a window: this is where the values are now, not a spike.
                self.fill(())
            return True
        self._num_in_a_row = 0
        self._add(value)
        return False

    def _is_far(self, value: float) -> bool:
        if len(self._values) < self._size:
            return False
        std = math.sqrt(max(0.0, self._squares) / self._size)
        return std >= _LEAST_STD and value > self._mean + self._threshold_std * std

    def _add(self, value: float) -> None:
        self._values.append(value)
        count = len(self._values)
        if count <= self._size:
            before = self._mean
            self._mean += (value - before) / count
            self._squares += (value - before) * (value - self._mean)
            return
        oldest, before = self._values.popleft(), self._mean
        self._mean += (value - oldest) / self._size
        self._squares += (value - oldest) * (value - self._mean + oldest - before)
        self._num_updates += 1
        if self._num_updates % self._size == 0:
            self._sum_up()

    def _sum_up(self) -> None:
        count = len(self._values)
        self._mean = math.fsum(self._values) / count if count else 0.0
        self._squares = math.fsum((value - self._mean) ** 2 for value in self._values)

    def values(self) -> list[float]:
        return list(self._values)

    def fill(self, values: Iterable[float]) -> None:
        """Start from these values, or from the newest of them if they are too many."""
        finite = [float(value) for value in values if abs(value) < _LARGEST]
        self._values = deque(finite[-self._size :])
        self._num_updates = self._num_in_a_row = 0
        self._sum_up()


def _find(metrics: Mapping[str, float], name: str) -> float | None:
    """A metric by either of its names."""
    from headway.engine.metrics import ALIASES

    found = metrics.get(name)
    return metrics.get(ALIASES.get(name, name)) if found is None else found


def _is_step(metrics: Mapping[str, float]) -> bool:
    from headway.engine.metrics import TRAIN_LOSS

    return TRAIN_LOSS in metrics
