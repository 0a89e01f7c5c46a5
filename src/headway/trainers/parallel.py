"""Trainers for several ranks: each chooses a strategy and overrides nothing else.

With one rank DDP and FSDP2 are the single-device path; a pipeline needs at least two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import distributed as dist

from headway.args import (
    AccelTrainingArguments,
    DDPTrainingArguments,
    FSDP2TrainingArguments,
    PipelineTrainingArguments,
    TrainingArguments,
)
from headway.checkpoint.ranks import Ranks
from headway.dist.group import DistributedContext, current_context, init_distributed
from headway.dist.limits import limit_collectives
from headway.errors import ConfigError
from headway.strategies.base import Strategy
from headway.trainers.trainer import Trainer


class _RankedTrainer(Trainer):
    """A trainer whose ranks are processes of one group."""

    def _check_world(self) -> None:
        pass

    def _ranks(self) -> Ranks:
        if self.env.world_size > 1:
            self._context()  # here everything begins that ranks do together
        ranks = super()._ranks()
        ranks.each_node = self.args.save_on_each_node and len(set(ranks.nodes)) > 1
        return ranks

    def _context(self) -> DistributedContext:
        context = current_context()
        if context is None and dist.is_available() and dist.is_initialized():
            context = init_distributed(use_cpu=self._device.type == "cpu")
        if context is None:
            raise ConfigError(
                f"{type(self).__name__}: this process is one of {self.env.world_size} "
                f"(WORLD_SIZE), but torch.distributed is not initialised; call "
                f"headway.dist.init_distributed() first, or start with headway train --nproc"
            )
        if context.world_size != self.env.world_size:
            raise ConfigError(
                f"{type(self).__name__}: the process group has {context.world_size} ranks, but "
                f"the environment says {self.env.world_size} (WORLD_SIZE)"
            )
        limit_collectives(self.args.ddp_timeout)
        return context

    @property
    def _device(self) -> torch.device:
        return torch.device(self.env.device)


class DDPTrainer(_RankedTrainer):
    """Every rank holds the whole model and its own share of the batch."""

    arguments_class: ClassVar[type[TrainingArguments]] = DDPTrainingArguments
    args: DDPTrainingArguments

    def _make_strategy(self) -> Strategy:
        if self.env.world_size == 1:
            return super()._make_strategy()
        from headway.strategies.ddp import DistributedDataParallelStrategy

        return DistributedDataParallelStrategy(self._context(), self._device, self.args)


class FSDP2Trainer(_RankedTrainer):
    """Every rank holds a slice of each parameter and its own share of the batch."""

    arguments_class: ClassVar[type[TrainingArguments]] = FSDP2TrainingArguments
    args: FSDP2TrainingArguments

    def _make_strategy(self) -> Strategy:
        if self.env.world_size == 1:
            return super()._make_strategy()
        from headway.strategies.fsdp2 import FullyShardedStrategy

        return FullyShardedStrategy(self._context(), self._device, self.args)


class PipelineTrainer(_RankedTrainer):
    """Every rank holds some of the layers; a batch passes through all ranks in pieces.

    `model_splitter` cuts the model into stages (None: found automatically);
    `pipe_schedule_factory` is a schedule class of torch.distributed.pipelining, and goes before
    `args.pipe_schedule`.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = PipelineTrainingArguments
    args: PipelineTrainingArguments

    def __init__(
        self,
        *,
        model_splitter: Any = None,
        pipe_schedule_factory: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        if options.get("model") is not None:
            raise ConfigError(
                "model: PipelineTrainer takes model_init, which makes the model, and no ready one: "
                "each rank builds only its own stages"
            )
        if options.get("model_init") is None:
            raise ConfigError("model_init: PipelineTrainer needs it to build the stages")
        self._splitter, self._schedule = model_splitter, pipe_schedule_factory
        super().__init__(**options)

    def _check_world(self) -> None:
        if self.env.world_size == 1:
            raise ConfigError(
                "PipelineTrainer needs at least two ranks (WORLD_SIZE is 1); start it with "
                "headway train --nproc 2, or use Trainer"
            )

    def _make_strategy(self) -> Strategy:
        from headway.strategies.pipeline.strategy import PipelineStrategy

        return PipelineStrategy(
            self._context(),
            self._device,
            self.args,
            splitter=self._splitter,
            schedule=self._schedule,
        )


class AccelTrainer(_RankedTrainer):
    """Runs on what a `accelerate.Accelerator` has set up; precision comes from it as well."""

    arguments_class: ClassVar[type[TrainingArguments]] = AccelTrainingArguments
    args: AccelTrainingArguments

    def __init__(self, *, accelerator: Any, **options: Any) -> None:
        from headway.strategies.accelerator import check_accelerator, reconcile

        args = options.get("args")
        if args is None or isinstance(args, Mapping):
            args = self.arguments_class.from_dict(dict(args or {}))
        reconcile(check_accelerator(accelerator), args)
        init_distributed(use_cpu=accelerator.device.type == "cpu")  # its ranks are watched as well
        options["args"], self._accelerator = args, accelerator
        super().__init__(**options)

    def _make_strategy(self) -> Strategy:
        from headway.strategies.accelerate import AccelerateStrategy

        return AccelerateStrategy(self._accelerator, self.args)
