"""What is done to a model and its strategy before the first step, as the arguments say.

Owns: the order of these changes. Does not own: any of them (precision/, strategies/).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn

from headway.args import TrainingArguments
from headway.checkpoint.remote import check_address
from headway.config.rules_values import FLASH4
from headway.errors import ConfigError, check_all
from headway.models.decoder import DecoderStack
from headway.models.fused_loss import FusedLoss, FusedLossFactory, find_factory
from headway.precision import fp8, qat
from headway.precision.amp import Context, autocast
from headway.precision.scaler import LossScale
from headway.strategies import recompute as recomputation
from headway.strategies.base import Strategy
from headway.strategies.blank import build_blank, materialise
from headway.strategies.compilation import BLOCKS, CompileOptions, compile_module
from headway.strategies.forwards import put_back
from headway.strategies.objective import LossFunction
from headway.strategies.offload import ActivationOffload, make_offload, refuse_flex_attention
from headway.strategies.source import ModelSource

Recompute = Callable[[int, nn.Module], None]

logger = logging.getLogger(__name__)


def check_arguments(
    args: TrainingArguments,
    model: nn.Module | None,
    model_init: Callable[[], nn.Module] | None,
    device: torch.device,
) -> None:
    """Refuse what only torch, the device or the given model can tell, before anything is built."""
    if model is None and model_init is None:
        raise ConfigError("a trainer needs a model: give model=... or model_init=...")
    checks: list[Callable[[], object]] = [
        lambda: _check_place(args, model, model_init),
        lambda: _check_address(args),
    ]
    recipe, compiling = args.fp8_recipe, CompileOptions.from_args(args)
    if recipe is not None:
        checks.append(lambda: fp8.check(recipe, device))
    if compiling is not None:
        checks.append(lambda: compiling.check(device))
    check_all(*checks)


def _check_address(args: TrainingArguments) -> None:
    address = args.checkpoint_address
    if address is None:
        return
    if args.world_size > 1:
        raise ConfigError(
            f"checkpoint_address={address!r}: an address is written by one process, not by "
            f"{args.world_size} ranks; leave it out, and give an output_dir that all of them share"
        )
    check_address(address, "checkpoint_address")


def _check_place(
    args: TrainingArguments, model: nn.Module | None, model_init: Callable[[], nn.Module] | None
) -> None:
    place = args.construct_model_on
    if place != "default" and args.strategy_name != "pipeline":
        if model_init is None:
            raise ConfigError(
                f"construct_model_on={place!r} needs model_init, a function that makes the model"
            )
        if model is not None:
            raise ConfigError(
                f"construct_model_on={place!r} takes model_init and no ready model, which would "
                "be used as it is"
            )


def model_source(
    args: TrainingArguments,
    model: nn.Module | None,
    model_init: Callable[[], nn.Module] | None,
    *,
    rank: int,
    device: torch.device,
    recompute: Recompute | None,
    fused_loss: FusedLoss | None,
    has_checkpoint: bool,
) -> ModelSource:
    """Where a strategy gets its model, and what it does to each module that it will train.

    `has_checkpoint`: one will be loaded that holds all of the model's state.
    """
    if recompute is not None and not args.gradient_checkpointing:
        logger.warning(
            "enable_activation_checkpoint_fn: without effect, since gradient_checkpointing is False"
        )
    compiling = CompileOptions.from_args(args)
    if compiling is not None:
        compiling.start_workers(device)  # before the model, which takes its time as well
    source = ModelSource(
        model,
        model_init,
        args.default_dtype,
        make_meta=getattr(model_init, "make_meta", None),
        weights=getattr(model_init, "weights", None),
        prepare=lambda module: _prepare(module, args, rank, device, recompute, fused_loss),
    )
    if model is not None and args.default_dtype is not None:
        logger.warning(
            "default_dtype=%r: without effect on a ready model, whose weights stay %s; give "
            "model_init, or cast the model",
            args.default_dtype,
            ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})),
        )
    if model is not None or args.strategy_name == "pipeline":
        return source
    if args.construct_model_on == "device":
        source.device = device
    elif args.construct_model_on == "meta" and has_checkpoint:
        source.make_blank = lambda: _make_blank(source, device)
    elif args.construct_model_on == "meta":
        logger.info(
            "construct_model_on='meta': there is no checkpoint to fill the model from; it is "
            "built in the ordinary way"
        )
    return source


def _make_blank(source: ModelSource, device: torch.device) -> nn.Module | None:
    model = build_blank(source)
    return None if model is None else materialise(model, source, device)


def _prepare(
    module: nn.Module,
    args: TrainingArguments,
    rank: int,
    device: torch.device,
    recompute: Recompute | None,
    fused_loss: FusedLoss | None,
) -> None:
    put_back(module)
    for change in changes(module, args, rank, device, recompute, fused_loss):
        change()
    compiling = CompileOptions.from_args(args)
    if compiling is not None:
        is_part = args.strategy_name == "pipeline"
        compile_module(module, compiling, is_part=is_part, device=device)
    for part in module.modules():
        if isinstance(part, DecoderStack):
            part.prefers_flex = takes_flex(args)
            part.flash4 = args.sdpa_backend == FLASH4


def takes_flex(args: TrainingArguments) -> bool:
    """Whether compiled blocks may use flex attention unasked.

    Its block masks are made outside of graphs; offloaded activations are refused with it
    (offload.py), other kernels may have been asked for, and the rest is not known to go with it.
    """
    compiling = CompileOptions.from_args(args)
    return (
        compiling is not None
        and compiling.backend == "inductor"
        and compiling.mode is None
        and (compiling.scope == BLOCKS or args.strategy_name == "pipeline")
        and args.sdpa_backend in (None, FLASH4)
        and not args.enable_activation_offloading
        and args.activation_memory_budget is None
    )


def changes(
    module: nn.Module,
    args: TrainingArguments,
    rank: int,
    device: torch.device,
    recompute: Recompute | None,
    fused_loss: FusedLoss | None,
) -> Iterator[Callable[[], object]]:
    """What is done to a module, one after the other; each refuses what it cannot do.

    Layers first, then how they are called. Compilation, which comes after all of them, is not here.
    """
    is_part = args.strategy_name == "pipeline"
    if args.fp8_recipe is not None:
        yield partial(
            fp8.convert,
            module,
            args.fp8_recipe,
            args.fp8_dim_alignment,
            device,
            exclude=args.fp8_exclude,
            is_part=is_part,
        )
    if args.qat_recipe is not None:
        yield partial(
            qat.prepare,
            module,
            args.qat_recipe,
            group_size=args.qat_group_size,
            exclude=args.qat_exclude,
            is_part=is_part,
        )
    if fused_loss is not None:
        yield partial(fused_loss.install, module)
    if args.enable_activation_offloading:
        yield partial(refuse_flex_attention, module)
    if args.gradient_checkpointing:
        yield partial(_enable_recomputation, module, args, rank, recompute, is_part=is_part)


def _enable_recomputation(
    module: nn.Module,
    args: TrainingArguments,
    rank: int,
    custom: Recompute | None,
    *,
    is_part: bool,
) -> None:
    policy, options = args.gradient_checkpointing_policy, args.gradient_checkpointing_kwargs
    if custom is None:
        recomputation.enable(module, policy, options, may_lack_blocks=is_part)
        return
    if policy != recomputation.BLOCK or options:
        logger.warning(
            "enable_activation_checkpoint_fn decides what is recomputed; "
            "gradient_checkpointing_policy and gradient_checkpointing_kwargs have no effect"
        )
    custom(rank, module)


def choose_fused_loss(
    args: TrainingArguments,
    factory: FusedLossFactory | None,
    device: torch.device,
    plain: LossFunction | None = None,
) -> FusedLoss | None:
    """The loss of a given factory, or else the one that the arguments name.

    `plain` is the loss that was given beside it.
    """
    named = f"fused_loss={args.fused_loss!r}"
    if factory is not None and args.fused_loss is not None:
        logger.warning("%s: without effect, since fused_loss_factory is given", named)
    if plain is not None and (factory is not None or args.fused_loss is not None):
        logger.warning(
            "compute_loss_func and %s are both given: training goes by the fused loss, and by "
            "compute_loss_func only where the model does not lend itself to that, and in "
            "evaluations; give one of them",
            named if factory is None else "fused_loss_factory",
        )
    if factory is None and args.fused_loss is not None:
        factory = find_factory(args.fused_loss, device)
    return None if factory is None else FusedLoss(factory)


def equip(strategy: Strategy, args: TrainingArguments) -> ActivationOffload | None:
    """Give a strategy the contexts of its forwards and its loss scale.

    Returns the offload of activations, if there is one: it has to be shown the model.
    """
    contexts: list[Context] = []
    if args.strategy_name != "accelerate":  # there, precision is the Accelerator's
        precision = autocast(args.mixed_precision, strategy.device)
        strategy.eval_context = precision
        contexts += [] if precision is nullcontext else [precision]
        if args.mixed_precision == "fp16":
            strategy.loss_scale = LossScale()
    offload = make_offload(strategy.device) if args.enable_activation_offloading else None
    if offload is not None:
        contexts.append(offload)
    compiling = CompileOptions.from_args(args)
    # A pipeline has several forwards whose backward is to come.
    if compiling is not None and compiling.replays and args.strategy_name != "pipeline":
        contexts.append(_new_step)
        # Until the first mark every call of a compiled block would count as a step, also in an
        # evaluation before training: what one block gave would be lost to the next.
        torch.compiler.cudagraph_mark_step_begin()
    strategy.train_context = _joined(contexts)
    return offload


@contextmanager
def _new_step() -> Iterator[None]:
    """Tell CUDA graphs that what the last step gave is not needed any more."""
    torch.compiler.cudagraph_mark_step_begin()
    yield


def _joined(contexts: Sequence[Context]) -> Context:
    if len(contexts) < 2:
        return contexts[0] if contexts else nullcontext

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            yield

    return entered
