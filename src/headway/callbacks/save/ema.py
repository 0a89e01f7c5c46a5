"""An exponential moving average of the weights, kept beside them.

Owns: when it moves and by how much, and where it is used: in evaluations, in a checkpoint of its
own, in the model when training ends. Does not own: the arithmetic (averages.py), the way to host
memory (host_average.py), the files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headway.callbacks.save.averages import (
    Watched,
    exchanged,
    move_towards,
    refuse_shared_suffix,
    refuse_strategy,
    wide_dtype,
)
from headway.callbacks.save.host_average import HostMover
from headway.callbacks.watch.ranges import require_count, require_flag
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError, unknown

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from headway.engine.state import TrainerState

logger = logging.getLogger(__name__)

DEVICES = ("parameter", "cpu")
_SLOT = "ema"
_SUFFIX = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)


def decay_at(decay: float, num_steps: int, *, warmup: bool) -> float:
    """The factor of the old average for one step, `num_steps` after the average began."""
    return min(decay, (1 + num_steps) / (10 + num_steps)) if warmup else decay


class EMACallback(TrainerCallback):
    """Keeps `ema = d * ema + (1 - d) * weights`, with d = `decay` for each step.

    It begins as the weights after `start_step` and moves at every `update_every`-th step from
    there, then by as many steps at once. With `decay_warmup` d is at most (1 + t) / (10 + t), t
    steps after the beginning, so that the first weights are soon forgotten.
    """

    priority = 2  # a checkpoint of the same step holds the average with that step in it

    def __init__(
        self,
        decay: float = 0.999,
        decay_warmup: bool = False,
        update_every: int = 1,
        start_step: int = 0,
        device: str = "parameter",
        use_for_eval: bool = False,
        export: bool = False,
        output_suffix: str = "ema",
        swap_at_end: bool = False,
        enabled: bool = True,
    ) -> None:
        try:
            is_number = isinstance(decay, int | float) and not isinstance(decay, bool)
            if not is_number or not 0 <= decay < 1:
                raise ConfigError(f"decay: {decay!r} given; allowed: from 0 to below 1")
            require_count("update_every", update_every, least=1)
            require_count("start_step", start_step)
            for option, given in (
                ("decay_warmup", decay_warmup),
                ("use_for_eval", use_for_eval),
                ("export", export),
                ("swap_at_end", swap_at_end),
                ("enabled", enabled),
            ):
                require_flag(option, given)
            if device not in DEVICES:
                raise ConfigError(unknown("device", device, DEVICES))
            if not isinstance(output_suffix, str) or not _SUFFIX.fullmatch(output_suffix):
                raise ConfigError(
                    f"output_suffix: {output_suffix!r} given; allowed: a letter, then letters, "
                    "digits and '_'"
                )
        except ConfigError as error:
            raise ConfigError([f"EMACallback: {text}" for text in error.problems]) from None
        self.decay = float(decay)
        self.decay_warmup = decay_warmup
        self.update_every = update_every
        self.start_step = start_step
        self.use_for_eval = use_for_eval
        self.export = export
        self.output_suffix = output_suffix
        self.swap_at_end = swap_at_end
        self.enabled = enabled
        self.parameter_state_on_host = device == "cpu"
        self._averages: dict[str, Tensor] = {}
        self._watched: Watched | None = None
        self._mover = HostMover()
        self._first: int | None = None
        """The step after which it began."""
        self._last = 0
        """The last step that was looked at."""
        self._is_exchanged = False
        self._is_of_others = False
        """Whether the model has got weights that the average knows nothing of."""
        self._restored = self._settled = False

    @property
    def max_parameter_slots(self) -> int:
        """For the memory of saves: it may begin later than that is allocated."""
        return int(self.enabled)

    @property
    def written_suffix(self) -> str | None:
        """What the name of its directory ends with; None if it writes none."""
        return self.output_suffix if self.enabled and self.export else None

    # -- setting up -------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: TrainerState, trainer: Any) -> None:
        if not self.enabled:
            return
        refuse_strategy("EMACallback", trainer)
        for other in trainer.callbacks.values():
            if not isinstance(other, EMACallback) or other is self or not other.enabled:
                continue
            for option in ("use_for_eval", "swap_at_end"):
                if getattr(self, option) and getattr(other, option):
                    raise ConfigError(
                        f"EMACallback: {option}=true given to two of them; allowed: one, as the "
                        "model can have only one average in it"
                    )
        refuse_shared_suffix(self, trainer)
        if self.swap_at_end and args.load_best_model_at_end:
            raise ConfigError(
                "EMACallback: swap_at_end=true leaves the average in the model at the end, and "
                "load_best_model_at_end=true the best checkpoint; allowed: one of them"
            )
        if self.use_for_eval and args.load_best_model_at_end and state.is_world_process_zero:
            logger.warning(
                "EMACallback: with use_for_eval the best checkpoint is that of the best average; "
                "load_best_model_at_end loads its weights in training, not the average"
            )

    def on_load(self) -> None:
        """A checkpoint was loaded; one without state of this callback leaves none behind."""
        if not self._restored:
            self._drop()
        self._restored = self._settled = False

    def on_load_model_weights(self) -> None:
        """As the best ones at the end of a run; until steps follow, they are what is evaluated."""
        self._is_of_others = True

    def on_train_begin(self, state: TrainerState, model: nn.Module, trainer: Any) -> None:
        self._settled = False
        self._settle(state, model, trainer)

    def on_step_begin(self, state: TrainerState, model: nn.Module, trainer: Any) -> None:
        if not self._settled:  # the run went back to a checkpoint
            self._settle(state, model, trainer)

    def _settle(self, state: TrainerState, model: nn.Module, trainer: Any) -> None:
        """Go on from where the run stands: with the average of a checkpoint, or a new one."""
        self._settled, self._is_of_others = True, False
        if not self.enabled:
            return
        step = state.global_step
        if self._first is not None:
            self._watched = Watched(model, among=self._averages)
            lost = not self._averages and bool(Watched(model).parts())
            # The average is in parts: a rank may miss its own.
            if trainer.strategy.agree(int(lost)) or not self._first <= self._last <= step:
                self._drop()
        if self._first is None:
            if step > self.start_step and state.is_world_process_zero:
                logger.warning(
                    "EMACallback: the checkpoint holds no average; it begins anew as the weights "
                    "of step %d",
                    step,
                )
            if step >= self.start_step:
                self._begin(step, model)
        elif self._last < step:
            # The weights of this step are in the model: a save made while it ended lacks them.
            self._follow(step)

    def _settle_again(self, trainer: Any) -> None:
        """Where a checkpoint was loaded and no step has followed."""
        if self._first is not None and not self._settled:
            self._settle(trainer.state, trainer.model, trainer)

    def _begin(self, step: int, model: nn.Module) -> None:
        self._watched = Watched(model)
        self._averages = self._copies(self._watched.parts())
        self._first = self._last = step

    def _copies(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        import torch

        def place(part: Tensor) -> torch.device:
            return torch.device("cpu") if self.parameter_state_on_host else part.device

        return {
            name: part.to(place(part), wide_dtype(part), copy=True) for name, part in parts.items()
        }

    def _drop(self) -> None:
        self._mover.wait()
        self._averages, self._watched, self._first, self._last = {}, None, None, 0

    # -- steps ------------------------------------------------------------------------------

    def on_forward_backward_begin(self) -> None:
        """Before an update: what was frozen so far and is no more joins in."""
        if self._watched is not None:
            thawed = self._watched.take_thawed()
            if thawed:
                self._mover.wait()
                self._averages.update(self._copies(thawed))

    def on_step_end(self, state: TrainerState, model: nn.Module) -> None:
        if not self.enabled:
            return
        self._is_of_others = False
        if self._first is not None:
            self._follow(state.global_step)
        elif state.global_step >= self.start_step:
            self._begin(state.global_step, model)

    def _follow(self, step: int) -> None:
        """Move the average, if this step is one at which it moves."""
        assert self._first is not None and self._watched is not None
        self._last = step
        num_steps = step - self._first
        if num_steps % self.update_every:
            return
        decay = decay_at(self.decay, num_steps, warmup=self.decay_warmup) ** self.update_every
        parts = self._watched.parts()
        if self.parameter_state_on_host and any(
            part.device.type != "cpu" for part in parts.values()
        ):
            self._mover.move(self._averages, parts, 1 - decay)
        else:
            move_towards(self._averages, parts, 1 - decay)

    # -- use --------------------------------------------------------------------------------

    @contextmanager
    def weights(self, trainer: Any) -> Iterator[None]:
        """Inside, the model has the average; afterwards its own weights again, bit by bit."""
        assert self._watched is not None and not self._is_exchanged
        self._mover.wait()
        self._is_exchanged = True
        try:
            with exchanged(trainer, self._watched.parts(), self._averages):
                yield
        finally:
            self._is_exchanged = False

    @contextmanager
    def evaluation_weights(self, trainer: Any) -> Iterator[None]:
        """What the trainer's evaluations run in."""
        is_used = self.use_for_eval and not self._is_exchanged and not self._is_of_others
        if is_used:
            self._settle_again(trainer)
        if is_used and self._averages:
            with self.weights(trainer):
                yield
        else:
            yield

    def on_train_end(self, state: TrainerState, trainer: Any) -> None:
        """Write the average out and leave it in the model, where that is asked for."""
        self._settle_again(trainer)
        if self._watched is None or state.outcome not in ("completed", "stopped"):
            return
        if self.export:
            with self.weights(trainer):
                path = trainer.save_weights(self.output_suffix, wait=True)
            if state.is_world_process_zero:
                logger.info("the average of the weights is in %s", path)
        if self.swap_at_end:
            import torch

            self._mover.wait()
            parts = self._watched.parts()
            with torch.no_grad():
                for name, average in self._averages.items():
                    parts[name].copy_(average)

    def on_close(self) -> None:
        self._mover.close()

    # -- checkpoints ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"version": 1, "first_step": self._first, "last_step": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drop()
        if not self.enabled:
            return
        first = state.get("first_step")
        self._first = None if first is None else int(first)
        self._last = int(state.get("last_step", 0))
        self._restored = True

    def parameter_state(self) -> dict[str, dict[str, Tensor]]:
        """The average, for checkpoints."""
        self._mover.wait()
        return {_SLOT: self._averages} if self._averages else {}

    def load_parameter_state(self, slots: dict[str, dict[str, Tensor]]) -> None:
        kept = slots.get(_SLOT, {}) if self.enabled else {}
        self._averages = {name: tensor for name, tensor in kept.items() if tensor.numel()}
