"""The L2 norm of all weights in every log record."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from headway.callbacks.log.json_logger import is_summary
from headway.callbacks.watch.shards import Shards, find_shards, measure_squares
from headway.callbacks.watch.sharing import join_numbers
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from torch import Tensor, nn


class WeightNormLogger(TrainerCallback):
    """Adds `weight_norm` to log records and to the summary at the end of a run.

    It is the norm over all parameters of the model, frozen ones included and tied ones once,
    wherever their parts are. Steady growth suggests too little weight decay.
    """

    priority = 10  # before the sinks read the record
    failure_policy = "disable"

    def __init__(self) -> None:
        self._shards: Shards | None = None

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: nn.Module
    ) -> None:
        self._shards = find_shards(model, observer="WeightNormLogger")

    def on_log_step(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any]
    ) -> None:
        self._add(state, logs)

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any]
    ) -> None:
        # The summary comes without `on_log_step`, and is in the history already.
        if is_summary(logs) and "weight_norm" not in logs:
            self._add(state, logs)
            if "weight_norm" in logs and state.log_history:
                state.log_history[-1]["weight_norm"] = logs["weight_norm"]

    def on_close(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._shards = None

    def _add(self, state: TrainerState, logs: dict[str, Any]) -> None:
        shards = self._shards
        if shards is None or (shards.is_replicated and not state.is_world_process_zero):
            return
        sums, _ = join_numbers(lambda: _measure(shards), 1, alone=shards.is_replicated)
        logs["weight_norm"] = math.sqrt(sums[0])


def _measure(shards: Shards) -> tuple[Tensor, Tensor]:
    import torch

    with torch.no_grad():
        return measure_squares(shards).sum().reshape(1), torch.zeros(0)
