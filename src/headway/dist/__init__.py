"""Where this process stands among the others, how they find and watch each other, on which device.

Owns: the rank facts read from the launcher, process groups, agreement, the end of a run when one
rank fails, the choice of device, seeding.
Does not own: how a model is spread over ranks (strategies/).

Names are exported lazily, so that importing the package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from headway.dist.agreement import agree_bits, exchange, require_equal
    from headway.dist.device import get_device, get_device_type, resolve_device
    from headway.dist.env import DistributedEnv, DistributedEnvInterface, detect_env
    from headway.dist.failure import PeerFailure, first_to_say, guard_run
    from headway.dist.group import (
        DistributedContext,
        cleanup_distributed,
        current_context,
        host_group,
        init_distributed,
    )
    from headway.dist.seed import derive_seed, draw_seed, seed_all

__all__ = [
    "DistributedContext",
    "DistributedEnv",
    "DistributedEnvInterface",
    "PeerFailure",
    "agree_bits",
    "cleanup_distributed",
    "current_context",
    "derive_seed",
    "detect_env",
    "draw_seed",
    "exchange",
    "first_to_say",
    "get_device",
    "get_device_type",
    "guard_run",
    "host_group",
    "init_distributed",
    "require_equal",
    "resolve_device",
    "seed_all",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "agreement": ("agree_bits", "exchange", "require_equal"),
        "device": ("get_device", "get_device_type", "resolve_device"),
        "env": ("DistributedEnv", "DistributedEnvInterface", "detect_env"),
        "failure": ("PeerFailure", "first_to_say", "guard_run"),
        "group": (
            "DistributedContext",
            "cleanup_distributed",
            "current_context",
            "host_group",
            "init_distributed",
        ),
        "seed": ("derive_seed", "draw_seed", "seed_all"),
    },
)
