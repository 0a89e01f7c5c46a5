"""What is done to a model and its strategy before the first step, as the arguments say.

Owns: the order of these changes. Does not own: any of them (precision/, strategies/).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from headway.args import TrainingArguments
from headway.models.fused_loss import FusedLoss, FusedLossFactory, find_factory
from headway.precision import fp8, qat
from headway.precision.amp import autocast
from headway.precision.scaler import LossScale
from headway.strategies.base import Strategy
from headway.strategies.source import ModelSource
from headway.trainers.model import enable_hf_activation_checkpointing

Recompute = Callable[[int, nn.Module], None]


def model_source(
    args: TrainingArguments,
    model: nn.Module | None,
    model_init: Callable[[], nn.Module] | None,
    *,
    rank: int,
    recompute: Recompute | None,
    fused_loss: FusedLoss | None,
) -> ModelSource:
    """Where a strategy gets its model, and what it does to each module that it will train."""

    def prepare(module: nn.Module) -> None:
        change_layers(args, module)
        if fused_loss is not None:
            fused_loss.install(module)
        if args.gradient_checkpointing:
            (recompute or enable_hf_activation_checkpointing)(rank, module)

    return ModelSource(
        model,
        model_init,
        args.default_dtype,
        make_meta=getattr(model_init, "make_meta", None),
        weights=getattr(model_init, "weights", None),
        prepare=prepare,
    )


def choose_fused_loss(
    args: TrainingArguments, factory: FusedLossFactory | None
) -> FusedLoss | None:
    """The loss of a given factory, or else the one that the arguments name."""
    if factory is None and args.fused_loss is not None:
        factory = find_factory(args.fused_loss)
    return None if factory is None else FusedLoss(factory)


def change_layers(args: TrainingArguments, module: nn.Module) -> None:
    """Put the layers of FP8 or quantization-aware training in the place of linear ones."""
    is_part = args.strategy_name == "pipeline"
    if args.fp8_recipe is not None:
        fp8.convert(
            module,
            args.fp8_recipe,
            args.fp8_dim_alignment,
            exclude=args.fp8_exclude,
            is_part=is_part,
        )
    if args.qat_recipe is not None:
        qat.prepare(
            module,
            args.qat_recipe,
            group_size=args.qat_group_size,
            exclude=args.qat_exclude,
            is_part=is_part,
        )


def equip(strategy: Strategy, args: TrainingArguments) -> None:
    """Give a strategy the contexts of its forwards and its loss scale."""
    if args.strategy_name == "accelerate":
        return  # precision is the Accelerator's
    if args.fp8_recipe is not None:
        fp8.check(args.fp8_recipe, strategy.device)  # before a model is built
    strategy.train_context = strategy.eval_context = autocast(args.mixed_precision, strategy.device)
    if args.mixed_precision == "fp16":
        strategy.loss_scale = LossScale()
