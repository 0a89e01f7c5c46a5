"""`Trainer`: puts model, data, strategy, optimizer, callbacks and checkpoints together and runs.

Owns composition and the public API. The loop is in engine/, devices in strategies/, bytes in
checkpoint/; a trainer for another strategy chooses that strategy and overrides nothing else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from headway.args import TrainingArguments
from headway.checkpoint.distributed import DistributedRanks
from headway.checkpoint.ranks import Ranks, SoloRanks
from headway.config.schema import RunConfig
from headway.config.snapshot import take_snapshot, versions, write_snapshot
from headway.data.loader import WindowLoader
from headway.dist.agreement import require_equal
from headway.dist.channel import RankChannel
from headway.dist.command import find_command
from headway.dist.env import DistributedEnvInterface, detect_env
from headway.dist.failure import guard_run
from headway.dist.seed import derive_seed, draw_seed, seed_all
from headway.engine.bookkeeping import Bookkeeping
from headway.engine.cached_memory import CachedMemory
from headway.engine.cancel import CancelRequests
from headway.engine.commands import CommandRelay
from headway.engine.events import EventBus, TrainerCallback
from headway.engine.examination import Examination
from headway.engine.loop import TrainingLoop
from headway.engine.metrics import MetricBuffer
from headway.engine.parts import LoopParts
from headway.engine.signals import SignalRequests
from headway.engine.start_times import StartTimes
from headway.engine.state import TrainerControl, TrainerState, outcome_of
from headway.engine.timing import LoopTiming
from headway.errors import ConfigError
from headway.models.fused_loss import FusedLossFactory
from headway.optim.build import (
    OptimizerFactory,
    build_optimizer,
    build_scheduler,
    check_scheduler,
)
from headway.optim.group_schedules import refuse_group_schedules
from headway.optim.groups import OptimizerGroups
from headway.precision.amp import check_scaled
from headway.precision.quantized import require_trainable
from headway.strategies.base import Strategy
from headway.strategies.objective import LossFunction, Objective
from headway.strategies.single import SingleDevice
from headway.strategies.torch_settings import check_attention, torch_settings
from headway.trainers.calling import Calling
from headway.trainers.checkpointing import Checkpointing
from headway.trainers.collation import choose_collator
from headway.trainers.evaluation import Evaluation
from headway.trainers.lr_find import LearningRateFinding
from headway.trainers.model import flops_per_token
from headway.trainers.outputs import RunStart, TrainOutput
from headway.trainers.own_metrics import ComputeMetrics, PreprocessLogits
from headway.trainers.plan import RunPlan, accumulation_steps, has_length, plan_run
from headway.trainers.preflight import GuardedCollator, check_data_fits, check_fp8_tokens
from headway.trainers.preparation import (
    check_arguments,
    choose_fused_loss,
    equip,
    model_source,
)
from headway.trainers.recording import Recording
from headway.trainers.registration import Registration
from headway.trainers.requests import RunRequests
from headway.trainers.resume import wanted_components
from headway.trainers.saving import Saver
from headway.trainers.steering import Steering

logger = logging.getLogger(__name__)


class Trainer(
    Calling,
    Registration,
    Recording,
    RunRequests,
    Steering,
    Checkpointing,
    Evaluation,
    LearningRateFinding,
):
    """Trains a model on one device; the classes derived from it choose another strategy.

    All arguments go by name. `args` may be a dict; `model` or `model_init` is needed. A list of
    callbacks is added to the default ones (one of the same class takes a default's place);
    `default_callbacks=False` leaves the defaults out.
    """

    def __init__(
        self,
        *,
        args: TrainingArguments | Mapping[str, Any] | None = None,
        model: nn.Module | None = None,
        model_init: Callable[[], nn.Module] | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | Mapping[str, Any] | None = None,
        compute_loss_func: LossFunction | None = None,
        compute_metrics: ComputeMetrics | None = None,
        preprocess_logits_for_metrics: PreprocessLogits | None = None,
        distributed_env: DistributedEnvInterface | None = None,
        optimizer_factory: OptimizerFactory | None = None,
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        optimizer_groups: OptimizerGroups | None = None,
        lr_scheduler_factory: Callable[[Optimizer], LRScheduler] | None = None,
        enable_activation_checkpoint_fn: Callable[[int, nn.Module], None] | None = None,
        fused_loss_factory: FusedLossFactory | None = None,
        default_callbacks: bool = True,
        run_config: RunConfig | None = None,
    ) -> None:
        args = self._take_arguments(args)
        self.args: TrainingArguments = args
        self.env = distributed_env or detect_env(use_cpu=args.use_cpu, device=args.device)
        args._process_index, args._world_size = self.env.rank, self.env.world_size
        args._local_process_index = self.env.local_rank
        device = torch.device(self.env.device)
        args._n_gpu = int(device.type == "cuda")
        self._check_world()
        check_arguments(args, model, model_init, device)
        self.model: nn.Module | None = model
        self.model_init = model_init
        self.data_collator = data_collator
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer: Optimizer | None = None
        self.lr_scheduler: LRScheduler | None = None
        self._optimizer_factory = optimizer_factory
        self._optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self._optimizer_groups = optimizer_groups
        self._lr_scheduler_factory = lr_scheduler_factory
        self._enable_activation_checkpoint_fn = enable_activation_checkpoint_fn
        self._check_functions()
        self._warn_of_overrides()
        self._fused_loss = choose_fused_loss(args, fused_loss_factory, device, compute_loss_func)
        self._fuses_its_own = fused_loss_factory is not None
        self._run_config = run_config
        self.state = TrainerState(
            is_world_process_zero=self.env.rank == 0,
            is_local_process_zero=self.env.local_rank == 0,
        )
        self.bus = EventBus(args, self.state, TrainerControl())
        self.metrics = MetricBuffer()
        self.cancel = CancelRequests(self.state)
        self.bookkeeping = Bookkeeping(self.bus, self.env.world_size)
        self.timing = LoopTiming()
        self.start_times: StartTimes | None = None
        """What the time to the first step went to; counts from `train()` if nobody began it."""
        self.commands = CommandRelay(self.env.rank, self.env.world_size)
        self._channel: RankChannel | None = None
        self.strategy: Strategy | None = None
        self._all_ranks: Ranks | None = None
        self._objective: Objective | None = None
        self._eval_loader: WindowLoader | None = None
        self._register_callbacks(callbacks, default_callbacks)

    # Strategy

    def _check_world(self) -> None:
        """Refuse a number of ranks that this trainer is not for."""
        if self.env.world_size > 1:
            raise ConfigError(
                f"Trainer runs on one device, but this process is one of {self.env.world_size} "
                f"(WORLD_SIZE); use DDPTrainer, FSDP2Trainer or PipelineTrainer (in a run file "
                f"'trainer: ddp')"
            )

    def _make_strategy(self) -> Strategy:
        return SingleDevice(
            torch.device(self.env.device), step_in_backward=self.args.fuse_optim_with_backward
        )

    def _ranks(self) -> Ranks:
        """All ranks of the run, as a checkpoint sees them; made once, by all of them together."""
        if self._all_ranks is None:
            self._all_ranks = DistributedRanks() if self.env.world_size > 1 else SoloRanks()
        return self._all_ranks

    def _require_same(self, config: dict[str, Any]) -> None:
        """Refuse ranks that would not train the same thing."""
        if self.env.world_size > 1:
            text = json.dumps(config, sort_keys=True, default=str)
            own = {f"version of {name}": str(found) for name, found in versions().items()}
            require_equal({"configuration": text, **own})

    # Set-up

    def _prepare_model(self, *, resumes: bool = False) -> None:
        """Model on its device and an objective for it; done once.

        `resumes`: a checkpoint will be loaded that holds all of the model's state.
        """
        if self.strategy is not None:
            return
        if self.state.seed is None:  # an evaluation comes first
            self._choose_seed(None)
        strategy = self._make_strategy()
        offload = equip(strategy, self.args)
        source = model_source(
            self.args,
            self.model,
            self.model_init,
            rank=self.env.rank,
            device=strategy.device,
            recompute=self._enable_activation_checkpoint_fn,
            fused_loss=self._fused_loss,
            has_checkpoint=resumes,
        )
        if self.env.world_size > 1:
            # Ranks that build different models would wait for each other for ever.
            require_equal({"the model": source.describe()})
        model = strategy.setup(source)
        if offload is not None:
            offload.watch(model)
        check_attention(self.args, model, strategy.device, strategy.train_context)
        if strategy.loss_scale is not None:
            check_scaled(model)
        self._seed_rank()
        if strategy.data_shard().world_size > 1 or self.env.world_size > 1:
            self._channel = RankChannel()
        self.strategy, self.model = strategy, model
        self._objective = self._make_objective(model)
        self.bus.kwargs.update(model=model, processing_class=self.processing_class, trainer=self)

    def _make_objective(self, model: nn.Module) -> Objective:
        return Objective(model, self.compute_loss_func, self._fused_loss)

    def _loader(self, dataset: Any, option: str, *, training: bool = False) -> WindowLoader:
        """A loader for a dataset that the user gave as `option`, checked against the model."""
        assert self.strategy is not None
        args, shard = self.args, self.strategy.data_shard()
        accumulation = accumulation_steps(args, shard.world_size, dataset) if training else 1
        model = self.strategy.unwrap()
        collate = choose_collator(self.data_collator, self.processing_class, model)
        own_loss = self.compute_loss_func is not None or self._fuses_its_own
        loader = WindowLoader(
            dataset,
            batch_size=(
                args.per_device_train_batch_size if training else args.per_device_eval_batch_size
            ),
            accumulation=accumulation,
            collate_fn=GuardedCollator(collate, model, option, own_loss=own_loss),
            seed=self.state.seed or 0,
            shuffle=training,
            drop_last=args.dataloader_drop_last,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and self.strategy.device.type == "cuda",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            rank=shard.rank,
            world_size=shard.world_size,
            set_epoch=args.set_dataset_epoch,
            epoch_batches=(
                args.epoch_train_steps * accumulation
                if training and not has_length(dataset)
                else None
            ),
            option=option,
        )
        check_data_fits(model, loader, option, self.processing_class)
        return loader

    def _prepare_optimizer(self, plan: RunPlan) -> None:
        assert self.model is not None and self.strategy is not None
        self.optimizer = build_optimizer(
            self.model,
            self.args,
            factory=self._optimizer_factory,
            cls_and_kwargs=self._optimizer_cls_and_kwargs,
            groups=self._optimizer_groups,
        )
        if self.strategy.adopt is not None:
            self.strategy.adopt(self.optimizer)
        if self._lr_scheduler_factory is not None:
            refuse_group_schedules(self.optimizer.param_groups)
            self.lr_scheduler = self._lr_scheduler_factory(self.optimizer)
            check_scheduler(self.lr_scheduler, self.args)
            if isinstance(self.lr_scheduler, TrainerCallback):
                self.bus.add(self.lr_scheduler)
        else:
            self.lr_scheduler = build_scheduler(
                self.optimizer,
                self.args,
                plan.expected_steps,
                total_tokens=plan.expected_tokens,
                tokens_per_step=plan.tokens_per_step,
                tokens_seen=lambda: self.state.num_input_tokens_seen,
            )
        self.bus.kwargs.update(optimizer=self.optimizer, lr_scheduler=self.lr_scheduler)

    # Training

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train to the end of the run's length, resuming as the arguments (or the parameter) say.

        A signal or `stop_at` ends it early with a checkpoint; `interrupted_by` then says so.
        """
        if self.train_dataset is None:
            raise ConfigError("train() needs train_dataset")
        asked = self.args.asked_evaluations
        if asked and self.eval_dataset is None:
            raise ConfigError(f"{asked}: eval_dataset is needed for evaluations, and is not given")
        resume = self.args.resume_from_checkpoint
        if resume_from_checkpoint is not None:
            resume = resume_from_checkpoint
        self.bus.restart()
        examination = self._examination = Examination(self.args, self.state, self._run_config)
        try:
            with (
                examination,
                guard_run() as end_together,
                SignalRequests() as signals,
                torch_settings(self.args),
            ):
                output = self._train(resume, signals)
                end_together()
                self._close()
        except BaseException as error:
            self.state.outcome = outcome_of(error)
            self.bus.fire_to_all("on_error", exception=error)
            self.bookkeeping.close()
            self.bus.fire_to_all("on_close")
            raise
        finally:
            self.cancel.clear()
            self._loop = None
        if self._saver is not None and self._saver.best_refused is not None:
            raise self._saver.best_refused
        return output

    def _train(self, resume: bool | str, signals: SignalRequests) -> TrainOutput:
        start_times = self.start_times
        if start_times is None or start_times.is_over:
            start_times = self.start_times = StartTimes()
        self._begin_run()
        self.cancel.begin()
        # Made of the time, and so another one on every rank.
        self.args.logging_dir = self._ranks().share(self.args.logging_dir)
        snapshot = take_snapshot(self._run_config, self.args, find_command())
        self._require_same(snapshot["config"])
        saver = self._saver = Saver(self, snapshot["config"])
        found = saver.find(resume)
        self._choose_seed(saver.saved.seed)
        self._prepare_model(resumes=found is not None and "model" in wanted_components(self.args))
        assert self.strategy is not None and self.model is not None
        self._seed_rank()  # an evaluation may have built the model
        start_times.reach("model")
        require_trainable(self.model)
        loader = self._loader(self.train_dataset, "train_dataset", training=True)
        if self.eval_dataset is not None:
            self._eval_loader = self._evaluation_loader(self.eval_dataset, "eval_dataset")
        shares, ranks = self.strategy.data_shard().world_size, self._ranks()
        checkpointed, done = saver.checkpointer is not None, saver.saved.progress
        settings: dict[str, Any] = {"checkpointed": checkpointed, "done": done}
        plan = plan_run(self.args, loader, shares, lambda n: max(ranks.exchange(n)), **settings)
        check_fp8_tokens(self.args, loader, self.data_collator, plan, self.strategy.device)
        self._prepare_optimizer(plan)
        plan.describe(self.state, self.args)
        self.bus.kwargs.update(train_dataloader=loader, eval_dataloader=self._eval_loader)
        saver.attach(loader)
        lengths = self._go_on_as_commanded(plan, saver.saved.lengths)
        if found is not None:
            saver.resume(found)
        self.state.lengths = lengths
        self.bus.fire("on_init_end")

        def take_over_folder() -> None:
            start_times.finish("first step")
            logger.info("first step after %s", start_times.describe())
            # Not before a step has worked: a run that cannot start changes nothing on disk.
            saver.take_folder()
            saver.write_held()
            saver.manager.stager.make_ready()
            if self.env.rank == 0:
                write_snapshot(self.args.output_dir, snapshot)
            self._examination.begin(loop.delivery.recent)

        parts = self._parts(plan, loader, saver, take_over_folder)
        loop = self._loop = TrainingLoop(parts, signals)
        self.model.train()
        start = RunStart.now(self.state)
        saver.prepare(expects_saves=plan.save_trigger.active or checkpointed)
        self.bookkeeping.open()
        self.timing.doing = None
        try:
            self.bus.fire("on_train_begin")
            start_times.reach("set-up")
            loop.run()
            self.timing.doing = "close"
            saver.finish()
            self.bookkeeping.drain()
            loop.close()
        except BaseException:
            saver.settle()
            raise
        finally:
            saver.close()
            for each in [e for e in (loader, self._eval_loader) if e is not None]:
                each.close()
        self.state.outcome = loop.outcome
        return self._finish(loop, saver, start)

    def _close(self) -> None:
        """What some ranks may have done long before others, as far as callbacks do not wait."""
        self.bus.fire("on_train_end")
        self.bookkeeping.drain()
        self.bookkeeping.close()
        errors = self.bus.fire_to_all("on_close")
        if errors:
            raise errors[0]

    def _choose_seed(self, saved: int | None) -> None:
        """The stored seed of a resumed run, the given one, or one drawn now."""
        if saved is not None:
            self.state.seed = saved
        elif self.args.seed >= 0:
            self.state.seed = self.args.seed
        elif self.state.seed is None:
            self.state.seed = self._ranks().share(draw_seed())
            logger.info("seed %d was drawn (seed=-1); checkpoints keep it", self.state.seed)
        seed_all(self.state.seed)

    def _seed_rank(self) -> None:
        """Its own random numbers for each rank, after the model, which all draw alike."""
        if self.env.rank:
            seed_all(derive_seed(self.state.seed or 0, self.env.rank))

    def _parts(
        self, plan: RunPlan, loader: WindowLoader, saver: Saver, on_first_step: Callable[[], None]
    ) -> LoopParts:
        assert self.strategy is not None and self.model is not None
        assert self._objective is not None and self.optimizer is not None
        return LoopParts(
            args=self.args,
            state=self.state,
            bus=self.bus,
            strategy=self.strategy,
            objective=self._objective,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            loader=loader,
            metrics=self.metrics,
            length=plan.length,
            log_trigger=plan.log_trigger,
            eval_trigger=plan.eval_trigger,
            save_trigger=plan.save_trigger,
            steps_per_epoch=plan.steps_per_epoch,
            flops_per_token=flops_per_token(self.model, loader.dataset),
            log=self._log_step,
            evaluate=self.timing.tell("evaluate", self._evaluate_in_training),
            save=self.timing.tell("save", saver.save),
            save_at_start=saver.hold,
            saves=saver.background,
            deliver_save=self.timing.tell("save", saver.deliver),
            rollback=self.timing.tell("rollback", saver.rollback),
            on_first_step=on_first_step,
            rescue=saver.rescue,
            cancel=self.cancel,
            bookkeeping=self.bookkeeping,
            timing=self.timing,
            commands=self.commands,
            channel=self._channel,
            checkpointed=saver.checkpointer is not None,
            relieve=CachedMemory(self.strategy.device, self.args.gc_threshold).relieve,
        )

    def _finish(self, loop: TrainingLoop, saver: Saver, start: RunStart) -> TrainOutput:
        if self.args.load_best_model_at_end and not loop.aborted and not loop.cut_short:
            saver.load_best()
        if self.bus.stopped_by is not None:
            logger.info("stopped by %s in %s (%s)", *self.bus.stopped_by)
        loss, samples = loop.delivery.mean_loss, loop.stepper.num_samples
        batch_size = self.bus.kwargs["train_dataloader"].deal.window_samples
        summary = start.summary(self.state, loss=loss, num_samples=samples, batch_size=batch_size)
        if loop.stepped:  # a complete run that is only started again has its own summary
            self.log(dict(summary))
        loop.parts.strategy.agree(0)  # none goes before all have come: the rest is each rank's own
        return TrainOutput(self.state.global_step, loss, summary, loop.interrupted_by)
