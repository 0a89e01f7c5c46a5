"""From arguments to an optimizer and a schedule.

Owns the precedence: a factory, then class and keyword arguments, then what `optim` names; and the
joining of optimizers where groups have factories of their own.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from headway.args import TrainingArguments
from headway.config.group_settings import check_setting, unknown_setting
from headway.config.rules import default_of
from headway.errors import ConfigError
from headway.optim.choice import build_named
from headway.optim.group_schedules import GROUP_KEY, make_specs
from headway.optim.groups import (
    DEFAULT_GROUP,
    NO_DECAY,
    Group,
    OptimizerGroups,
    deal_parameters,
    own_values,
    split_no_decay,
)
from headway.optim.kinds import Kinds, all_names, parameter_kinds
from headway.optim.multi import JoinedOptimizer
from headway.optim.scheduler import CurveLR

logger = logging.getLogger(__name__)

OptimizerFactory = Callable[[Any], Optimizer]

_SCHEDULE_OPTIONS = (
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "lr_scheduler_unit",
    "warmup_steps",
    "warmup_ratio",
    "warmup_tokens",
)


def build_optimizer(
    model: nn.Module,
    args: TrainingArguments,
    *,
    factory: OptimizerFactory | None = None,
    cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
    groups: OptimizerGroups | None = None,
) -> Optimizer:
    """Build the optimizer over the model's trainable parameters.

    A part of a model that is trained elsewhere (`trains_elsewhere`) may have none: its optimizer
    has one empty group.
    """
    kinds = parameter_kinds(model)
    dealt = _deal(model, args, kinds, groups)
    if factory is None and cls_and_kwargs is not None:
        factory = _factory_of(cls_and_kwargs)

    def build_main(own: Sequence[Group]) -> Optimizer:
        if factory is not None:
            return _call(factory, own, "optimizer_factory")
        return build_named(args, own, kinds, sparse=_has_sparse(model))

    if any(entry and entry.get("factory") for entry in (groups or {}).values()):
        if args.fuse_optim_with_backward:
            raise ConfigError(
                "fuse_optim_with_backward cannot be used with a factory in optimizer_groups: it "
                "needs one optimizer for all parameters"
            )
        optimizer: Optimizer = _join(dealt, build_main)
    else:
        optimizer = build_main(dealt)
    _check_settings(optimizer, dealt)
    if factory is not None:
        _warn_of_unused(args, optimizer)
    return optimizer


def _deal(
    model: nn.Module, args: TrainingArguments, kinds: Kinds, groups: OptimizerGroups | None
) -> list[Group]:
    # A part of a model knows the kinds of parameters that other ranks have, too.
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    dealt = deal_parameters(
        model.named_parameters(),
        groups,
        names=all_names(model),
        elsewhere=kinds.keys() - own,
        debug=args.debug_optimizer_groups,
    )
    if args.no_decay_on:
        listed = [args.no_decay_on] if isinstance(args.no_decay_on, str) else args.no_decay_on
        dealt = split_no_decay(dealt, kinds, listed)
    if not dealt and getattr(model, "trains_elsewhere", False):
        return [Group(DEFAULT_GROUP, [])]
    if not dealt:
        raise ConfigError(
            f"the model {type(model).__name__} has no parameter that requires a gradient"
        )
    return dealt


def _join(
    dealt: Sequence[Group], build_main: Callable[[Sequence[Group]], Optimizer]
) -> JoinedOptimizer:
    """An optimizer for each distinct factory, and the main one for groups without."""
    shares: dict[Any, list[Group]] = {}
    for group in dealt:
        shares.setdefault(group.factory, []).append(group)
    parts = [
        build_main(own) if factory is None else _call(factory, own, _factory_key(own[0]))
        for factory, own in shares.items()
    ]
    place = {group.name: number for number, group in enumerate(dealt)}
    held = [group for part in parts for group in part.param_groups]
    held.sort(key=lambda group: place.get(group.get("group_name", ""), len(place)))
    return JoinedOptimizer(parts, held)


def _factory_of(given: Any) -> OptimizerFactory:
    """What makes an optimizer of `optimizer_cls_and_kwargs`."""
    option = "optimizer_cls_and_kwargs"
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    if not is_pair or not callable(given[0]) or not isinstance(given[1], Mapping):
        raise ConfigError(
            f"{option} must be an optimizer's class and a dict of its arguments, got {given!r}"
        )
    cls, kwargs = given
    try:
        inspect.signature(cls, follow_wrapped=False).bind([], **kwargs)
    except ValueError:  # some that are not written in Python tell no signature
        pass
    except TypeError as error:
        name = getattr(cls, "__name__", repr(cls))
        raise ConfigError(f"{option}: {name}: {error}") from error
    return lambda param_groups: cls(param_groups, **own_values(kwargs))


def _factory_key(group: Group) -> str:
    return f"optimizer_groups.{group.name}.factory"


def _call(factory: OptimizerFactory, groups: Sequence[Group], key: str) -> Optimizer:
    try:
        optimizer = factory([group.as_param_group() for group in groups])
    except Exception as error:
        if "Muon only supports 2D" not in str(error):
            raise
        raise ConfigError(
            f"{key}: Muon is for matrices only, and the model has other parameters too; set "
            f"optim='muon', which gives AdamW the rest, or give Muon a group of its own with "
            f"optimizer_groups.<name>.factory"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"{key} must return a torch.optim.Optimizer, got {optimizer!r}")
    return check_optimizer(optimizer)


def _warn_of_unused(args: TrainingArguments, optimizer: Optimizer) -> None:
    """Name options that a given optimizer does not go by: they are set, and it has other values."""
    held = optimizer.param_groups
    reflected = {
        "learning_rate": any(group.get("lr") == args.learning_rate for group in held),
        "weight_decay": any(group.get("weight_decay") == args.weight_decay for group in held),
        "adam_epsilon": any(group.get("eps") == args.adam_epsilon for group in held),
    }
    betas = [group["betas"] for group in held if isinstance(group.get("betas"), tuple | list)]
    for place, name in enumerate(("adam_beta1", "adam_beta2")):
        reflected[name] = any(getattr(args, name) in own[place : place + 1] for own in betas)
    _warn_of_idle(
        args,
        [name for name in ("optim", "optim_args", *reflected) if not reflected.get(name)],
        "the optimizer that is given (optimizer in a run file, optimizer_factory or "
        "optimizer_cls_and_kwargs) has settings of its own",
    )


def _warn_of_idle(args: TrainingArguments, options: Sequence[str], why: str) -> None:
    given = [
        f"{name}={getattr(args, name)!r}"
        for name in options
        if getattr(args, name) not in (default_of(args, name), None, {})
    ]
    if given:
        logger.warning("%s: without effect, since %s", " and ".join(given), why)


def _check_settings(optimizer: Optimizer, dealt: Sequence[Group]) -> None:
    """Refuse settings of groups that their optimizer would not look at, or could not use."""
    configs: Mapping[str, Group] = {group.name: group for group in dealt}
    problems: list[str] = []
    for number, group in enumerate(optimizer.param_groups):
        part = optimizer.part_of(number) if isinstance(optimizer, JoinedOptimizer) else optimizer
        source = configs.get(group.get("group_name", ""))
        if source is None or not part.defaults:  # it tells nothing about its settings
            continue
        where = f"optimizer_groups.{source.name.removesuffix(NO_DECAY)}.config"
        for key, value in source.config.items():
            if key == GROUP_KEY or key not in group:
                continue
            if key in part.defaults:
                default = part.defaults[key]
                wrong = check_setting(key, value, default)
                if wrong is not None:
                    problems.append(f"{where}.{key} {wrong}")
                elif isinstance(default, tuple) and isinstance(value, list):
                    group[key] = tuple(value)
            elif source.name.endswith(NO_DECAY) and key == "weight_decay":
                problems.append(f"no_decay_on: {type(part).__name__} has no weight_decay")
            else:
                of = f" of {type(part).__name__}"
                problems.append(f"{where}: {unknown_setting(key, sorted(part.defaults), of)}")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _has_sparse(model: nn.Module) -> bool:
    return any(getattr(module, "sparse", False) is True for module in model.modules())


def check_optimizer(optimizer: Optimizer) -> Optimizer:
    """Refuse an optimizer that wants to run the model itself."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "optimizer LBFGS evaluates the model several times in one step, which the loop does "
            "not do; use one that takes gradients, such as AdamW or SGD"
        )
    return optimizer


