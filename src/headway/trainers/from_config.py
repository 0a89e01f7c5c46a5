"""From a run file's `RunConfig` to the parts of a run, and to the trainer that runs them.

Owns: the order in which a run is built (cheap checks first) and what each component is given.
Does not own: reading run files (config), the parts themselves.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from headway.args import TrainingArguments
from headway.config.components import instantiate
from headway.config.schema import Component, RunConfig
from headway.data.tokenizer import Tokenizer, load_tokenizer
from headway.errors import ConfigError, missing_extra
from headway.models.initial import blank_causal_lm
from headway.optim.build import build_optimizer, check_scheduler
from headway.optim.group_schedules import refuse_group_schedules
from headway.strategies.source import construct
from headway.trainers.parallel import (
    AccelTrainer,
    DDPTrainer,
    FSDP2Trainer,
    PipelineTrainer,
)
from headway.trainers.trainer import Trainer

_PRETRAINED = ("pretrained", "headway.models.load_causal_lm")


def build_trainer(run: RunConfig) -> Trainer:
    """A trainer ready for `train()`; its model is built when training begins."""
    check_output_dir(run.args.output_dir)
    tokenizer = build_tokenizer(run)
    train_dataset, eval_dataset = build_datasets(run, tokenizer)
    return _trainer_class(run)(
        # What gives way to an Accelerator made from it still belongs to the run.
        args=copy.copy(run.args) if run.trainer == "accelerate" else run.args,
        model_init=build_model_init(run),
        data_collator=build_collator(run, tokenizer),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=build_callbacks(run),
        optimizer_factory=_factory(run.optimizer, "optimizer", "params"),
        optimizer_groups=build_groups(run),
        lr_scheduler_factory=_factory(run.lr_scheduler, "lr_scheduler", "optimizer"),
        default_callbacks=run.default_callbacks,
        run_config=run,
    )


def _trainer_class(run: RunConfig) -> Callable[..., Trainer]:
    """The trainer that the run names."""
    if run.trainer == "accelerate":
        return partial(AccelTrainer, accelerator=_make_accelerator(run.args))
    classes: dict[str, type[Trainer]] = {
        "single": Trainer,
        "ddp": DDPTrainer,
        "fsdp2": FSDP2Trainer,
        "pipeline": PipelineTrainer,
    }
    return classes[run.trainer]


def _make_accelerator(args: TrainingArguments) -> Any:
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise missing_extra("accelerate", "accelerate", "trainer: accelerate") from error
    return Accelerator(
        cpu=args.use_cpu,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision or "no",
    )


def _factory(
    component: Component | None, slot: str, given: str, key: str | None = None
) -> Callable[[Any], Any] | None:
    if component is None:
        return None
    return lambda value: _build(component, slot, key or slot, **{given: value})


def build_groups(run: RunConfig) -> dict[str, dict[str, Any] | None] | None:
    """The run's parameter groups, with what makes the optimizer of those that have their own."""
    if run.optimizer_groups is None:
        return None
    groups = dict(run.optimizer_groups)
    made: dict[str, Any] = {}  # equal ones share an optimizer
    for name, entry in groups.items():
        given = (entry or {}).get("factory")
        if entry is None or given is None:
            continue
        if isinstance(given, str):
            given = {"class_path": given}
        component = Component(given["class_path"], given.get("init_args") or {})
        factory = _factory(component, "optimizer", "params", f"optimizer_groups.{name}.factory")
        groups[name] = {**entry, "factory": made.setdefault(repr(component), factory)}
    return groups


def _build(component: Component, slot: str, key: str, **given: Any) -> Any:
    """Build a component; what goes wrong is told under its key in the run file."""
    try:
        return instantiate(component, slot, **given)
    except ConfigError as error:
        raise type(error)([f"{key}: {problem}" for problem in error.problems]) from error


def build_optimizer_and_scheduler(run: RunConfig, model: nn.Module) -> tuple[Optimizer, Any]:
    """The optimizer over a model, and the scheduler where the run names one (else None)."""
    optimizer = build_optimizer(
        model,
        run.args,
        factory=_factory(run.optimizer, "optimizer", "params"),
        groups=build_groups(run),
    )
    make_scheduler = _factory(run.lr_scheduler, "lr_scheduler", "optimizer")
    if make_scheduler is None:
        return optimizer, None
    refuse_group_schedules(optimizer.param_groups)
    scheduler = make_scheduler(optimizer)
    check_scheduler(scheduler, run.args)
    return optimizer, scheduler


