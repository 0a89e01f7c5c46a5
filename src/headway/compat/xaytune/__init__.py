"""xaytune's trainer API, spelled as there and run by Headway.

Owns the names a program written for that API imports. `on` registers a handler for every trainer
of the process; `global_callbacks` is where such handlers are kept, and removed.
"""

from __future__ import annotations

from headway.compat.xaytune.config import TrainerConfig
from headway.compat.xaytune.events import EVENTS, CallbackManager, global_callbacks, on
from headway.compat.xaytune.state import TrainState
from headway.compat.xaytune.trainer import Trainer
from headway.optim.lr_finder import LRFinderResult, lr_find

__all__ = [
    "EVENTS",
    "CallbackManager",
    "LRFinderResult",
    "TrainState",
    "Trainer",
    "TrainerConfig",
    "global_callbacks",
    "lr_find",
    "on",
]
