"""What a trainer offers to those who steer a run under way: its rates, its length, a pause.

Owns: these changes, and why one of them cannot be. Does not own: who asks (callbacks/control), nor
the agreement of all ranks (engine). Every rank must make each of these calls at the same point.
"""

from __future__ import annotations

import logging
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway.dist.agreement import exchange
from headway.engine.commands import CommandRelay
from headway.engine.parking import StateParking
from headway.optim.rate_scaling import scale_rates
from headway.optim.schedule_length import change_length, find_length_obstacle
from headway.trainers.plan import RunPlan

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from headway.args import TrainingArguments
    from headway.data.loader import WindowLoader
    from headway.dist.env import DistributedEnvInterface
    from headway.engine.events import EventBus
    from headway.engine.state import TrainerState
    from headway.strategies.base import Strategy
    from headway.trainers.saving import Saver

logger = logging.getLogger(__name__)

_MOST_FACTOR = 1e12
_MOST_STEPS = 2**53


class Steering:
    """The part of a trainer that changes a run under way."""

    args: TrainingArguments
    bus: EventBus
    commands: CommandRelay
    env: DistributedEnvInterface
    lr_scheduler: LRScheduler | None
    model: nn.Module | None
    optimizer: Optimizer | None
    state: TrainerState
    strategy: Strategy | None
    _eval_loader: WindowLoader | None
    _plan: RunPlan | None = None
    _saver: Saver | None

    @property
    def asked_to_end(self) -> bool:
        raise NotImplementedError

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        raise NotImplementedError

    @property
    def can_evaluate(self) -> bool:
        """Whether the run has data to evaluate on."""
        return self._eval_loader is not None

    @property
    def last_save_step(self) -> int | None:
        """The step of the newest save begun, or of the checkpoint that the run went on from."""
        return None if self._saver is None else self._saver.last_step

    # Learning rates

    @property
    def learning_rate(self) -> float:
        """That of the first param group, for the next update."""
        assert self.optimizer is not None
        return float(self.optimizer.param_groups[0]["lr"])

    def find_rate_obstacle(self, *, scale: float | None, value: float | None) -> str | None:
        """Why the rate cannot be multiplied by `scale`, or become `value`; None if it can."""
        if value == 0:
            return "a rate of 0 could not be scaled up again; pause the run instead"
        if value is not None and self.learning_rate == 0:
            return "the schedule gives a rate of 0 now, which nothing can be scaled to; give scale"
        factor = scale if value is None else value / self.learning_rate
        assert factor is not None
        # What it was multiplied by in all has to be taken back at a resume.
        for total in (self.state.rate_factor, self.state.temporary_rate_factor):
            if not 1 / _MOST_FACTOR <= factor * total <= _MOST_FACTOR:
                return (
                    f"the rates would be {factor * total:g} times those of the schedule; "
                    f"allowed: {1 / _MOST_FACTOR:g} to {_MOST_FACTOR:g}"
                )
        return None

    def change_learning_rate(
        self, *, scale: float | None = None, value: float | None = None, keep: bool = True
    ) -> str:
        """Multiply the rates of all groups, now and for the rest of the schedule.

        By `scale`; or so that the first group's next rate is `value`. Without `keep` a resume
        takes it back; with `keep`, a `value` is kept as a whole, whatever was scaled before.
        """
        assert self.optimizer is not None
        before = self.learning_rate
        factor = scale if value is None else value / before
        assert factor is not None
        # Groups of ranks may differ, what they are multiplied by must not. Not told over the group
        # of checkpoints: a save that is being written talks there.
        if self.env.world_size > 1:
            factor = float(exchange(factor)[0])
        scale_rates(self.optimizer, self.lr_scheduler, factor)
        state = self.state
        state.rate_factor *= factor
        if not keep:
            state.temporary_rate_factor *= factor
        elif value is not None:
            state.temporary_rate_factor = 1.0
        self.commands.note_change()
        rate = self.learning_rate
        self.log({"learning_rate": rate, "learning_rate_factor": factor})
        change = f"from {before:g} to {rate:g} (times {factor:g}, as all that follow)"
        return f"the learning rate goes {change}"

    # Length

    def find_length_obstacle(self, max_steps: int) -> str | None:
        """Why the run cannot be of so many steps; None if it can."""
        plan = self._plan
        if plan is None or plan.length.max_steps is None:
            return f"its length is not counted in steps (train_for={self.args.train_for!r})"
        if max_steps > _MOST_STEPS:
            return f"{max_steps} steps; allowed: at most {_MOST_STEPS}"
        if max_steps <= self.state.global_step:
            return f"step {self.state.global_step} is done; allowed: more steps than that"
        lengths = self._lengths_after(plan, max_steps)
        return find_length_obstacle(self.lr_scheduler, *lengths)

    def change_max_steps(self, max_steps: int) -> str:
        """Have the run end after so many steps, and its schedule know of it."""
        plan = self._plan
        assert plan is not None and plan.max_steps is not None
        planned = plan.max_steps if self.state.lengths is None else self.state.lengths[0]
        words = self._change_length(plan, max_steps)
        self.state.lengths = None if max_steps == planned else [planned, max_steps]
        self.commands.note_change()
        self.log({"max_steps": max_steps})
        return f"the run ends after step {max_steps}; {words}"

    def _go_on_as_commanded(self, plan: RunPlan, saved: tuple[int, int] | None) -> list[int] | None:
        """At a resume: go by the length that was commanded, unless the arguments ask for another
        than was planned then. Returns both lengths if that is so."""
        self._plan = plan
        if saved is None or plan.max_steps != saved[0]:
            return None
        words = self._change_length(plan, saved[1])
        logger.info(
            "the run was made to end after step %d instead of %d; it goes on so (%s)",
            saved[1],
            saved[0],
            words,
        )
        return list(saved)

    def _change_length(self, plan: RunPlan, max_steps: int) -> str:
        steps, tokens = self._lengths_after(plan, max_steps)
        plan.change_length(max_steps, self._train_loader)
        plan.describe(self.state, self.args)
        return change_length(self.lr_scheduler, steps, tokens)

    def _lengths_after(self, plan: RunPlan, max_steps: int) -> tuple[Any, Any]:
        """(steps, tokens) of the whole run, each before and after such a change."""
        changed = replace(plan, length=copy(plan.length))
        changed.change_length(max_steps, self._train_loader)
        return (
            (plan.expected_steps, changed.expected_steps),
            (plan.expected_tokens, changed.expected_tokens),
        )

    @property
    def _train_loader(self) -> WindowLoader:
        loader: WindowLoader = self.bus.kwargs["train_dataloader"]
        return loader

    # A pause

    def find_offload_obstacle(self) -> str | None:
        """Why the state cannot be moved to the host; None if it can."""
        mode = self.args.torch_compile_mode if self.args.torch_compile else None
        return self._parking().find_obstacle(mode)

    def pause(self, *, offload: bool = False) -> str:
        """Hold the run after this step, until somebody resumes or ends it.

        Returns words for when it is held, which `commands.is_held` tells.
        """
        if not offload:
            self.commands.pause()
            return "the run is held"
        parking = self._parking()
        if not parking.frees_memory:
            self.commands.pause()
            return "the run is held; its state is on the host anyway"
        self.commands.pause(parking, lambda: self.asked_to_end)
        return "the run is held, its weights and optimizer state on the host"

    def _parking(self) -> StateParking:
        assert self.model is not None and self.optimizer is not None and self.strategy is not None
        return StateParking(self.model, self.optimizer, self.strategy.device)
