"""Wrapping a model for a training loop of one's own, without a trainer.

Owns: `get_strategy`, `wrap_model_distributed`, `FSDPConfig` and what its fields mean to
`fully_shard`. Does not own: the strategies of the trainers, which drive a whole step (ddp.py,
fsdp2.py, accelerate.py), and DeepSpeed's configuration (deepspeed.py).
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from headway.dist.group import DistributedContext, host_group
from headway.errors import ConfigError, unknown
from headway.strategies.blocks import DEFAULT_PATH, find_blocks, keep_apart
from headway.strategies.deepspeed import (
    DeepSpeedConfig,
    build_deepspeed_config,
    require_deepspeed,
)
from headway.strategies.fsdp_groups import reduce_unused
from headway.strategies.spread import same_on_all_ranks

logger = logging.getLogger(__name__)

STRATEGIES = ("none", "ddp", "fsdp", "deepspeed")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None, "no": None}
_SHARDING = {"full_shard": True, "shard_grad_op": False}
_PREFETCH = ("backward_pre", "backward_post")
_FSDP_KWARGS = tuple(name for name in inspect.signature(fully_shard).parameters if name != "module")
_DDP_KWARGS = tuple(
    name for name in inspect.signature(DistributedDataParallel).parameters if name != "module"
)
_DEEPSPEED_KWARGS = ("optimizer", "micro_batch_size", "accumulation", "max_grad_norm")
# Weights, gradients and the two moments of Adam, in float32; a frozen parameter has no more than
# its weight.
_TRAINED_BYTES, _FROZEN_BYTES = 16, 4
# The rest is for activations.
_STATE_SHARE = 0.6


@dataclass
class FSDPConfig:
    """How `fully_shard` cuts a model up."""

    sharding_strategy: str = "full_shard"
    """`full_shard` frees gathered parameters after the forward, `shard_grad_op` keeps them."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory between uses."""
    backward_prefetch: str | None = None
    """None or `backward_pre`: the next block is gathered while one computes, as torch does."""
    mixed_precision: bool = True
    """Compute in the precision that is asked for; gradients are reduced in float32."""
    auto_wrap_min_params: int = 100_000
    """Blocks of at least this many parameters are gathered one by one; in a model without a list
    of blocks, modules of this size. 0: all at once."""
    forward_prefetch: bool = False
    """Gather the next block already while one computes in the forward."""
    sync_module_states: bool = True
    """Every rank starts from rank 0's values."""
    limit_all_gathers: bool = True
    """Always so in `fully_shard`; False is refused."""
    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward."""

    def __post_init__(self) -> None:
        problems = list(_find_problems(self))
        if problems:
            raise ConfigError([f"FSDPConfig.{problem}" for problem in problems])

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> FSDPConfig:
        """Build from a mapping; an unknown key is refused with the nearest one."""
        _check_names("FSDPConfig option", given, [field.name for field in fields(cls)])
        return cls(**given)


def _find_problems(config: FSDPConfig) -> Iterator[str]:
    if config.sharding_strategy == "no_shard":
        yield "sharding_strategy: fully_shard has no 'no_shard'; use strategy='ddp' instead"
    elif config.sharding_strategy not in _SHARDING:
        yield f"sharding_strategy: {unknown('value', config.sharding_strategy, _SHARDING)}"
    if config.backward_prefetch == "backward_post":
        yield "backward_prefetch: fully_shard has no 'backward_post'; use None or 'backward_pre'"
    elif config.backward_prefetch not in (None, *_PREFETCH):
        yield f"backward_prefetch: {unknown('value', config.backward_prefetch, _PREFETCH)}"
    if config.limit_all_gathers is False:
        yield "limit_all_gathers: fully_shard always limits them; False cannot be had"
    count = config.auto_wrap_min_params
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        yield f"auto_wrap_min_params: a whole number from 0 up, got {count!r}"
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(field.default, bool) and not isinstance(value, bool):
            yield f"{field.name}: True or False, got {value!r}"


def get_strategy(strategy: str, world_size: int = 1, *, model: nn.Module | None = None) -> str:
    """The name of the strategy to use: `auto` is decided, an unknown name refused.

    `auto` is `none` on one rank and `ddp` on several; where a `model` is given whose training state
    would take more than 60 % of this GPU's memory, `fsdp`.
    """
    if strategy not in ("auto", *STRATEGIES):
        raise ConfigError(unknown("strategy", strategy, ("auto", *STRATEGIES)))
    if strategy != "auto":
        return strategy
    if world_size <= 1:
        return "none"
    if model is not None and torch.cuda.is_available():
        state_bytes = sum(
            p.numel() * (_TRAINED_BYTES if p.requires_grad else _FROZEN_BYTES)
            for p in model.parameters()
        )
        memory_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if state_bytes > _STATE_SHARE * memory_bytes:
            return "fsdp"
    return "ddp"


def wrap_model_distributed(
    model: nn.Module,
    *,
    strategy: str,
    ctx: DistributedContext,
    fsdp_config: FSDPConfig | Mapping[str, Any] | None = None,
    deepspeed_config: DeepSpeedConfig | Mapping[str, Any] | None = None,
    mixed_precision: str = "bf16",
    **kwargs: Any,
) -> Any:
    """The model made ready for all ranks of `ctx`.

    `none`: as it is. `ddp`: in DistributedDataParallel. `fsdp`: cut up in place by `fully_shard`;
    the optimizer is to be made afterwards. `deepspeed`: an engine, which owns the optimizer.
    `kwargs` go to the wrapper and win over the configuration; for `deepspeed` they are
    `optimizer`, `micro_batch_size`, `accumulation` and `max_grad_norm`. On one rank `ddp` and
    `fsdp` have nobody to share with and leave the model unwrapped.
    """
    strategy = get_strategy(strategy, ctx.world_size, model=model)
    if mixed_precision not in _DTYPES:
        raise ConfigError(f"mixed_precision: {unknown('value', mixed_precision, _DTYPES)}")
    if strategy == "deepspeed":
        return _wrap_deepspeed(model, ctx, deepspeed_config, mixed_precision, kwargs)
    if strategy == "none":
        _check_names("argument of strategy 'none'", kwargs, ())
        return model
    if ctx.world_size > 1 and not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"strategy={strategy!r} on {ctx.world_size} ranks needs torch.distributed to be "
            f"initialised; call headway.dist.init_distributed() first"
        )
    if strategy == "ddp":
        return _wrap_ddp(model, ctx, kwargs)
    return _wrap_fsdp(model, ctx, fsdp_config, mixed_precision, kwargs)


def _check_names(kind: str, given: Mapping[str, Any], allowed: Any) -> None:
    strange = sorted(given.keys() - set(allowed))
    if strange and not allowed:
        raise ConfigError(f"unknown {kind} {strange[0]!r}; it takes none")
    if strange:
        raise ConfigError([unknown(kind, name, allowed, most=20) for name in strange])


def _leave_alone(model: nn.Module, ctx: DistributedContext, strategy: str) -> nn.Module:
    logger.info("strategy=%r on one rank: the model stays unwrapped", strategy)
    return model.to(ctx.device)


def _wrap_ddp(model: nn.Module, ctx: DistributedContext, kwargs: dict[str, Any]) -> nn.Module:
    _check_names("argument of strategy 'ddp'", kwargs, _DDP_KWARGS)
    if ctx.world_size <= 1:
        return _leave_alone(model, ctx, "ddp")
    if ctx.device.type == "cuda":
        kwargs.setdefault("device_ids", [ctx.device.index])
    elif kwargs.get("device_ids") is not None:
        raise ConfigError(
            f"device_ids={kwargs['device_ids']!r}: only for CUDA; this rank is on {ctx.device}"
        )
    return DistributedDataParallel(model.to(ctx.device), **kwargs)


# -- fully_shard ---------------------------------------------------------------------------------


def _wrap_fsdp(
    model: nn.Module,
    ctx: DistributedContext,
    config: FSDPConfig | Mapping[str, Any] | None,
    mixed_precision: str,
    kwargs: dict[str, Any],
) -> nn.Module:
    _check_names("argument of strategy 'fsdp'", kwargs, _FSDP_KWARGS)
    num_axes = getattr(kwargs.get("mesh"), "ndim", 1)
    if num_axes > 2:
        raise ConfigError(
            f"mesh: {num_axes} axes given; allowed: one (all ranks share a copy) or two (copies, "
            "and the ranks that share one)"
        )
    if isinstance(config, Mapping):
        config = FSDPConfig.from_dict(config)
    config = FSDPConfig() if config is None else config
    if not isinstance(config, FSDPConfig):
        raise ConfigError(
            f"fsdp_config: an FSDPConfig or a mapping of its fields, got {type(config).__name__}"
        )
    config.__post_init__()  # fields may have been set since
    if config.activation_checkpointing:
        _checkpoint_activations(model)
    if ctx.world_size <= 1:
        return _leave_alone(model, ctx, "fsdp")
    if config.sync_module_states and not any(p.is_meta for p in model.parameters()):
        same_on_all_ranks(model, host_group())
    dtype = _DTYPES[mixed_precision] if config.mixed_precision else None
    reduce_dtype = None if dtype is None else torch.float32
    offload = OffloadPolicy()
    if config.cpu_offload:
        # Pinning without a GPU is an error in torch.
        offload = CPUOffloadPolicy(pin_memory=ctx.device.type == "cuda")
    options: dict[str, Any] = {
        "reshard_after_forward": _SHARDING[config.sharding_strategy],
        "mp_policy": MixedPrecisionPolicy(dtype, reduce_dtype),
        "offload_policy": offload,
        **kwargs,
    }
    if "mesh" not in options:
        options["mesh"] = init_device_mesh(ctx.device.type, (ctx.world_size,))
    parts = keep_apart(model, _parts_to_gather(model, config.auto_wrap_min_params))
    for part in parts:
        fully_shard(part, **options)
    if "mp_policy" not in kwargs and dtype is not None:
        # On the root alone: a block's output is the next block's input.
        options["mp_policy"] = MixedPrecisionPolicy(dtype, reduce_dtype, torch.float32)
    fully_shard(model, **options)
    reduce_unused(model)
    for buffer in model.buffers():
        if not buffer.is_meta:
            buffer.data = buffer.data.to(ctx.device)
    _set_prefetching(parts, config)
    return model


def _parts_to_gather(model: nn.Module, min_params: int) -> list[nn.Module]:
    """The modules that are cut up on their own before the whole, in the order of the model."""
    if min_params == 0:
        return []
    blocks = _blocks_of(model)
    if blocks:
        # Nothing else: a head whose weight is read without calling it would stay cut up.
        return [block for block in blocks if _num_params(block, set()) >= min_params]
    return list(_find_by_size(model, min_params, set()))


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    if not any(isinstance(module, nn.ModuleList) for module in model.modules()):
        return []
    return [block for _, block in find_blocks(model, DEFAULT_PATH)]


def _num_params(module: nn.Module, taken: set[int]) -> int:
    return sum(p.numel() for p in module.parameters() if id(p) not in taken)


def _find_by_size(module: nn.Module, min_params: int, taken: set[int]) -> Iterator[nn.Module]:
    """Modules with enough parameters of their own, innermost first."""
    for child in module.children():
        yield from _find_by_size(child, min_params, taken)
        # A list is never called itself, so nothing would gather it.
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            continue
        if _num_params(child, taken) >= min_params:
            taken.update(id(p) for p in child.parameters())
            yield child


def _set_prefetching(parts: list[nn.Module], config: FSDPConfig) -> None:
    sharded = [part for part in parts if isinstance(part, FSDPModule)]
    for part, following in itertools.pairwise(sharded):
        if config.forward_prefetch:
            part.set_modules_to_forward_prefetch([following])
        if config.backward_prefetch == "backward_pre":
            following.set_modules_to_backward_prefetch([part])


def _checkpoint_activations(model: nn.Module) -> None:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if callable(enable):
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    blocks = {id(block) for block in _blocks_of(model)}
    if not blocks:
        raise ConfigError(
            f"FSDPConfig.activation_checkpointing: {type(model).__name__} has neither "
            f"gradient_checkpointing_enable() nor a list of blocks to recompute"
        )
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in blocks:
                setattr(parent, name, checkpoint_wrapper(child))


# -- DeepSpeed -----------------------------------------------------------------------------------


def _wrap_deepspeed(
    model: nn.Module,
    ctx: DistributedContext,
    config: DeepSpeedConfig | Mapping[str, Any] | None,
    mixed_precision: str,
    kwargs: dict[str, Any],
) -> Any:
    _check_names("argument of strategy 'deepspeed'", kwargs, _DEEPSPEED_KWARGS)
    if config is None:
        raise ConfigError("strategy='deepspeed' needs deepspeed_config, a DeepSpeedConfig")
    optimizer = kwargs.pop("optimizer", None)
    own = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    built = build_deepspeed_config(
        config,
        mixed_precision=mixed_precision,
        optimizer=None if own is not None else optimizer,
        world_size=ctx.world_size,
        **kwargs,
    )
    if own is None and "optimizer" not in built:
        raise ConfigError(
            "strategy='deepspeed' needs an optimizer: pass optimizer=, a torch optimizer over the "
            "model's parameters or a mapping such as {'type': 'AdamW', 'params': {'lr': 1e-4}}, "
            "or name one in config_file"
        )
    require_deepspeed("strategy='deepspeed'")
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model, optimizer=own, model_parameters=model.parameters(), config=built
    )
    return engine
