"""From arguments to an optimizer and a schedule.

Owns the precedence: a factory, then class and keyword arguments, then AdamW from the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from headway.args import TrainingArguments
from headway.errors import ConfigError
from headway.optim.group_schedules import make_specs
from headway.optim.groups import OptimizerGroups, make_groups
from headway.optim.scheduler import CurveLR

OptimizerFactory = Callable[[Any], Optimizer]


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
    param_groups = make_groups(model.named_parameters(), groups, debug=args.debug_optimizer_groups)
    if not param_groups and getattr(model, "trains_elsewhere", False):
        param_groups = [{"params": [], "param_names": []}]
    if not param_groups:
        raise ConfigError(
            f"the model {type(model).__name__} has no parameter that requires a gradient"
        )
    if factory is not None:
        optimizer = factory(param_groups)
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"optimizer_factory must return a torch.optim.Optimizer, got {optimizer!r}"
            )
        return check_optimizer(optimizer)
    if cls_and_kwargs is not None:
        cls, kwargs = cls_and_kwargs
        return check_optimizer(cls(param_groups, **kwargs))
    return torch.optim.AdamW(
        param_groups,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        fused=_can_fuse(param_groups),
    )


def check_optimizer(optimizer: Optimizer) -> Optimizer:
    """Refuse an optimizer that wants to run the model itself."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "optimizer LBFGS evaluates the model several times in one step, which the loop does "
            "not do; use one that takes gradients, such as AdamW or SGD"
        )
    return optimizer


def check_scheduler(scheduler: object) -> None:
    """Refuse a scheduler that wants a metric at each step."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "lr_scheduler ReduceLROnPlateau needs a metric at each step and the loop gives none; "
            "call it from a callback's on_evaluate instead"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise ConfigError(f"lr_scheduler_factory must return a scheduler, got {scheduler!r}")


def _can_fuse(param_groups: list[dict[str, Any]]) -> bool:
    """The fused kernel is the fastest on CPU and CUDA alike, and the only one that can withhold a
    non-finite step without asking the host."""
    parameters = [p for group in param_groups for p in group["params"]]
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)


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
