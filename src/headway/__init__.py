"""Headway: a training framework for PyTorch language models.

`Trainer`, `TrainingArguments` and `TrainerCallback` are what most programs need. Names are
imported on first use, so that `import headway` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.args import (
        AccelTrainingArguments,
        DDPTrainingArguments,
        FSDP2TrainingArguments,
        PipelineTrainingArguments,
        TrainingArguments,
    )
    from headway.config.duration import Duration
    from headway.engine.events import TrainerCallback
    from headway.engine.state import TrainerControl, TrainerState
    from headway.errors import ConfigError
    from headway.trainers.parallel import (
        AccelTrainer,
        DDPTrainer,
        FSDP2Trainer,
        PipelineTrainer,
    )
    from headway.trainers.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "AccelTrainer",
    "AccelTrainingArguments",
    "ConfigError",
    "DDPTrainer",
    "DDPTrainingArguments",
    "Duration",
    "FSDP2Trainer",
    "FSDP2TrainingArguments",
    "PipelineTrainer",
    "PipelineTrainingArguments",
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
    **{
        f"{kind}{what}": home
        for kind in ("Accel", "DDP", "FSDP2", "Pipeline")
        for what, home in (
            ("Trainer", "headway.trainers.parallel"),
            ("TrainingArguments", "headway.args"),
        )
    },
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'headway' has no attribute {name!r}")
