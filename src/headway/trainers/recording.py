"""What a trainer offers to those who record: metrics of a step, log records, the run's identity.

Owns: these methods. Does not own: the buffer and the flushes (engine), who reads the records
(callbacks).
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from headway.engine.metrics import MetricBuffer, MetricMergeStrategy, ReduceType, Value

if TYPE_CHECKING:
    from headway.checkpoint.ranks import Ranks
    from headway.engine.events import EventBus
    from headway.engine.state import TrainerState


class Recording:
    """The part of a trainer that takes metrics and log records."""

    bus: EventBus
    metrics: MetricBuffer
    state: TrainerState

    def _ranks(self) -> Ranks:
        raise NotImplementedError

    @property
    def run_id(self) -> str | None:
        """Identifies the run, the same after every resume; None before the first `train()`."""
        return self.state.run_id

    def _begin_run(self) -> None:
        """A run that starts has no outcome yet, and an id that a resume replaces by the saved."""
        self.state.outcome = None
        if self.state.run_id is None:
            self.state.run_id = self._ranks().share(secrets.token_hex(6))

    def _start_over(self) -> None:
        """In a second run of a trainer, which goes on from nothing, progress begins anew, as do
        optimizer, schedule and data."""
        if self.state.global_step > 0:
            self.state.start_over()
            self._begin_run()

    def record_metric(
        self,
        name: str,
        value: Value,
        reduce_type: ReduceType | str | None = None,
        namespace: str | None = None,
        merge_strategy: MetricMergeStrategy | str = MetricMergeStrategy.warn,
        *,
        step: int | None = None,
    ) -> None:
        """Record a metric of a step, by default the current one; the next flush delivers it."""
        if step is None:
            step = self.state.global_step
        self.metrics.record(step, name, value, reduce_type, namespace, merge_strategy)

    def record_ce_loss(self, value: Value, reduce_type: ReduceType | str | None = None) -> None:
        """Record the current step's cross-entropy loss."""
        self.record_metric("train/CE loss", value, reduce_type, None, "latest")

    def get_metric(self, name: str, namespace: str | None = None) -> Value | None:
        """A metric recorded in the current step; reading the number may wait for the device."""
        return self.metrics.get(self.state.global_step, name, namespace)

    def _log_step(self, logs: dict[str, Any]) -> None:
        """Log the record of a step, to which callbacks may add before."""
        self.bus.fire("on_log_step", logs=logs)
        self.log(logs)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Append a record to the history and deliver it to the callbacks.

        `start_time` is there for subclasses that pass it on, as Hugging Face's do.
        """
        logs.setdefault("epoch", self.state.epoch)
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.bus.fire("on_log", logs=logs)
