"""One optimizer step: from a window of micro-batches to the metrics of the step.

Owns: the order of the hops and of their events, what a step counts, and what one that is left out
is. Does not own: what happens between steps (loop), devices (strategies).

A step that is left out is a step all the same: its window is read and its tokens are seen, the
step is counted, the schedule goes on, and `on_step_begin`, `on_window` and `on_step_end` come.
Nothing is computed, so there is no loss, no gradient, no update, and none of their events.
"""

from __future__ import annotations

import logging
import warnings

from torch import Tensor

from headway.data.loader import Window, WindowTotals
from headway.engine.counts import count_window
from headway.engine.metrics import (
    GRAD_NORM,
    LOSS_SCALE,
    STEP_SKIPPED,
    TRAIN_LOSS,
    Value,
    learning_rate_name,
)
from headway.engine.parts import LoopParts
from headway.engine.rescue import LastStep

logger = logging.getLogger(__name__)


class Stepper:
    """Takes the steps of one run."""

    def __init__(self, parts: LoopParts, last_step: LastStep) -> None:
        self._parts, self._last_step = parts, last_step
        self.num_samples = 0
        """Of all steps so far, on all ranks."""
        self.edits_windows = False
        """Whether anybody on any rank may edit windows: to count them again takes all ranks."""
        self._rate_names: list[str] = []
        self._told_of_no_targets = False
        self._parameters = list(parts.strategy.unwrap().parameters())

    def take(self, window: Window) -> None:
        """One optimizer step: six hops, none back up."""
        p, fire = self._parts, self._parts.bus.fire
        fire("on_step_begin")
        fire("on_window", window=window)
        changed = self.edits_windows or p.bus.listens("on_window")
        totals = count_window(window, p.strategy, p.objective, changed=changed)
        if p.bus.control.should_skip_step:
            p.bus.control.should_skip_step = False
            self._leave_out(totals)
            return
        num_targets = totals.num_target_tokens
        if isinstance(num_targets, int):
            if num_targets < 1 and p.objective.needs_targets:
                self._tell_of_no_targets()
            num_targets = max(1, num_targets)
        else:
            num_targets = num_targets.clamp(min=1)
        # Also of parameters that no optimizer has, and what was there before the first step.
        for parameter in self._parameters:
            parameter.grad = None
        loss = p.strategy.forward_backward(window, p.objective, num_targets, fire)
        fire("on_gradients")
        is_watched = p.bus.listens("on_pre_optimizer_step")
        grad_norm = p.strategy.clip(p.args.max_grad_norm, None if is_watched else p.optimizer)
        fire("on_pre_optimizer_step")
        p.metrics.mark_computed(p.timing.begin_update(p.strategy.device))
        self._last_step.update()
        taken = p.strategy.apply(p.optimizer, loss, grad_norm)
        p.timing.end_update()
        fire("on_optimizer_step")
        measured = self._read_rates()
        p.state.num_input_tokens_seen += totals.num_tokens
        if p.scheduler is not None and taken:
            p.scheduler.step()
        fire("on_train_metrics", loss=loss, grad_norm=grad_norm, tokens=totals.num_tokens)
        p.state.total_flos += p.flops_per_token * totals.num_tokens
        self._count(totals)
        measured[TRAIN_LOSS], measured[GRAD_NORM] = loss, grad_norm
        if p.strategy.loss_scale is not None:
            measured[LOSS_SCALE] = p.strategy.loss_scale.value
        p.metrics.record_step(p.state.global_step, measured)
        fire("on_step_end")

    def _tell_of_no_targets(self) -> None:
        state = self._parts.state
        if self._told_of_no_targets or not state.is_world_process_zero:
            return
        self._told_of_no_targets = True
        logger.warning(
            "no label of step %d counts (each is -100, or the first of its row): its loss is 0 "
            "and nothing is learnt from it; further steps without one are not told",
            state.global_step + 1,
        )

    def _leave_out(self, totals: Window | WindowTotals) -> None:
        p, measured = self._parts, self._read_rates()
        self._last_step.update()
        p.state.num_input_tokens_seen += totals.num_tokens
        p.state.num_input_tokens_skipped += totals.num_tokens
        if p.scheduler is not None:
            with warnings.catch_warnings():
                # Before the first update torch takes it for a mistake.
                warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
                p.scheduler.step()
        self._count(totals)
        measured[STEP_SKIPPED] = 1.0
        p.metrics.record_step(p.state.global_step, measured)
        p.bus.fire("on_step_end")

    def _count(self, totals: Window | WindowTotals) -> None:
        p, state = self._parts, self._parts.state
        state.global_step += 1
        self.num_samples += totals.num_samples
        in_epoch = p.loader.epoch_fraction
        if in_epoch is None:
            in_epoch = (state.global_step - state.epoch_start_step) / p.steps_per_epoch
        state.epoch = state.raw_epoch + in_epoch
        self._last_step.reach()

    def _read_rates(self) -> dict[str, Value]:
        """The learning rate of every group, as the update used it."""
        groups, names = self._parts.optimizer.param_groups, self._rate_names
        if len(names) != len(groups):
            names[:] = map(learning_rate_name, range(len(groups)))
        return {
            # The schedule writes into a tensor.
            name: rate.clone() if isinstance(rate := group["lr"], Tensor) else rate
            for name, group in zip(names, groups)
        }
