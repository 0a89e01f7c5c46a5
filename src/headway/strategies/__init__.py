"""Ways of running one model on devices, behind one contract.

Names are loaded when they are first used: a part of torch or an optional package that a strategy
needs is imported only with that strategy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from headway.strategies.accelerate import AccelerateStrategy
    from headway.strategies.base import DataShard, EvalStep, Strategy
    from headway.strategies.ddp import DistributedDataParallelStrategy
    from headway.strategies.deepspeed import (
        DeepSpeedConfig,
        build_deepspeed_config,
        make_deepspeed_plugin,
    )
    from headway.strategies.fsdp2 import FullyShardedStrategy
    from headway.strategies.objective import Objective
    from headway.strategies.pipeline import PipelineStrategy
    from headway.strategies.single import SingleDevice
    from headway.strategies.wrap import FSDPConfig, get_strategy, wrap_model_distributed

__all__ = [
    "AccelerateStrategy",
    "DataShard",
    "DeepSpeedConfig",
    "DistributedDataParallelStrategy",
    "EvalStep",
    "FSDPConfig",
    "FullyShardedStrategy",
    "Objective",
    "PipelineStrategy",
    "SingleDevice",
    "Strategy",
    "build_deepspeed_config",
    "get_strategy",
    "make_deepspeed_plugin",
    "wrap_model_distributed",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "accelerate": ("AccelerateStrategy",),
        "base": ("DataShard", "EvalStep", "Strategy"),
        "ddp": ("DistributedDataParallelStrategy",),
        "deepspeed": ("DeepSpeedConfig", "build_deepspeed_config", "make_deepspeed_plugin"),
        "fsdp2": ("FullyShardedStrategy",),
        "objective": ("Objective",),
        "pipeline": ("PipelineStrategy",),
        "single": ("SingleDevice",),
        "wrap": ("FSDPConfig", "get_strategy", "wrap_model_distributed"),
    },
)
