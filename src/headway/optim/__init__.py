"""Optimizers, parameter groups and learning-rate schedules.

Names are loaded when they are first used, so that importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.optim.lr_finder import LRFinderResult, lr_find
    from headway.optim.scheduler import CurveLR, create_scheduler
    from headway.optim.schedules import ScheduleSpec, make_schedule
    from headway.optim.warmup import resolve_warmup_steps

_MODULES = {
    "lr_finder": ("LRFinderResult", "lr_find"),
    "scheduler": ("CurveLR", "create_scheduler"),
    "schedules": ("ScheduleSpec", "make_schedule"),
    "warmup": ("resolve_warmup_steps",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "CurveLR",
    "LRFinderResult",
    "ScheduleSpec",
    "create_scheduler",
    "lr_find",
    "make_schedule",
    "resolve_warmup_steps",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
