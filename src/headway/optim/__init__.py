"""Optimizers, parameter groups and learning-rate schedules.

Names are loaded when they are first used, so that importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from headway.optim.lr_finder import LRFinderResult, lr_find
    from headway.optim.multi import JoinedOptimizer
    from headway.optim.scheduler import CurveLR, create_scheduler
    from headway.optim.schedules import ScheduleSpec, make_schedule
    from headway.optim.stochastic_adamw import StochasticAdamW, round_stochastically
    from headway.optim.warmup import resolve_warmup_steps

__all__ = [
    "CurveLR",
    "JoinedOptimizer",
    "LRFinderResult",
    "ScheduleSpec",
    "StochasticAdamW",
    "create_scheduler",
    "lr_find",
    "make_schedule",
    "resolve_warmup_steps",
    "round_stochastically",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "lr_finder": ("LRFinderResult", "lr_find"),
        "multi": ("JoinedOptimizer",),
        "scheduler": ("CurveLR", "create_scheduler"),
        "schedules": ("ScheduleSpec", "make_schedule"),
        "stochastic_adamw": ("StochasticAdamW", "round_stochastically"),
        "warmup": ("resolve_warmup_steps",),
    },
)
