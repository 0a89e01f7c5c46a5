"""Fake quantisation that begins in the middle of a run.

Owns: when it begins. Does not own: the layers (precision/qat.py), which `qat_recipe` puts in place
before any strategy wraps the model and which compute as plain ones until then.
"""

from __future__ import annotations

import logging
from typing import Any

from headway.callbacks.schedule.points import Point, is_reached, read_point
from headway.callbacks.watch.ranges import require_flag
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

logger = logging.getLogger(__name__)

_WHO = "QATSwitchCallback"


class QATSwitchCallback(TrainerCallback):
    """Trains with whole weights up to `start`, from there on as `qat_recipe` says.

    `start` is a point of the run: 500, '500 steps', '1B tokens', '0.5 epochs'. Recipe, group size
    and excluded layers are those of the arguments (`qat_recipe`, `qat_group_size`, `qat_exclude`).
    Before `start` evaluations are without fake quantisation as well. What is on follows from the
    run's progress, so a resume on either side goes on exactly.
    """

    def __init__(self, start: Point, enabled: bool = True) -> None:
        require_flag(f"{_WHO}: enabled", enabled)
        self.start = read_point(f"{_WHO}: start", start)
        if not self.start.value:
            raise ConfigError(
                f"{_WHO}: start: {start!r} given; allowed: later than 0. To quantise from the "
                "first step "
                "on, leave the callback out"
            )
        self.enabled = enabled
        self._is_on: bool | None = None

    @property
    def is_on(self) -> bool | None:
        """Whether layers compute with few bits; None before the run has begun."""
        return self._is_on

    def on_init_end(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any
    ) -> None:
        if not self.enabled:
            return
        if args.qat_recipe is None:
            raise ConfigError(
                f"{_WHO} switches on what qat_recipe prepares, and qat_recipe is not set"
            )
        self._update(args, state, model)

    def on_load(self, args: Any, state: TrainerState, control: TrainerControl, model: Any) -> None:
        """Also after a rollback, which may lead back before the start."""
        if self.enabled and self._is_on is not None:
            self._update(args, state, model)

    def on_step_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any
    ) -> None:
        if self.enabled:
            self._update(args, state, model)

    def on_close(self, args: Any, state: TrainerState, control: TrainerControl, model: Any) -> None:
        if self._is_on is False:
            self._switch(args, model, True)
        self._is_on = None

    def _update(self, args: Any, state: TrainerState, model: Any) -> None:
        wanted = is_reached(self.start, state)
        if wanted == self._is_on:
            return
        first = self._is_on is None
        self._is_on = wanted
        count = self._switch(args, model, wanted)
        if not first:
            logger.info(
                "fake quantisation (%s) of %d layers %s after step %d",
                args.qat_recipe,
                count,
                "begins" if wanted else "ends",
                state.global_step,
            )

    def _switch(self, args: Any, model: Any, on: bool) -> int:
        from headway.precision.qat import switch

        if args.torch_compile:
            import torch

            # A graph that was compiled for the other state must not go on being used.
            torch.compiler.reset()
        return switch(model, on)
