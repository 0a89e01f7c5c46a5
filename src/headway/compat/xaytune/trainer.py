"""xaytune's `Trainer`, run by Headway's.

Owns the signature of `train` and the checks that belong to it. Everything that trains, saves or
resumes is Headway's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from headway.checkpoint import committed, find_latest_checkpoint, read_manifest
from headway.compat.xaytune.bridge import EventBridge
from headway.compat.xaytune.config import TrainerConfig
from headway.compat.xaytune.events import CallbackManager
from headway.compat.xaytune.objective import LossFn
from headway.compat.xaytune.plan import (
    as_loader,
    count_batches,
    make_arguments,
    no_decay_groups,
    plan_steps,
)
from headway.compat.xaytune.state import TrainState
from headway.compat.xaytune.strategy import (
    TRAINERS,
    choose_strategy,
    join_ranks,
    ready_optimizer,
    strategy_options,
)
from headway.dist.group import DistributedContext
from headway.errors import ConfigError
from headway.trainers.trainer import Trainer as HeadwayTrainer


class Trainer:
    """Trains a model with the batches of a loader, on the kind of device the model is on.

    Without a `callback_manager` one is made; it is `callback_manager` either way.
    """

    def __init__(
        self,
        config: TrainerConfig | Mapping[str, Any],
        callback_manager: CallbackManager | None = None,
    ) -> None:
        if isinstance(config, Mapping):
            config = TrainerConfig.from_dict(config)
        if not isinstance(config, TrainerConfig):
            raise ConfigError(f"config must be a TrainerConfig, got {type(config).__name__}")
        if hasattr(type(self), "training_step"):
            raise ConfigError(
                f"{type(self).__name__}.training_step would never be called: Headway's loop runs "
                f"the step. Give train() a loss_fn, or write a headway.TrainerCallback"
            )
        self.config = config
        self.callback_manager = CallbackManager() if callback_manager is None else callback_manager
        self.state = TrainState()

    def compute_total_steps(self, dataset_size: int, batch_size: int) -> int:
        """Whole batches in whole windows, times the epochs, at most `max_steps`.

        `train` also applies an incomplete last batch or window, so it may take one step more per
        epoch; its own schedule is as long as its run.
        """
        if dataset_size < 0 or batch_size < 1:
            raise ConfigError(
                f"compute_total_steps needs dataset_size >= 0 and batch_size >= 1, got "
                f"{dataset_size} and {batch_size}"
            )
        config = self.config
        steps = dataset_size // batch_size // config.gradient_accumulation * config.num_epochs
        return min(steps, config.max_steps) if config.max_steps > 0 else steps

    def move_batch_to_device(self, batch: Any) -> Any:
        """Override to place batches; as it stands Headway moves tensors in dicts and lists."""
        return batch

    def train(
        self,
        *,
        model: nn.Module,
        train_dataloader: Any,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        loss_fn: LossFn | None = None,
        resume_state: TrainState | None = None,
        resume_checkpoint_dir: str | None = None,
        eval_dataloader: Any = None,
        eval_every_n_steps: int = 0,
    ) -> TrainState:
        """Train to the end and return the state reached.

        `eval_dataloader` (Headway's addition) is evaluated every `eval_every_n_steps`, or after
        each epoch if that is 0. A failure fires `error` and is raised again. On several ranks all
        of them call this; they meet here, and part after the last checkpoint.
        """
        config = self.config
        _check_model_and_optimizer(model, optimizer, scheduler)
        loader = as_loader(train_dataloader, config.batch_size, "train_dataloader")
        if eval_dataloader is not None:
            eval_dataloader = as_loader(eval_dataloader, config.batch_size, "eval_dataloader")
        self.state = TrainState(
            num_epochs=config.num_epochs,
            max_steps=config.max_steps,
            metrics=dict(resume_state.metrics) if resume_state is not None else None,
        )
        moves = type(self).move_batch_to_device is not Trainer.move_batch_to_device
        bridge = EventBridge(
            self.state,
            self.callback_manager,
            self,
            accumulation=config.gradient_accumulation,
            save_every=0 if config.save_last else config.checkpoint_every_n_steps,
            last_epoch=config.num_epochs if count_batches(loader) is None else None,
            move_batch=self.move_batch_to_device if moves else None,
        )
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        with join_ranks(config.strategy, device) as context:
            checkpoint = self._find_checkpoint(resume_state, resume_checkpoint_dir)
            trainer = self._make_trainer(
                context,
                device,
                loss_fn=loss_fn,
                bridge=bridge,
                model=model,
                train_dataset=loader,
                eval_dataset=eval_dataloader,
                num_eval_steps=None if eval_dataloader is None else eval_every_n_steps,
                optimizer_factory=None if optimizer is None else ready_optimizer(optimizer, model),
                lr_scheduler_factory=None if scheduler is None else lambda built: scheduler,
                optimizer_groups=no_decay_groups(model) if optimizer is None else None,
            )
            output = trainer.train(resume_from_checkpoint=checkpoint or False)
        stopped_by_loop = trainer.bus.stopped_by is not None and trainer.bus.stopped_by[0] == "loop"
        self.state.should_stop |= stopped_by_loop or output.interrupted_by is not None
        return self.state

    def _make_trainer(
        self,
        context: DistributedContext,
        device: torch.device,
        *,
        num_eval_steps: int | None,
        **options: Any,
    ) -> HeadwayTrainer:
        """Headway's trainer for the strategy, and its arguments."""
        config, loader = self.config, options["train_dataset"]
        strategy = choose_strategy(config.strategy, context, options["model"])
        trainer_class = TRAINERS[strategy]
        arguments = make_arguments(
            config,
            device=device,
            total_steps=plan_steps(config, loader, context.world_size),
            batch_size=getattr(loader, "batch_size", None) or config.batch_size,
            num_eval_steps=num_eval_steps,
            builds_optimizer=options["optimizer_factory"] is None,
            builds_scheduler=options["lr_scheduler_factory"] is None,
            arguments_class=trainer_class.arguments_class,
            world_size=context.world_size,
        )
        more = strategy_options(strategy, config, arguments, device)
        return trainer_class(args=arguments, **options, **more)

    def _find_checkpoint(self, state: TrainState | None, directory: str | None) -> str | None:
        """The checkpoint to resume from, which must be the one that the state is of."""
        if directory is None and state is not None:
            directory = state.last_checkpoint
            if directory is None and state.global_step > 0:
                raise ConfigError(
                    f"resume_state is at step {state.global_step}, but holds neither weights nor "
                    f"optimizer; give resume_checkpoint_dir as well"
                )
        if directory is None:
            self._refuse_foreign_checkpoints()
            return None
        found = find_latest_checkpoint(directory, kind="training")
        if found is None:
            raise ConfigError(
                f"resume_checkpoint_dir={str(directory)!r} is no complete Headway checkpoint, nor "
                f"a folder that holds one"
            )
        step = read_manifest(found).step
        if state is not None and state.global_step not in (0, step):
            raise ConfigError(
                f"resume_state is at step {state.global_step}, but {found} was saved at step "
                f"{step}; leave out resume_state, or give the checkpoint of that step"
            )
        return found

    def _refuse_foreign_checkpoints(self) -> None:
        folder = self.config.output_dir
        there = committed(folder)
        if there:
            raise ConfigError(
                f"output_dir={folder!r} already holds {there[-1].path.name}; choose another one, "
                f"or go on from it with resume_checkpoint_dir={folder!r}"
            )


def _check_model_and_optimizer(model: Any, optimizer: Any, scheduler: Any) -> None:
    problems = []
    if not isinstance(model, nn.Module):
        problems.append(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        problems.append(f"optimizer must be a torch.optim.Optimizer, got {kind}")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        problems.append(
            "scheduler: ReduceLROnPlateau needs a metric at each step and the loop gives none; "
            "call it from a handler of eval_end instead"
        )
    elif scheduler is not None and not callable(getattr(scheduler, "step", None)):
        problems.append(f"scheduler must have step(), got {type(scheduler).__name__}")
    elif scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        problems.append("scheduler belongs to another optimizer; give train() its own optimizer")
    if problems:
        raise ConfigError(problems)
