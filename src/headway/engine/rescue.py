"""Keeping the last completed step savable while the next one is under way.

Owns: the copy of what a step changes before its update (generators, data position, callbacks), and
whether a run's state can be saved after an error. Does not own: the save itself (trainers).
"""

from __future__ import annotations

import copy
from typing import Any

from headway.checkpoint.rng import RNGState
from headway.data.loader import WindowLoader
from headway.engine.events import EventBus

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
        if not self._active or self._phase == UPDATING:
            return False
        if self._phase == STEPPING:
            self._loader.load_state_dict(self._copy["data"])
            self._bus.load_state_dict(self._copy["callbacks"])
            RNGState().load_state_dict(self._copy["rng"])
            self._phase = WHOLE
        return True
