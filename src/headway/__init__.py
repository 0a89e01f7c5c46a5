"""Headway: a training framework for PyTorch language models.

`Trainer`, `TrainingArguments` and `TrainerCallback` are what most programs need. Names are
imported on first use, so that `import headway` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.args import TrainingArguments
    from headway.config.duration import Duration
    from headway.engine.events import TrainerCallback
    from headway.engine.state import TrainerControl, TrainerState
    from headway.errors import ConfigError
    from headway.trainers.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Duration",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
]

_HOMES = {
    "ConfigError": "headway.errors",
    "Duration": "headway.config.duration",
    "Trainer": "headway.trainers.trainer",
    "TrainerCallback": "headway.engine.events",
    "TrainerControl": "headway.engine.state",
    "TrainerState": "headway.engine.state",
    "TrainingArguments": "headway.args",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'headway' has no attribute {name!r}")