def check_scheduler(scheduler: object, args: TrainingArguments) -> None:
    """Refuse a given scheduler that wants a metric at each step; name options that it ignores."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "lr_scheduler ReduceLROnPlateau needs a metric at each step and the loop gives none; "
            "call it from a callback's on_evaluate instead"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise ConfigError(f"lr_scheduler_factory must return a scheduler, got {scheduler!r}")
    _warn_of_idle(
        args,
        _SCHEDULE_OPTIONS,
        "the scheduler is the one that is given (lr_scheduler in a run file, or "
        "lr_scheduler_factory)",
    )


def build_scheduler(
    optimizer: Optimizer,
    args: TrainingArguments,
    total_steps: int | None,
    *,
    total_tokens: int | None = None,
    tokens_per_step: int | None = None,
    tokens_seen: Callable[[], int] | None = None,
) -> CurveLR:
    """The schedule named by `lr_scheduler_type`, or by a param group's own `lr_scheduler`.

    `tokens_seen` gives the run's progress to a schedule in tokens.
    """
    specs = make_specs(
        optimizer.param_groups,
        args,
        total_steps=total_steps,
        total_tokens=total_tokens,
        tokens_per_step=tokens_per_step,
    )
    return CurveLR(optimizer, specs, tokens_seen=tokens_seen)


def follow_scheduler(optimizer: Optimizer | None, scheduler: LRScheduler | None) -> None:
    """Give param groups the scheduler's rates, where only one of the two was restored."""
    if optimizer is None or scheduler is None or not hasattr(scheduler, "base_lrs"):
        return
    for group, base, rate in zip(
        optimizer.param_groups, scheduler.base_lrs, scheduler.get_last_lr()
    ):
        group["initial_lr"], group["lr"] = base, rate
