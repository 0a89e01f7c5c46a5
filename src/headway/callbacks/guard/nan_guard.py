"""Decides what follows a loss, a gradient or a weight that is not finite.

Owns: which of them are looked at, how many bad steps in a row are borne. Does not own: withholding
the update of such a step, which the strategy does on the device at once; what a stop or a rollback
is (recovery.py).

Nothing here waits for the device between flushes: losses and norms come with the metrics, and the
check of the weights is a metric of its own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headway.callbacks.guard.recovery import Recovery
from headway.callbacks.watch.ranges import require_count, require_flag
from headway.callbacks.watch.sharing import on_all_ranks
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger(__name__)

ACTIONS = ("stop", "abort", "skip", "rollback")
BROKEN_PARAMETERS = "guard/parameters not finite"


class NaNGuardCallback(TrainerCallback):
    """Acts on a loss (`watch_loss`) or gradient norm (`watch_grad_norm`) that is not finite, and on
    such weights, looked at every `parameter_interval` steps (none: only where a loss or norm was
    bad). It decides about what it watches in place of the option `nonfinite_action`.

    `action`: `stop` ends the run with its last save, `abort` without; `skip` goes on, as the update
    was withheld, but ends the run after `max_consecutive` bad steps in a row; `rollback` returns to
    the last checkpoint before the bad steps, up to `max_rollbacks` times, and leaves these steps
    out (`skip_batches`, `learning_rate_factor`: as in DivergenceDetector). Weights that are not
    finite are never saved: where `stop` or `skip` meets them, the run is aborted.
    """

    decides_nonfinite = True

    def __init__(
        self,
        action: str = "stop",
        *,
        watch_loss: bool = True,
        watch_grad_norm: bool = True,
        parameter_interval: int | None = None,
        max_consecutive: int = 10,
        max_rollbacks: int = 3,
        skip_batches: str = "offending",
        learning_rate_factor: float | None = None,
    ) -> None:
        kind = type(self).__name__
        require_flag(f"{kind}: watch_loss", watch_loss)
        require_flag(f"{kind}: watch_grad_norm", watch_grad_norm)
        require_count(f"{kind}: parameter_interval", parameter_interval, least=1, optional=True)
        require_count(f"{kind}: max_consecutive", max_consecutive, least=1)
        if not (watch_loss or watch_grad_norm or parameter_interval):
            raise ConfigError(
                f"{kind}: watch_loss and watch_grad_norm: False given for both, and no "
                f"parameter_interval; set one of them"
            )
        self.watch_loss, self.watch_grad_norm = watch_loss, watch_grad_norm
        self.parameter_interval = parameter_interval
        self.max_consecutive = max_consecutive
        self.recovery = Recovery(
            kind,
            action,
            ACTIONS,
            max_rollbacks=max_rollbacks,
            skip_batches=skip_batches,
            learning_rate_factor=learning_rate_factor,
        )
        self.num_bad_steps = self._consecutive = self._last_good_step = 0
        self._last_sound_step = 0
        """The newest step at which the weights were looked at and finite."""
        self._done = False

    # Around the steps

    def _forget_run(self) -> None:
        self.num_bad_steps = self._consecutive = 0
        self._last_good_step = self._last_sound_step = 0
        self.recovery.forget()

    def on_train_begin(self, args: Any, state: TrainerState, trainer: Any) -> None:
        self._done = False
        self._last_good_step = max(self._last_good_step, state.global_step)
        self._last_sound_step = max(self._last_sound_step, state.global_step)
        self.recovery.begin(args, state, trainer)

    def on_step_begin(self, state: TrainerState, control: TrainerControl) -> None:
        self.recovery.begin_step(state, control)

    def on_step_end(self, state: TrainerState, model: nn.Module, trainer: Any) -> None:
        every = self.parameter_interval
        if every is not None and state.global_step % every == 0:
            broken = find_broken(model)
            trainer.record_metric(BROKEN_PARAMETERS, broken, "max", None, "latest")

    def on_save(self, step: int, checkpoint_path: str, trainer: Any) -> None:
        self.recovery.note_save(step, checkpoint_path, trainer)
        self.recovery.note_good(self._good_state, trainer)

    def on_load(self, state: TrainerState, path: str, trainer: Any) -> None:
        self.recovery.note_load(state, trainer, path)
        self._last_good_step = min(self._last_good_step, state.global_step)
        self._last_sound_step = min(self._last_sound_step, state.global_step)
        self._consecutive = 0

    # What came of them

    def on_metrics(
        self,
        state: TrainerState,
        control: TrainerControl,
        step: int,
        metrics: Mapping[str, float],
        model: nn.Module,
        trainer: Any,
    ) -> None:
        if self._done or self.recovery.pending:
            return
        broken = metrics.get(BROKEN_PARAMETERS)
        if broken is not None and broken != 0:
            self._act_on_weights(step, control, state)
            return
        if broken is not None:
            self._last_sound_step = step
        bad = self._name_bad(metrics)
        if bad:
            self._act_on_step(f"{bad} at step {step}", step, control, state, model)
        elif bad is not None:
            self._consecutive = 0
            self._last_good_step = step
            self.recovery.note_good(self._good_state, trainer)

    @property
    def _good_state(self) -> int:
        """The newest step after which all was well."""
        # A loss is measured before the update of its step.
        return (
            self._last_good_step - 1 if self.parameter_interval is None else self._last_sound_step
        )

    def sees_nonfinite(self, metrics: Mapping[str, float]) -> bool:
        return bool(self._name_bad(metrics))

    def _name_bad(self, metrics: Mapping[str, float]) -> str | None:
        """What is not finite in a step, in words; None for what is no step."""
        from headway.engine.metrics import GRAD_NORM, TRAIN_LOSS, is_overflow

        loss, norm = metrics.get(TRAIN_LOSS), metrics.get(GRAD_NORM)
        if loss is None or norm is None:
            return None
        if self.watch_loss and not math.isfinite(loss):
            return f"the loss is {loss}"
        if self.watch_grad_norm and not math.isfinite(norm) and not is_overflow(metrics):
            return f"the gradient norm is {norm}"
        return ""

    def _act_on_step(
        self,
        why: str,
        step: int,
        control: TrainerControl,
        state: TrainerState,
        model: nn.Module,
    ) -> None:
        self.num_bad_steps += 1
        self._consecutive += 1
        good_step = self._last_good_step
        action = self.recovery.action
        if action == "skip" and self._consecutive < self.max_consecutive:
            if state.is_world_process_zero:
                logger.warning("%s: %s; the update was withheld", self.name, why)
            return
        # One wait, at the end of the run's good part. Each rank sees its own share alone, but which
        # steps are left out must be the same on all of them.
        if any(on_all_ranks(lambda: float(find_broken(model)))):
            why += ", and weights are not finite"
            action = "rollback" if action == "rollback" else "abort"
            # Whatever the last update did came after the last good loss.
            good_step = max(0, good_step - 1)
        elif action == "skip":
            why += f", {self._consecutive} bad steps in a row (max_consecutive)"
            action = "stop"
        self._done = action != "rollback"
        self.recovery.act(why, control, state, good_step=good_step, bad_step=step, action=action)

    def _act_on_weights(self, step: int, control: TrainerControl, state: TrainerState) -> None:
        action = "rollback" if self.recovery.action == "rollback" else "abort"
        self._done = action != "rollback"
        self.recovery.act(
            f"weights are not finite after step {step}",
            control,
            state,
            good_step=self._last_sound_step,
            bad_step=step,
            action=action,
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": 1,
            "num_bad_steps": self.num_bad_steps,
            "consecutive": self._consecutive,
            "last_good_step": self._last_good_step,
            "last_sound_step": self._last_sound_step,
            **self.recovery.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_bad_steps = max(self.num_bad_steps, int(state.get("num_bad_steps") or 0))
        self._consecutive = int(state.get("consecutive") or 0)
        self._last_good_step = int(state.get("last_good_step") or 0)
        self._last_sound_step = int(state.get("last_sound_step") or 0)
        self.recovery.load_state_dict(state)


def find_broken(model: nn.Module) -> Tensor:
    """1 if any weight that this rank holds is not finite, else 0; on the device."""
    import torch

    parts = [part.detach() for part in _local_parts(model)]
    if not parts:
        return torch.zeros(())
    # The largest size, unlike a sum, is finite where all values are.
    sizes = torch._foreach_norm(parts, math.inf)
    device = sizes[0].device
    finite = torch.stack([size.to(device, torch.float32).isfinite() for size in sizes])
    return (~finite.all()).float()


def _local_parts(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local.numel() and local.is_floating_point() and not local.is_meta:
            yield local
