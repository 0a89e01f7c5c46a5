"""What happened between two log records, folded into one record.

Owns the sums behind a log record and the check for non-finite steps. Does not own delivery.
"""

from __future__ import annotations

import math
from typing import Any

from headway.engine.metrics import GRAD_NORM, LEARNING_RATE, STEP_SKIPPED, TRAIN_LOSS, is_overflow
from headway.engine.state import TrainerState


class Interval:
    """Sums over the steps since the last log record."""

    def __init__(self, state: TrainerState) -> None:
        self._losses = 0.0
        self._norm_squares = 0.0
        self._max_norm = 0.0
        self._num_steps = self._num_norms = 0
        self._num_skipped = 0
        self._learning_rate = 0.0
        self._tokens_before = state.num_input_tokens_seen

    def add(self, metrics: dict[str, float]) -> bool:
        """Fold one step in; returns whether its update was withheld as not finite."""
        loss, norm = metrics[TRAIN_LOSS], metrics[GRAD_NORM]
        skipped = not math.isfinite(loss + norm)
        metrics[STEP_SKIPPED] = float(skipped)
        self._losses += loss
        self._num_steps += 1
        if not (skipped and is_overflow(metrics)):
            # The norm of an overflow says nothing of the gradient.
            self._num_norms += 1
            self._norm_squares += norm * norm
            # max() would lose a NaN that comes second
            self._max_norm = norm if not norm <= self._max_norm else self._max_norm
        self._num_skipped += skipped
        self._learning_rate = metrics[LEARNING_RATE]
        return skipped

    def add_left_out(self) -> None:
        """A step that was counted and not taken."""
        self._num_skipped += 1

    def record(self, state: TrainerState) -> dict[str, Any]:
        """The log record: means over the interval, totals of the run.

        Without norms where all steps were overflows of the loss scale.
        """
        steps = max(1, self._num_steps)
        record: dict[str, Any] = {
            "epoch": state.epoch,
            "loss": self._losses / steps,
            **self._norms(),
            "learning_rate": self._learning_rate,
            "tokens": state.num_input_tokens_seen - self._tokens_before,
            "total_tokens": state.num_input_tokens_seen,
            "total_flos": state.total_flos,
        }
        if self._num_skipped:
            record["skipped_steps"] = self._num_skipped
        return record

    def _norms(self) -> dict[str, float]:
        if self._num_steps and not self._num_norms:
            return {}
        mean_square = self._norm_squares / max(1, self._num_norms)
        return {"grad_norm": math.sqrt(mean_square), "max_grad_norm": self._max_norm}

    @property
    def empty(self) -> bool:
        return self._num_steps == 0
