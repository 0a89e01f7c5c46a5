"""Keeping the last completed step savable while the next one is under way.

Owns: the copy of what a step changes before its update (generators, data position, callbacks), and
whether a run's state is saved after an error. Does not own: the save itself (trainers).
"""

from __future__ import annotations

import copy
import logging
from typing import Any

from headway.checkpoint.rng import RNGState
from headway.data.loader import WindowLoader
from headway.engine.delivery import NonFiniteError
from headway.engine.events import EventBus
from headway.engine.parts import LoopParts

logger = logging.getLogger(__name__)

WHOLE, STEPPING, UPDATING = "whole", "stepping", "updating"


class LastStep:
    """Follows a run from step to step; one that is not `active` costs nothing.

    Weights, optimizer, schedule and counters change only in the update. So an error before it is
    undone by putting back the rest; an error inside it leaves a state that is of no step.
    """

    def __init__(self, loader: WindowLoader, bus: EventBus, *, active: bool) -> None:
        self._loader, self._bus, self._active = loader, bus, active
        self._phase = WHOLE
        self._copy: dict[str, Any] = {}

    def leave(self) -> None:
        """The next step begins: remember where the last one ended."""
        self._phase = STEPPING
        if self._active:
            self._copy = {
                "rng": RNGState().state_dict(),
                "data": copy.deepcopy(self._loader.state_dict()),
                "callbacks": copy.deepcopy(self._bus.state_dict()),
            }

    def update(self) -> None:
        """The update begins; until `reach` the state is of no step."""
        self._phase = UPDATING

    def reach(self) -> None:
        """The update and its counters are done."""
        self._phase = WHOLE

    def recover(self) -> bool:
        """Make the state that of the last completed step; False where that cannot be done."""
        if self._phase == WHOLE:
            return True
        if not self._active or self._phase == UPDATING:
            return False
        self._loader.load_state_dict(self._copy["data"])
        self._bus.load_state_dict(self._copy["callbacks"])
        RNGState().load_state_dict(self._copy["rng"])
        self._phase = WHOLE
        return True


def rescue(
    error: Exception, parts: LoopParts, last_step: LastStep, train_seconds: float, *, is_due: bool
) -> None:
    """After an error: save the last completed step, if its save was due or `save_on_error` asks."""
    args, judged = parts.args, isinstance(error, NonFiniteError)
    # A run that is ended for its values keeps them only where that is asked for.
    if not (args.save_on_error or (is_due and not judged)):
        return
    reason = "save_on_error" if args.save_on_error else "the save that was due"
    if args.world_size > 1 and not (judged or getattr(error, "raised_by_all", False)):
        # A save takes all ranks, and the others are not where this one is.
        logger.error("%s: only one of several ranks failed, so nothing is saved", reason)
        return
    try:
        if not last_step.recover():
            logger.error("%s: the update was under way, so there is nothing to save", reason)
            return
        parts.optimizer.zero_grad(set_to_none=True)
        parts.state.train_seconds = train_seconds
        parts.rescue(reason)
    except Exception:
        # The error that ended the run is the one to report.
        logger.exception("%s: it failed", reason)
