"""The average of the weights over the last steps before chosen ones, as a checkpoint of its own.

Owns: when weights are added up, the sums, and what is done with their average. Does not own: the
windows as arithmetic (merge_windows.py), the exchange of weights (averages.py), the files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headway.callbacks.save.averages import (
    Watched,
    add_to,
    exact_dtype,
    exchanged,
    refuse_shared_suffix,
    refuse_strategy,
    wide_dtype,
)
from headway.callbacks.save.merge_windows import MergeSchedule, Window, make_schedule
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headway.engine.state import TrainerState

logger = logging.getLogger(__name__)

_SLOT = "sum"
_PREFIX = "eval/merged"
_SUFFIX = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)


class ModelMergeCallback(TrainerCallback):
    """Writes `checkpoint-<step>-<output_suffix>`: the mean of the weights after each of the last
    `merge_last_n_steps` steps, at the steps `merge_step` or at every `merge_interval`-th.

    The sums are part of the run's checkpoints, so that a run that is killed in a window goes on
    with it. Where the run evaluates, the average is evaluated under `eval/merged`; training goes
    on with its own weights.
    """

    priority = 2  # a checkpoint of the same step is made after the merge, and knows of it

    def __init__(
        self,
        merge_step: int | Sequence[int] = (),
        merge_interval: int | None = None,
        merge_last_n_steps: int = 500,
        output_suffix: str = "merged",
        enabled: bool = True,
    ) -> None:
        if not isinstance(enabled, bool):
            raise ConfigError(
                f"ModelMergeCallback: enabled: {enabled!r} given; allowed: true or false"
            )
        self.enabled = enabled
        self.output_suffix = output_suffix
        self._schedule: MergeSchedule | None = None
        if enabled:
            if not isinstance(output_suffix, str) or not _SUFFIX.fullmatch(output_suffix):
                raise ConfigError(
                    f"ModelMergeCallback: output_suffix: {output_suffix!r} given; allowed: a "
                    "letter, then letters, digits and '_'"
                )
            self._schedule = make_schedule(merge_step, merge_interval, merge_last_n_steps)
        self._sums: dict[str, Tensor] = {}
        self._watched: Watched | None = None
        self._first = self._last = self._count = 0
        """The steps added up so far, and their number; 0 outside of windows."""
        self._completed: list[int] = []
        self._restored = False
        self._settled = False

    @property
    def max_parameter_slots(self) -> int:
        """For the memory of saves: a window's sums come later than that is allocated."""
        return int(self.enabled)

    @property
    def written_suffix(self) -> str | None:
        """What the names of its directories end with; None if it writes none."""
        return self.output_suffix if self.enabled else None

    # -- setting up -------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: TrainerState, trainer: Any) -> None:
        if self._schedule is None:
            return
        refuse_strategy("ModelMergeCallback", trainer)
        refuse_shared_suffix(self, trainer)
        if not state.is_world_process_zero:
            return
        kept = args.checkpoint_components
        if kept is not None and not {"trainer", "callbacks"} & set(kept):
            logger.warning(
                "ModelMergeCallback: checkpoint_components leaves out the callbacks' state, so a "
                "run that is resumed inside a window cannot merge at its end"
            )
        beyond = self._schedule.beyond(state.max_steps) if state.max_steps > 0 else []
        if beyond:
            logger.warning(
                "ModelMergeCallback: the run ends at step %d, before the merge at step %d",
                state.max_steps,
                beyond[0],
            )

    def on_load(self) -> None:
        """A checkpoint was loaded; one without state of this callback leaves none behind."""
        if not self._restored:
            self._drop()
            self._completed = []
        self._restored = self._settled = False

    def on_start_settled(
        self, args: Any, state: TrainerState, model: nn.Module, trainer: Any, eval_dataloader: Any
    ) -> None:
        self._settled = False
        self._settle(args, state, model, trainer, eval_dataloader)

    def on_step_begin(
        self, args: Any, state: TrainerState, model: nn.Module, trainer: Any, eval_dataloader: Any
    ) -> None:
        if not self._settled:  # the run went back to a checkpoint
            self._settle(args, state, model, trainer, eval_dataloader)

    def _settle(
        self, args: Any, state: TrainerState, model: nn.Module, trainer: Any, eval_dataloader: Any
    ) -> None:
        """Go on from where the run stands: with the sums of a checkpoint, or without any."""
        self._settled = True
        if self._schedule is None:
            return
        step = state.global_step
        self._completed = [done for done in self._completed if done <= step]
        window = self._schedule.window_at(step) if step > 0 else None
        if window is not None and window.last in self._completed:
            window = None
        if self._count:
            self._take_up(step, window, model, trainer)
        if window is None:
            return
        if self._count and self._last == step:
            return
        # The weights of this step are in the model: a save made while it ended lacks them.
        if self._count or step == window.first:
            self._add(step, model)
            if step == window.last:
                self._merge(args, state, trainer, eval_dataloader)
        elif step < window.last and state.is_world_process_zero:
            logger.warning(
                "ModelMergeCallback: no merge at step %d: the run goes on at step %d, and the "
                "weights of the steps %d to %d are not known",
                window.last,
                step,
                window.first,
                step - 1,
            )

    def _take_up(self, step: int, window: Window | None, model: nn.Module, trainer: Any) -> None:
        """Keep the sums of a checkpoint if they are those of the window so far."""
        self._watched = Watched(model, among=self._sums)
        fits = (
            window is not None
            and window.first == self._first
            and self._last in (step, step - 1)
            and self._count == self._last - self._first + 1
        )
        lost = not self._sums and bool(Watched(model).parts())
        # The sums are in parts: a rank may miss its own.
        if trainer.strategy.agree(int(lost)) or not fits:
            self._drop()

    # -- steps ------------------------------------------------------------------------------

    def on_forward_backward_begin(self) -> None:
        """Before an update: what was frozen so far in this window and is no more joins in."""
        if self._watched is not None:
            for name, part in self._watched.take_thawed().items():
                # It was the same after all the steps that count.
                self._sums[name] = part.to(wide_dtype(part), copy=True).mul_(self._count)

    def on_step_end(
        self, args: Any, state: TrainerState, model: nn.Module, trainer: Any, eval_dataloader: Any
    ) -> None:
        if self._schedule is None:
            return
        window = self._schedule.window_at(state.global_step)
        if window is None or not self._belongs(state.global_step, window):
            return
        self._add(state.global_step, model)
        if state.global_step == window.last:
            self._merge(args, state, trainer, eval_dataloader)

    def _belongs(self, step: int, window: Window) -> bool:
        """Whether the weights of this step are to be added: not in a window that lacks others."""
        return self._last == step - 1 if self._count else step == window.first

    def _add(self, step: int, model: nn.Module) -> None:
        if not self._count:
            self._first, self._watched = step, Watched(model)
            self._sums = _zeros(self._watched)
        assert self._watched is not None
        add_to(self._sums, self._watched.parts())
        self._last = step
        self._count += 1

    # -- the merge --------------------------------------------------------------------------

    def _merge(self, args: Any, state: TrainerState, trainer: Any, eval_dataloader: Any) -> None:
        step, sums, count = state.global_step, self._sums, self._count
        assert self._watched is not None
        try:
            with exchanged(trainer, self._watched.parts(), sums, divisor=count):
                path = trainer.save_weights(self.output_suffix)
                self._completed.append(step)
                if state.is_world_process_zero:
                    logger.info("the mean of the weights of %d steps goes to %s", count, path)
                self._evaluate(args, trainer, eval_dataloader)
        finally:
            self._drop()  # the memory of the sums has served another purpose

    def _evaluate(self, args: Any, trainer: Any, eval_dataloader: Any) -> None:
        if args.do_eval and eval_dataloader is not None:
            trainer.evaluate_weights(_PREFIX)
        for callback in trainer.callbacks.values():
            perform = getattr(callback, "perform_eval", None)
            if callable(perform):
                perform(prefix=_PREFIX)

    def _drop(self) -> None:
        self._sums, self._watched = {}, None
        self._first = self._last = self._count = 0

    # -- checkpoints ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": 1,
            "first_step": self._first,
            "last_step": self._last,
            "count": self._count,
            "completed": list(self._completed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drop()
        if not self.enabled:
            return
        self._first = int(state.get("first_step", 0))
        self._last = int(state.get("last_step", 0))
        self._count = int(state.get("count", 0))
        self._completed = [int(step) for step in state.get("completed", [])]
        self._restored = True

    def parameter_state(self) -> dict[str, dict[str, Tensor]]:
        """The sums, for checkpoints."""
        return {_SLOT: self._sums} if self._sums else {}

    def load_parameter_state(self, slots: dict[str, dict[str, Tensor]]) -> None:
        kept = slots.get(_SLOT, {}) if self.enabled else {}
        self._sums = {name: tensor for name, tensor in kept.items() if tensor.numel()}


def _zeros(watched: Watched) -> dict[str, Tensor]:
    """Sums of nothing: in float32 for parameters; for buffers, which are small, in more, so that
    one that never changes comes out as it was."""
    import torch
    from torch import nn

    sums = {}
    for name, part in watched.parts().items():
        is_parameter = isinstance(watched.tensors[name], nn.Parameter)
        dtype = wide_dtype(part) if is_parameter else exact_dtype(part)
        sums[name] = torch.zeros(part.shape, dtype=dtype, device=part.device)
    return sums
