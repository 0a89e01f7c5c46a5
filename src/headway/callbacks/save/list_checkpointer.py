"""Saves at listed steps."""

from __future__ import annotations

from collections.abc import Iterable

from headway.callbacks.save.checkpointer import CheckpointerCallback
from headway.callbacks.save.removal import CheckpointRemovalStrategy
from headway.config.duration import Duration
from headway.engine.state import TrainerState


class ListCheckpointerCallback(CheckpointerCallback):
    """Saves at `save_steps`: the ends of a schedule's phases, milestones of a budget.

    All else is as `CheckpointerCallback` has it, but there is no interval unless one is given; what
    is made at `save_steps` counts for `max_checkpoints` as what an interval makes.
    """

    def __init__(
        self,
        save_steps: Iterable[int] | None = None,
        save_interval: int | str | Duration | None = None,
        ephemeral_save_interval: int | str | Duration | None = None,
        pre_train_checkpoint: bool | None = None,
        save_async: bool | None = None,
        remove: CheckpointRemovalStrategy | str = CheckpointRemovalStrategy.ephemeral_only,
        ephemeral_cooldown: int | str | Duration | None = None,
        fixed_steps: Iterable[int] | None = None,
        max_checkpoints: int | None = None,
        enabled: bool = True,
    ) -> None:
        super().__init__(
            save_interval,
            ephemeral_save_interval,
            pre_train_checkpoint,
            save_async,
            remove,
            ephemeral_cooldown,
            fixed_steps,
            max_checkpoints,
            enabled,
        )
        self.save_steps = self._steps("save_steps", save_steps)
        if not self.save_steps:
            raise self._problem(
                "save_steps is empty; give the steps to save at, such as [100, 500]"
            )

    def _is_due(self, state: TrainerState, seconds: float) -> bool:
        return super()._is_due(state, seconds) or state.global_step in self.save_steps
