"""Where this process stands among the others, and on which device it computes.

Owns: the rank facts read from the launcher, the choice of device, seeding.
Does not own: how a model is spread over ranks (strategies/).

Names are exported lazily, so that importing the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.dist.device import get_device, get_device_type, resolve_device
    from headway.dist.env import DistributedEnv, DistributedEnvInterface, detect_env
    from headway.dist.seed import draw_seed, seed_all

_HOMES = {
    "DistributedEnv": "env",
    "DistributedEnvInterface": "env",
    "detect_env": "env",
    "get_device": "device",
    "get_device_type": "device",
    "resolve_device": "device",
    "draw_seed": "seed",
    "seed_all": "seed",
}

__all__ = [
    "DistributedEnv",
    "DistributedEnvInterface",
    "detect_env",
    "draw_seed",
    "get_device",
    "get_device_type",
    "resolve_device",
    "seed_all",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
