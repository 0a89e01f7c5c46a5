"""From xaytune's name of a strategy to one of Headway's trainers, and to the ranks it needs.

Owns the choice, the process group of one run, and an Accelerator with DeepSpeed. Does not own what
the trainers do (trainers), nor how ranks meet (dist).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from headway.args import TrainingArguments
from headway.compat.xaytune.bridge import EventBridge
from headway.compat.xaytune.config import TrainerConfig
from headway.compat.xaytune.objective import LossFn, LossFnObjective
from headway.dist.group import (
    DistributedContext,
    cleanup_distributed,
    current_context,
    init_distributed,
)
from headway.errors import ConfigError, missing_extra
from headway.strategies.deepspeed import make_deepspeed_plugin
from headway.strategies.wrap import get_strategy
from headway.trainers.parallel import AccelTrainer, DDPTrainer, FSDP2Trainer
from headway.trainers.trainer import Trainer


class LossFnTrainer(Trainer):
    """Headway's trainer with xaytune's loss function and its event before an evaluation."""

    def __init__(self, *, loss_fn: LossFn | None, bridge: EventBridge, **options: Any) -> None:
        super().__init__(callbacks=[bridge], default_callbacks=False, **options)
        self._loss_fn = loss_fn
        self._bridge = bridge

    def _make_objective(self, model: nn.Module) -> LossFnObjective:
        return LossFnObjective(model, self._loss_fn)

    def _evaluate_in_training(self, must_end: Callable[[], bool]) -> dict[str, float] | None:
        self._bridge.fire("eval_start")
        return super()._evaluate_in_training(must_end)


class _OverDDP(LossFnTrainer, DDPTrainer):
    pass


class _OverFSDP2(LossFnTrainer, FSDP2Trainer):
    pass


class _OverAccelerate(LossFnTrainer, AccelTrainer):
    pass


TRAINERS: dict[str, type[LossFnTrainer]] = {
    "none": LossFnTrainer,
    "ddp": _OverDDP,
    "fsdp": _OverFSDP2,
    "deepspeed": _OverAccelerate,
}


@contextlib.contextmanager
def join_ranks(strategy: str, device: torch.device) -> Iterator[DistributedContext]:
    """The ranks of one run, which part when it is over; a group that was up before stays up."""
    if strategy == "none":
        yield DistributedContext()
        return
    was_up = current_context() is not None
    context = init_distributed(use_cpu=device.type == "cpu")
    try:
        yield context
    finally:
        if not was_up:
            cleanup_distributed(context)


def choose_strategy(strategy: str, context: DistributedContext, model: nn.Module) -> str:
    """The strategy to use; what `auto` is, rank 0 says for all."""
    chosen: str = context.broadcast(get_strategy(strategy, context.world_size, model=model))
    return chosen


def strategy_options(
    strategy: str, config: TrainerConfig, args: TrainingArguments, device: torch.device
) -> dict[str, Any]:
    """What the strategy's trainer takes beyond what all take."""
    if strategy != "deepspeed":
        return {}
    on_cpu = device.type == "cpu"
    plugin = make_deepspeed_plugin(
        args=args,
        mixed_precision="no" if on_cpu else config.mixed_precision,
    )
    try:
        from accelerate import Accelerator, InitProcessGroupKwargs
    except ImportError as error:
        raise missing_extra("accelerate", "accelerate", "strategy='deepspeed'") from error
    # Without a GPU Accelerate would look for NCCL all the same.
    handlers = [InitProcessGroupKwargs(backend="gloo")] if on_cpu else []
    return {"accelerator": Accelerator(deepspeed_plugin=plugin, kwargs_handlers=handlers)}


def ready_optimizer(optimizer: Optimizer, model: nn.Module) -> Callable[[Any], Optimizer]:
    """A factory that gives an optimizer made of `model` before a strategy took the model.

    FSDP2 puts other parameters in the place of those the optimizer was made of; it gets the new
    ones by their names.
    """
    names = {id(p): name for name, p in model.named_parameters()}

    def give(groups: Any) -> Optimizer:
        present = dict(model.named_parameters())
        for group in optimizer.param_groups:
            before = group["params"]
            group["params"] = [present.get(names.get(id(p), ""), p) for p in before]
            moved = any(new is not old for new, old in zip(group["params"], before))
            if moved and optimizer.state:
                raise ConfigError(
                    "optimizer: it has taken steps already, and its state cannot be cut into the "
                    "shards of strategy='fsdp'; give a fresh one, or a checkpoint to resume from"
                )
        return optimizer

    return give
