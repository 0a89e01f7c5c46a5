"""From a `TrainerConfig`, a model and a loader to Headway's arguments.

Owns the translation and the arithmetic of steps. Does not own the arguments' meaning (args).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from headway.args import AccelTrainingArguments, TrainingArguments
from headway.compat.xaytune.config import TrainerConfig
from headway.data.kinds import classify, is_sharded
from headway.errors import ConfigError
from headway.optim.warmup import resolve_warmup_steps

# Optimizer steps in an epoch of a loader that cannot tell: it ends by itself, long before.
_UNSIZED_EPOCH_STEPS = 10**12
# Here float32 means that nothing is done: operations run in the precision of the weights.
_PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}


class Batches:
    """An iterable of ready batches, such as a list, in the shape of a loader of batches."""

    def __init__(self, batches: Iterable[Any], batch_size: int) -> None:
        self.batch_size = batch_size
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def as_loader(loader: Any, batch_size: int, option: str) -> Any:
    """What Headway reads batch by batch: the loader itself where it shows that it is one."""
    if not hasattr(loader, "__iter__") or isinstance(loader, str | bytes | dict):
        raise ConfigError(
            f"{option} must be a DataLoader or an iterable of batches, got {type(loader).__name__}"
        )
    if count_batches(loader) == 0:
        raise ConfigError(f"{option} is empty: it has no batch")
    return loader if classify(loader) == "batches" else Batches(loader, batch_size)


def count_batches(loader: Any) -> int | None:
    """Batches in one pass; None where the loader cannot tell."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def plan_steps(config: TrainerConfig, loader: Any, world_size: int = 1) -> int | None:
    """Optimizer steps of the run, the last incomplete window of each epoch included.

    None: only the end of the loader will tell.
    """
    num_batches = count_batches(loader)
    if num_batches is not None and not is_sharded(loader):
        num_batches = -(-num_batches // world_size)  # dealt out, batch by batch
    limit = config.max_steps if config.max_steps > 0 else None
    if num_batches is None:
        return limit
    total = config.num_epochs * -(-num_batches // config.gradient_accumulation)
    return total if limit is None else min(total, limit)


def make_arguments(
    config: TrainerConfig,
    *,
    device: torch.device,
    total_steps: int | None,
    batch_size: int,
    num_eval_steps: int | None,
    builds_scheduler: bool,
    builds_optimizer: bool = True,
    arguments_class: type[TrainingArguments] = TrainingArguments,
    world_size: int = 1,
) -> TrainingArguments:
    """Headway's arguments for this configuration, less what a given optimizer or scheduler does."""
    if builds_scheduler and total_steps is None:
        _check_schedule_without_length(config)
    warmup_steps = config.warmup_steps
    if total_steps is not None:
        warmup_steps = resolve_warmup_steps(warmup_steps, config.warmup_ratio, total_steps)
    fields: dict[str, Any] = {}
    if config.checkpoint_every_n_steps and config.save_last:
        fields = {"save_strategy": "steps", "save_steps": config.checkpoint_every_n_steps}
    elif config.save_last:
        # No multiple of this is ever reached, which leaves the checkpoint at the end.
        fields = {"save_strategy": "steps", "save_steps": sys.maxsize}
    else:  # checkpoints in between, if any, are asked for by the bridge
        fields = {"save_strategy": "no"}
    if num_eval_steps is not None:
        fields["eval_strategy"] = "steps" if num_eval_steps else "epoch"
        fields["eval_steps"] = num_eval_steps or 100
    if arguments_class is not AccelTrainingArguments:  # there precision is the Accelerator's
        fields["mixed_precision"] = _PRECISIONS[config.mixed_precision]
    if builds_optimizer:
        fields |= {"learning_rate": config.learning_rate, "weight_decay": config.weight_decay}
    if builds_scheduler:
        fields |= {"lr_scheduler_type": config.scheduler, "warmup_steps": warmup_steps}
    return arguments_class(
        output_dir=config.output_dir,
        save_async=config.async_checkpoint,
        use_cpu=device.type == "cpu",
        # Of several ranks each has a device of its own, wherever their model was made.
        device=None if device.type == "cpu" or world_size > 1 else str(device),
        seed=config.seed,
        num_train_epochs=config.num_epochs,
        max_steps=total_steps or -1,
        epoch_train_steps=_UNSIZED_EPOCH_STEPS,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=config.gradient_accumulation,
        max_grad_norm=config.max_grad_norm,
        # Also how soon a loss that is not finite is noticed.
        logging_steps=10,
        save_total_limit=config.save_total_limit,
        gradient_checkpointing=config.activation_checkpointing,
        **fields,
    )


def _check_schedule_without_length(config: TrainerConfig) -> None:
    problems = []
    if config.scheduler in ("linear", "cosine"):
        problems.append(
            f"scheduler={config.scheduler!r} needs to know how many steps the training has, and "
            f"train_dataloader has no length: give max_steps, or use 'constant_with_warmup'"
        )
    if config.warmup_ratio:
        problems.append(
            f"warmup_ratio={config.warmup_ratio} needs to know how many steps the training has, "
            f"and train_dataloader has no length: give max_steps, or use warmup_steps"
        )
    if problems:
        raise ConfigError(problems)


def no_decay_groups(model: nn.Module) -> dict[str, Any] | None:
    """A group without weight decay for norms and biases; None if there are none."""
    names = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() < 2 or name.endswith("bias") or "norm" in type(module).__name__.lower()
    }
    if not names:
        return None
    pattern = "|".join(re.escape(name) for name in sorted(names))
    return {"no_decay": {"regex": f"^(?:{pattern})$", "config": {"weight_decay": 0.0}}}
