"""When a run saves, and for how long each checkpoint stays."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from headway.callbacks.save.removal import CheckpointRemovalStrategy
from headway.config.duration import Duration
from headway.config.rules import default_of
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.engine.triggers import Clock, Trigger
from headway.errors import ConfigError

logger = logging.getLogger(__name__)

# What of the arguments says nothing any more, with the parameter that says it now.
_REPLACED = {
    "save_strategy": "save_interval",
    "save_steps": "save_interval",
    "save_every": "save_interval",
    "save_total_limit": "max_checkpoints",
}


class CheckpointerCallback(TrainerCallback):
    """Saves at intervals, at given steps and before the first one, in place of `save_strategy`.

    `save_interval` and `fixed_steps` make checkpoints that stay, `ephemeral_save_interval` such as
    are there for a job that may be killed, and go when a newer one is complete. An interval is a
    number of steps or a duration: `"2h"`, `"1B tokens"`. The last step of a run is saved too, for
    good if the run is complete. `pre_train_checkpoint`: the state before the first step; None
    saves it unless a checkpoint was loaded.

    `max_checkpoints` keeps only so many of the newest of `save_interval` (None: all of them); those
    of `fixed_steps`, of step 0 and of the end of a run neither count nor go. `ephemeral_cooldown`
    is the least distance of an ephemeral save from any save before it, or from the checkpoint that
    was loaded. `save_async` None is as the argument of that name says. Without `enabled` it is as
    if the callback was not there.
    """

    priority = 1

    def __init__(
        self,
        save_interval: int | str | Duration | None = 250,
        ephemeral_save_interval: int | str | Duration | None = None,
        pre_train_checkpoint: bool | None = None,
        save_async: bool | None = None,
        remove: CheckpointRemovalStrategy | str = CheckpointRemovalStrategy.ephemeral_only,
        ephemeral_cooldown: int | str | Duration | None = None,
        fixed_steps: Iterable[int] | None = None,
        max_checkpoints: int | None = None,
        enabled: bool = True,
    ) -> None:
        self.save_interval = self._duration("save_interval", save_interval)
        self.ephemeral_save_interval = self._duration(
            "ephemeral_save_interval", ephemeral_save_interval
        )
        self.pre_train_checkpoint = self._flag("pre_train_checkpoint", pre_train_checkpoint)
        self.save_async = self._flag("save_async", save_async)
        self.remove = CheckpointRemovalStrategy.parse(remove, type(self).__name__)
        self.ephemeral_cooldown = self._duration("ephemeral_cooldown", ephemeral_cooldown)
        self.fixed_steps = self._steps("fixed_steps", fixed_steps)
        self.max_checkpoints = max_checkpoints
        self.enabled = bool(self._flag("enabled", enabled))
        self._check()
        self._clock = Clock(0.0, stands=True)
        self._saving = Trigger("no", 0, self.save_interval)
        self._ephemeral = Trigger("no", 0, self.ephemeral_save_interval)
        self._loaded = False
        self._before = self._at_save = 0.0
        """How far the run was, in the cooldown's unit, one step ago and at the last save."""
        self._seen_save: int | None = None

    # Options

    def _problem(self, text: str) -> ConfigError:
        return ConfigError(f"{type(self).__name__}: {text}")

    def _duration(self, option: str, given: Any) -> Duration | None:
        if given is None:
            return None
        try:
            duration = Duration.parse(given)
        except ConfigError as error:
            raise self._problem(f"{option}: {error}") from error
        if duration.value <= 0:
            raise self._problem(
                f"{option} is {given!r}; allowed: None, a number of steps of at least 1, or a "
                "duration above 0 such as '2h'"
            )
        return duration

    def _flag(self, option: str, given: Any) -> bool | None:
        allows_none = option != "enabled"
        if isinstance(given, bool) or (given is None and allows_none):
            return given
        words = "true, false or None" if allows_none else "true or false"
        raise self._problem(f"{option} is {given!r}; allowed: {words}")

    def _steps(self, option: str, given: Any) -> tuple[int, ...]:
        if given is None:
            return ()
        steps = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else None
        if steps is None or any(isinstance(s, bool) or not isinstance(s, int) for s in steps):
            raise self._problem(f"{option} is {given!r}; allowed: a list of steps")
        low = [step for step in steps if step < 1]
        if low:
            raise self._problem(
                f"{option} has {low[0]}; allowed: steps of at least 1 (the state before the first "
                "one is saved by pre_train_checkpoint)"
            )
        return tuple(sorted(set(steps)))

    def _check(self) -> None:
        most = self.max_checkpoints
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise self._problem(
                f"max_checkpoints is {most!r}; allowed: None (keep all) or at least 1"
            )
        if most is not None and self.remove is CheckpointRemovalStrategy.never:
            raise self._problem(
                f"max_checkpoints={most} removes older checkpoints, and remove='never' forbids it; "
                "give one of them"
            )
        often, rarely = self.ephemeral_save_interval, self.save_interval
        if often and rarely and often.unit == rarely.unit and often.value >= rarely.value:
            raise self._problem(
                f"ephemeral_save_interval is {often}, and must be below save_interval, which is "
                f"{rarely}"
            )

    @property
    def retention(self) -> dict[str, Any]:
        """The settings of the one retention function that follow from the options."""
        return self.remove.retention(self.max_checkpoints)

    # Events

    def _forget_run(self) -> None:
        self._loaded = False  # it may have gone back to a checkpoint

    def on_init_end(self, args: Any, state: TrainerState, trainer: Any) -> None:
        """Tell what of the arguments has no say any more."""
        if not self.enabled or not state.is_world_process_zero:
            return
        for option, own in _REPLACED.items():
            given = getattr(args, option)
            if given not in (default_of(args, option), "no"):
                logger.warning(
                    "%s: %s=%r has no effect beside it; %s decides",
                    type(self).__name__,
                    option,
                    given,
                    own,
                )
        if args.load_best_model_at_end and not args.eval_on_save:
            logger.warning(
                "%s: load_best_model_at_end chooses among checkpoints of evaluated steps; "
                "eval_on_save=True evaluates each one that is to stay",
                type(self).__name__,
            )

    def on_load(self, state: TrainerState) -> None:
        """Count from the checkpoint: at a resume, or in the middle of a run that goes back."""
        self._loaded = True
        self._count_from(state)

    def on_train_begin(self, state: TrainerState, control: TrainerControl) -> None:
        """Start counting, and save the state before the first step if it is wanted."""
        # Of several ranks the clock of one decides for all.
        self._clock = Clock(
            time.monotonic(), state.train_seconds, stands=not state.is_world_process_zero
        )
        self._count_from(state)
        loaded, self._loaded = self._loaded, False
        wanted = not loaded if self.pre_train_checkpoint is None else self.pre_train_checkpoint
        if self.enabled and wanted and state.global_step == 0:
            control.request_save("permanent")

    def on_step_end(self, state: TrainerState, control: TrainerControl, trainer: Any) -> None:
        """Ask for what is due; the loop saves once, by the strongest request."""
        if not self.enabled:
            return
        seconds = self._clock.of_run(time.monotonic())
        distance = self._since_save(state, seconds, trainer.last_saved_step)
        if state.global_step in self.fixed_steps:
            control.request_save("permanent")
        if self._is_due(state, seconds):
            control.request_save("permanent" if self.max_checkpoints is None else "regular")
        # A blocked save, and one too close to another, is left out, not put off.
        if self._ephemeral.due(state, seconds) and self._is_apart(distance):
            control.request_save("ephemeral")

    def _is_due(self, state: TrainerState, seconds: float) -> bool:
        """Whether a checkpoint of the regular schedule is due."""
        return self._saving.due(state, seconds)

    def _count_from(self, state: TrainerState) -> None:
        seconds = self._clock.of_run(time.monotonic())
        for trigger in (self._saving, self._ephemeral):
            trigger.start(state, seconds)
        self._before = self._at_save = self._progress(state, seconds)
        self._seen_save = None

    def _progress(self, state: TrainerState, seconds: float) -> float:
        if self.ephemeral_cooldown is None:
            return 0.0
        return self.ephemeral_cooldown.progress(
            step=state.global_step,
            tokens=state.num_input_tokens_seen,
            epoch=state.epoch,
            seconds=seconds,
        )

    def _since_save(self, state: TrainerState, seconds: float, save: int | None) -> float | None:
        """How far the last save is away; None if there was none.

        Saves follow on this event, so that one seen for the first time was made a step ago.
        """
        if save is not None and save != self._seen_save:
            self._seen_save, self._at_save = save, self._before
        self._before = self._progress(state, seconds)
        return None if save is None else self._before - self._at_save

    def _is_apart(self, distance: float | None) -> bool:
        if distance is None or self.ephemeral_cooldown is None:
            return True
        if self.ephemeral_cooldown.unit == "seconds" and self._clock.stands:
            return False
        return distance >= self.ephemeral_cooldown.value - 1e-9


def find_checkpointer(callbacks: Mapping[str, Any]) -> CheckpointerCallback | None:
    """The callback that decides about a run's saves; of two, neither could."""
    found = {
        name: callback
        for name, callback in callbacks.items()
        if isinstance(callback, CheckpointerCallback) and callback.enabled
    }
    if len(found) > 1:
        raise ConfigError(
            f"CheckpointerCallback: {' and '.join(found)} would both decide about saves; give "
            "one (fixed_steps and ListCheckpointerCallback's save_steps go with save_interval)"
        )
    return next(iter(found.values()), None)
