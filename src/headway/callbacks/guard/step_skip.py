"""Leaves out a range of steps, such as those with data that are known to be bad.

Owns: the range. Does not own: what a step that is left out is (engine/step.py).
"""

from __future__ import annotations

import logging

from headway.callbacks.guard.recovery import tell_steps
from headway.callbacks.watch.ranges import require_count
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

logger = logging.getLogger(__name__)


class StepSkipRange(TrainerCallback):
    """Steps from `start` up to `stop`, which is not among them, are counted but not taken.

    Steps count from 1, as in records and in the names of checkpoints: `StepSkipRange(10, 12)`
    leaves out steps 10 and 11. Their data are read and passed over.
    """

    def __init__(self, start: int, stop: int) -> None:
        kind = type(self).__name__
        require_count(f"{kind}: start", start, least=1)
        require_count(f"{kind}: stop", stop, least=1)
        if stop <= start:
            raise ConfigError(f"{kind}: stop: {stop} given; allowed: a step after start={start}")
        self.start, self.stop = start, stop
        self._told = False

    def _forget_run(self) -> None:
        self._told = False

    def on_step_begin(self, state: TrainerState, control: TrainerControl) -> None:
        number = state.global_step + 1
        if not self.start <= number < self.stop:
            return
        control.should_skip_step = True
        if not self._told and state.is_world_process_zero:
            logger.warning("%s left out", tell_steps(number, self.stop))
        self._told = True
