"""How to make a callback that cannot be written down in a run file by itself.

Owns: the base class. Does not own: when one is built (trainers).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.engine.events import TrainerCallback


class CallbackConfig(ABC):
    """Plain values from which a trainer makes a callback.

    It is given to a trainer in a callback's place, under the same name, and built when the trainer
    is made: the model, the optimizer and the data loaders are not there yet then.
    """

    @abstractmethod
    def build(self, trainer: Any) -> TrainerCallback | None:
        """The callback for this trainer; None if there is to be none."""