def check_output_dir(output_dir: str | os.PathLike[str]) -> None:
    """Refuse a place where no folder can be made; makes none."""
    path = Path(output_dir).absolute()
    above = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not above.is_dir():
        raise ConfigError(
            f"args.output_dir: {output_dir} cannot be a folder: {above} is a file; "
            f"choose another place"
        )
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"args.output_dir: {output_dir}: no permission to write in {above}")


def build_tokenizer(run: RunConfig) -> Tokenizer | None:
    """The run's tokenizer, if it names one."""
    return None if run.tokenizer is None else load_tokenizer(run.tokenizer)


def build_datasets(run: RunConfig, tokenizer: Tokenizer | None) -> tuple[Any, Any]:
    """Training and evaluation data; a dataset that takes a tokenizer gets the run's."""
    if run.data.train is None:
        raise ConfigError(
            "data.train: missing; a run needs training data, for example "
            "{class_path: TokenDataset, init_args: {paths: train.hwt, sequence_length: 1024}}"
        )
    asked = run.args.asked_evaluations
    if asked and run.data.eval is None:
        raise ConfigError(f"data.eval: missing, and needed for evaluations (args: {asked})")
    given = {} if tokenizer is None else {"tokenizer": tokenizer}
    train = _build(run.data.train, "data", "data.train", **given)
    if run.data.eval is None:
        return train, None
    return train, _build(run.data.eval, "data", "data.eval", **given)


def build_collator(
    run: RunConfig, tokenizer: Tokenizer | None
) -> Callable[[list[Any]], Any] | None:
    """The collator the run names, padding with the tokenizer's own id; None for the default."""
    if run.data.collator is None:
        return None
    pad = getattr(tokenizer, "pad_token_id", None)
    given = {} if pad is None else {"pad_token_id": pad}
    collator: Callable[[list[Any]], Any] = _build(
        run.data.collator, "collator", "data.collator", **given
    )
    return collator


def build_callbacks(run: RunConfig) -> list[Any] | dict[str, Any]:
    """The run's callbacks, by name where it names them."""
    if isinstance(run.callbacks, dict):
        return {
            name: _build(component, "callbacks", f"callbacks.{name}")
            for name, component in run.callbacks.items()
            if component is not None
        }
    return [
        _build(component, "callbacks", f"callbacks.{number}")
        for number, component in enumerate(run.callbacks)
    ]


class ModelInit:
    """Makes the run's model when called; also says how to make it without its values."""

    def __init__(self, run: RunConfig) -> None:
        self._component = run.model
        self.weights: Path | None = None
        """The folder that holds the initial values, if they come from one."""
        if run.model.class_path in _PRETRAINED and "directory" in run.model.init_args:
            self.weights = Path(run.model.init_args["directory"])

    def __call__(self) -> nn.Module:
        model = _build(self._component, "model", "model")
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model.class_path: {self._component.class_path} makes a {type(model).__name__}, "
                f"not a torch.nn.Module"
            )
        return model

    def make_meta(self) -> nn.Module:
        """The model under `torch.device("meta")`, which must read no weights."""
        if self._component.class_path in _PRETRAINED:
            return _meta_pretrained(self._component.init_args)
        return self()


def build_model_init(run: RunConfig) -> ModelInit:
    """What makes the run's model when called."""
    return ModelInit(run)


def build_model_to_look_at(run: RunConfig) -> tuple[nn.Module, str | None]:
    """The run's model with all its shapes and, where it can be, no memory for its weights.

    A model whose construction needs values (a `.item()` in its `__init__`) cannot be built on the
    meta device; it is built on the CPU, and the second value says why.
    """

    build = build_model_init(run).make_meta
    try:
        with torch.device("meta"):
            return construct(build, run.args.default_dtype), None
    except Exception as error:
        if isinstance(error, OSError) or type(error) is ConfigError:
            raise
        reason = str(error)
    return construct(build, run.args.default_dtype), reason


def _meta_pretrained(init_args: dict[str, Any]) -> nn.Module:
    """The model of a folder without reading its weights."""
    directory = init_args.get("directory")
    if directory is None:
        raise ConfigError("model.init_args.directory: missing; it names the model's folder")
    dtype = init_args.get("dtype")
    return blank_causal_lm(
        directory,
        dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        config_overrides=init_args.get("config_overrides"),
    )
