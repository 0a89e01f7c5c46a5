"""What a guard does about a run that went wrong, and what it has to remember of it.

Owns: asking for a stop, an abort or a rollback; the number of rollbacks; which steps are left out
after one; which checkpoint is known to be good, so that it is still there when it is needed.
Does not own: how a run is found to have gone wrong (divergence.py, nan_guard.py), and carrying any
of it out (engine/loop.py, trainers/saving.py).

A rollback restores the state of callbacks as well. How often there was one, and what is to be left
out, must not be forgotten with it: where the state that is loaded knows of fewer rollbacks than
this object, it is from before them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

from headway.callbacks.save.checkpointer import find_checkpointer
from headway.callbacks.watch.ranges import require_count
from headway.checkpoint.storage import join_location, split_location
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError, unknown

logger = logging.getLogger(__name__)

SKIPS = ("offending", "all", "none")


class Recovery:
    """Acts for the guard of a name."""

    def __init__(
        self,
        owner: str,
        action: str,
        actions: Collection[str],
        *,
        max_rollbacks: int = 3,
        skip_batches: str = "offending",
        learning_rate_factor: float | None = None,
    ) -> None:
        if action not in actions:
            raise ConfigError(f"{owner}: " + unknown("action", str(action), actions))
        require_count(f"{owner}: max_rollbacks", max_rollbacks, least=1)
        if skip_batches not in SKIPS:
            raise ConfigError(f"{owner}: " + unknown("skip_batches", str(skip_batches), SKIPS))
        _check_factor(owner, learning_rate_factor)
        self.owner, self.action = owner, action
        self._keeper = f"{owner} {id(self)}"
        self.max_rollbacks, self.skip_batches = max_rollbacks, skip_batches
        self.learning_rate_factor = learning_rate_factor
        self.forget()

    def forget(self) -> None:
        """Of the run before, if there was one, nothing is left."""
        self.num_rollbacks = 0
        self.skip_steps: list[tuple[int, int]] = []
        """Steps to leave out, each range with its end exclusive."""
        self.good: tuple[int, str] | None = None
        """The newest checkpoint that is known to be good: its step and its name."""
        self.pending = False
        """Whether a rollback was asked for and has not come yet."""
        self._gave_up_at: int | None = None
        self._saves: list[tuple[int, str]] = []
        self._held: str | None = None
        """The checkpoint that was loaded, protected while it is not known whether it is good."""
        self._told_skip: tuple[int, int] | None = None

    # Before and beside the steps

    def begin(self, args: Any, state: TrainerState, trainer: Any) -> None:
        """A run begins: refuse what cannot work, and protect the good checkpoint again."""
        self.pending = False
        if self.good is not None:
            trainer.keep_checkpoint(self.good[1], self._keeper)
        if self.action != "rollback":
            return
        parts = args.checkpoint_components
        if parts is not None:
            raise ConfigError(
                f"{self.owner}: action='rollback' needs checkpoints that hold everything, but "
                f"checkpoint_components={parts!r} leaves parts out"
            )
        saves = args.save_strategy != "no" or args.save_every is not None
        saves = saves or find_checkpointer(trainer.callbacks) is not None
        if not saves and state.is_world_process_zero:
            logger.warning(
                "%s: action='rollback' needs checkpoints to return to, and save_strategy='no' "
                "plans none",
                self.owner,
            )

    def begin_step(self, state: TrainerState, control: TrainerControl) -> None:
        """Leave the coming step out if it is one of those that went wrong."""
        number = state.global_step + 1
        for span in self.skip_steps:
            if span[0] <= number < span[1]:
                control.should_skip_step = True
                if span != self._told_skip and state.is_world_process_zero:
                    logger.warning("%s: %s left out", self.owner, tell_steps(number, span[1]))
                self._told_skip = span

    def note_save(self, step: int, path: str, trainer: Any) -> None:
        """A checkpoint was committed; whether it is a good one is not known yet. An average of
        weights beside it, or a copy elsewhere, is nothing to return to."""
        own = (_own_folder(trainer), f"checkpoint-{step}")
        if split_location(path) == own:
            self._saves.append((step, own[1]))

    def note_good(self, step: int, trainer: Any) -> None:
        """All was well at a step: the newest checkpoint up to there stays until a newer one is
        known to be good."""
        while self._saves and self._saves[0][0] <= step:
            newest = self._saves.pop(0)
            if self.good is not None and self.good[1] != newest[1]:
                trainer.release_checkpoint(self.good[1], self._keeper)
            self.good = newest
            trainer.keep_checkpoint(newest[1], self._keeper)

    def note_load(self, state: TrainerState, trainer: Any, path: str) -> None:
        """The run goes on from a checkpoint, which stays until it is known whether it is good; what
        was saved after its step is of a time that did not happen."""
        self.pending = False
        step = state.global_step
        if any(save[0] > step and save[1] == self._held for save in self._saves):
            trainer.release_checkpoint(self._held, self._keeper)
        self._saves = [save for save in self._saves if save[0] <= step]
        if self.good is not None and self.good[0] > step:
            trainer.release_checkpoint(self.good[1], self._keeper)
            self.good = None
        folder, name = split_location(path)
        own = folder == _own_folder(trainer)
        if own and trainer.args.load_components is None:  # else the step is not the checkpoint's
            loaded = (step, name)
            if loaded != self.good and loaded not in self._saves:
                self._saves.append(loaded)
            self._held = loaded[1]
            trainer.keep_checkpoint(self._held, self._keeper)

    def let_go(self, trainer: Any) -> None:
        """The guard has nothing to watch in this run, and so no checkpoint to keep."""
        for name in {self._held, None if self.good is None else self.good[1]} - {None}:
            trainer.release_checkpoint(name, self._keeper)
        self._saves, self._held, self.good = [], None, None

    # Acting

    def act(
        self,
        why: str,
        control: TrainerControl,
        state: TrainerState,
        *,
        good_step: int,
        bad_step: int,
        action: str | None = None,
    ) -> None:
        """Do what is to be done: steps after `good_step` up to `bad_step` went wrong."""
        action = action or self.action
        note = ""
        if action == "rollback" and self.num_rollbacks >= self.max_rollbacks:
            action = "abort"
            note = f"; max_rollbacks={self.max_rollbacks} is used up"
        if state.is_world_process_zero:
            logger.error("%s: %s%s; action: %s%s", self.owner, why, note, action, self._tell_good())
        if action == "rollback":
            self._ask_rollback(control, good_step, bad_step)
            return
        control.should_training_stop = True
        control.should_abort_without_save |= action == "abort"

    def _tell_good(self) -> str:
        return "" if self.good is None else f" (the last good checkpoint is {self.good[1]})"

    def _ask_rollback(self, control: TrainerControl, good_step: int, bad_step: int) -> None:
        # No good step since the last rollback: leaving out the offending steps did not help.
        again = self._gave_up_at is not None and good_step <= self._gave_up_at
        leaves_all = self.skip_batches == "all" or (again and self.skip_batches == "offending")
        control.rollback = True
        # Another guard may have asked for one in the same step.
        before = control.rollback_before_step
        control.rollback_before_step = good_step if before is None else min(before, good_step)
        control.rollback_skip_data |= leaves_all
        factors = (control.rollback_rate_factor, self.learning_rate_factor)
        control.rollback_rate_factor = min((f for f in factors if f is not None), default=None)
        self.num_rollbacks += 1
        self._gave_up_at = bad_step
        self.pending = True
        if leaves_all:  # the steps come again with other data
            self.skip_steps = []
        elif self.skip_batches == "offending":
            self.skip_steps = [*self.skip_steps, (good_step + 1, bad_step + 1)]

    # State

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_rollbacks": self.num_rollbacks,
            "skip_steps": [list(span) for span in self.skip_steps],
            "gave_up_at": self._gave_up_at,
            "good_checkpoint": None if self.good is None else list(self.good),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.good is None and (good := state.get("good_checkpoint")):
            self.good = (int(good[0]), str(good[1]))
        if int(state.get("num_rollbacks") or 0) < self.num_rollbacks:
            return
        self.num_rollbacks = int(state.get("num_rollbacks") or 0)
        self.skip_steps = [(int(a), int(b)) for a, b in state.get("skip_steps") or ()]
        given = state.get("gave_up_at")
        self._gave_up_at = None if given is None else int(given)


def tell_steps(start: int, stop: int) -> str:
    """A range of steps in words, its end exclusive."""
    return f"step {start} is" if stop == start + 1 else f"steps {start} to {stop - 1} are"


def _check_factor(owner: str, given: Any) -> None:
    if given is None:
        return
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if not number or not math.isfinite(given) or not 0 < given <= 1:
        raise ConfigError(
            f"{owner}: learning_rate_factor: {given!r} given; allowed: a number above 0 and at "
            f"most 1, or none"
        )


def _own_folder(trainer: Any) -> str:
    """Where the run's checkpoints are."""
    return split_location(join_location(trainer.args.checkpoint_place, "checkpoint"))[0]
