"""Headway: a training framework for PyTorch language models.

`Trainer`, `TrainingArguments` and `TrainerCallback` are what most programs need. Names are
imported on first use, so that `import headway` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from headway.args import (
        AccelTrainingArguments,
        DDPTrainingArguments,
        FSDP2TrainingArguments,
        PipelineTrainingArguments,
        TrainingArguments,
    )
    from headway.config.duration import Duration
    from headway.engine.callback_config import CallbackConfig
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
    "CallbackConfig",
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

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "args": (
            "AccelTrainingArguments",
            "DDPTrainingArguments",
            "FSDP2TrainingArguments",
            "PipelineTrainingArguments",
            "TrainingArguments",
        ),
        "config.duration": ("Duration",),
        "engine.callback_config": ("CallbackConfig",),
        "engine.events": ("TrainerCallback",),
        "engine.state": ("TrainerControl", "TrainerState"),
        "errors": ("ConfigError",),
        "trainers.parallel": ("AccelTrainer", "DDPTrainer", "FSDP2Trainer", "PipelineTrainer"),
        "trainers.trainer": ("Trainer",),
    },
)
