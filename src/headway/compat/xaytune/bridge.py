"""One Headway callback that fires xaytune's ten events.

Owns the mapping of events and counters. Flags are raised on the control; the loop acts on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headway.compat.xaytune.events import CallbackManager, global_callbacks
from headway.compat.xaytune.state import TrainState
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState


class EventBridge(TrainerCallback):
    """Keeps a `TrainState` up to date and hands it to the handlers."""

    def __init__(
        self,
        state: TrainState,
        manager: CallbackManager,
        trainer: Any,
        *,
        accumulation: int,
        save_every: int = 0,
        last_epoch: int | None = None,
        move_batch: Callable[[Any], Any] | None = None,
    ) -> None:
        self.state = state
        self._managers = [global_callbacks, manager]
        if manager is global_callbacks:
            self._managers.pop()
        self._context: dict[str, Any] = {"trainer": trainer}
        self._accumulation = accumulation
        self._save_every = save_every
        self._last_epoch = last_epoch
        self._move_batch = move_batch
        self._control: TrainerControl | None = None

    def fire(self, event: str) -> None:
        """Call the handlers, those of the process first; a stop asked for reaches the loop."""
        for manager in self._managers:
            manager.fire(event, self.state, **self._context)
        if self.state.should_stop and self._control is not None:
            self._control.should_training_stop = True

    def _take_counters(self, state: TrainerState) -> None:
        self.state.global_step = state.global_step
        self.state.epoch = state.raw_epoch
        done_in_epoch = state.global_step - state.epoch_start_step
        self.state.step = done_in_epoch * self._accumulation

    def on_train_begin(
        self,
        state: TrainerState,
        control: TrainerControl,
        model: Any,
        optimizer: Any,
        lr_scheduler: Any,
    ) -> None:
        self._context |= {"model": model, "optimizer": optimizer, "scheduler": lr_scheduler}
        self._control = control
        self._take_counters(state)
        self.fire("train_start")

    def on_train_end(self) -> None:
        self.fire("train_end")

    def on_epoch_begin(self, state: TrainerState) -> None:
        self._take_counters(state)
        self.fire("epoch_start")

    def on_epoch_end(self, state: TrainerState, control: TrainerControl) -> None:
        # Headway has moved on to the next epoch by now; handlers are told of the one that ended.
        self.fire("epoch_end")
        if self._last_epoch is not None and state.raw_epoch >= self._last_epoch:
            control.should_training_stop = True

    def on_step_begin(self, state: TrainerState) -> None:
        self._take_counters(state)
        self.fire("step_start")

    def on_window(self, window: Any) -> None:
        self.state.step += len(window.micro_batches) - 1
        if self._move_batch is not None:
            window.micro_batches[:] = map(self._move_batch, window.micro_batches)

    def on_train_metrics(self, loss: Any, grad_norm: Any, optimizer: Any, trainer: Any) -> None:
        # Each rank has its share. Here and not when it is read, which one rank may do alone.
        loss = trainer.strategy.reduce(loss, "sum")
        rate = optimizer.param_groups[0]["lr"]
        self.state.record({"loss": loss, "learning_rate": rate, "grad_norm": grad_norm})

    def on_step_end(self, state: TrainerState, control: TrainerControl) -> None:
        self.state.global_step = state.global_step
        self.fire("step_end")
        if self._save_every and state.global_step % self._save_every == 0:
            control.should_save = True

    def on_evaluate(self, metrics: dict[str, float]) -> None:
        self.state.record(metrics)
        self.fire("eval_end")

    def on_save(self, checkpoint_path: str) -> None:
        self.state.last_checkpoint = checkpoint_path
        self.fire("checkpoint_saved")

    def on_error(self, exception: BaseException) -> None:
        self.state.exception = exception
        self.fire("error")
