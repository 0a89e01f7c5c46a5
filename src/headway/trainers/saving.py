"""What a trainer puts into a checkpoint and takes out of it.

Owns the list of components, resume, rollback and the best model. The bytes, the commit and the
retention rule are the checkpoint room's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.callbacks.save.checkpointer import find_checkpointer
from headway.checkpoint import (
    CheckpointContents,
    CheckpointError,
    CheckpointManager,
    LoadedCheckpoint,
    RNGState,
    SharingPattern,
    StateComponent,
    next_checkpoint_path,
)
from headway.checkpoint.background import BackgroundSaver
from headway.checkpoint.nodes import require_apart
from headway.checkpoint.replaced import set_aside
from headway.checkpoint.staged import PendingSave
from headway.checkpoint.storage import join_location, split_location
from headway.config.rules_values import LOADABLE
from headway.data.loader import WindowLoader
from headway.engine.best import require_metric
from headway.engine.metrics import (
    LOAD_DURATION,
    SAVE_ASYNC_DURATION,
    SAVE_DURATION,
    SAVE_WAIT,
)
from headway.engine.rollback import RollbackRequest
from headway.models.hf import generation_config_of, hf_config_of
from headway.optim.build import follow_scheduler
from headway.optim.schedule_state import ScheduleState
from headway.optim.scheduler import CurveLR
from headway.trainers.best_model import load_best, rank_anew
from headway.trainers.callback_tensors import part_of, tensor_components
from headway.trainers.fingerprints import take_fingerprints
from headway.trainers.folder_lock import FolderLock
from headway.trainers.outside_weights import check_source, take_weights
from headway.trainers.preflight import check_output_dir
from headway.trainers.resume import (
    Found,
    SavedCounters,
    check_progress,
    find_checkpoint,
    kept_components,
    read_counters,
    require_parts,
    wanted_components,
)
from headway.trainers.resumption import resume_run
from headway.trainers.rollback import roll_back
from headway.trainers.run_files import collect_run_files

if TYPE_CHECKING:
    from headway.trainers.trainer import Trainer

logger = logging.getLogger(__name__)

# Shorter ones are in the metric alone.
_LONG_WAIT_S = 1.0


class Saver:
    """Saves and restores one trainer in its output directory."""

    def __init__(self, trainer: Trainer, run_config: dict[str, Any]) -> None:
        args = trainer.args
        self._trainer = trainer
        self._run_config = run_config
        self._loader: WindowLoader | None = None
        self._fingerprints: dict[str, Any] = {}
        self._replaces = self._falls_back = False
        self.last_step: int | None = None
        """The step of the newest save begun, or of the checkpoint loaded."""
        self._held: PendingSave | None = None
        self._told_of_waits = False
        self._kept = kept_components(args)
        if "model" not in self._kept:
            check_source(trainer)
        self._metric_option = (
            "best_model_metric" if args.preserve_best_model else "metric_for_best_model"
        )
        self._metric_name: str = getattr(args, self._metric_option)
        greater = (
            args.best_model_greater_is_better
            if args.preserve_best_model
            else args.greater_is_better
        )
        num_best = args.preserve_n_best if args.preserve_best_model else 0
        if args.load_best_model_at_end:
            num_best = max(1, num_best)
        self.checkpointer = find_checkpointer(trainer.callbacks)
        """The callback that decides about saves in place of the arguments, if there is one."""
        retention: dict[str, Any] = {"limit": args.save_total_limit}
        self._asynchronous = args.save_async
        if self.checkpointer is not None:
            retention = self.checkpointer.retention
            if self.checkpointer.save_async is not None:
                self._asynchronous = self.checkpointer.save_async
        self.manager = CheckpointManager(
            args.checkpoint_place,
            retention=retention,
            preserve_n_best=num_best,
            greater_is_better=bool(greater),
            metric_name=self._metric_name,
            keep_every_n_steps=args.keep_every_n_steps,
            topology={"strategy": args.strategy_name},
            ranks=trainer._ranks(),
        )
        self.background = BackgroundSaver(self.manager, asynchronous=self._asynchronous)
        self._folder_lock = FolderLock(args.output_dir)
        self.saved = SavedCounters()
        """Of the checkpoint that was found, unless they are left behind."""
        self.last_read: Path | None = None
        """The checkpoint that was loaded, or was to be; at an address, its files on this disk."""
        self.best_refused: CheckpointError | None = None
        """Why the best model was not loaded: for `train()` to raise when all else has ended."""

    def find(self, resume: bool | str) -> Found | None:
        """The checkpoint to resume from, if any."""
        check_output_dir(self._trainer.args.output_dir)
        ranks = self._trainer._ranks()
        with ranks.together("looking at the output folder"):
            if ranks.leads:
                self._folder_lock.check()
        if ranks.each_node:
            require_apart(ranks, self.manager.output_dir)
            resume = ranks.share(resume)  # after a restart each rank asks its own disk
        found = find_checkpoint(self.manager, self._trainer.args, resume)
        self._replaces = resume is False
        self._falls_back = resume is True
        if found is None:
            self._trainer._start_over()
        else:
            logger.info("resuming from %s", found.told)
        if found is not None and "trainer" in wanted_components(self._trainer.args):
            self.saved = read_counters(found.path)
        return found

    def close(self) -> None:
        """Let the folder go, and the thread that makes memory ready."""
        self.manager.stager.close()
        self._folder_lock.release()

    def take_folder(self) -> None:
        """Make the output folder this run's own.

        In one that starts afresh in a used folder, what lies there is not of this run.
        """
        if self._trainer._ranks().leads:
            self._folder_lock.take()
        if not self._replaces:
            return
        self._replaces = False
        if not self._trainer._ranks().leads:  # the others meet it before any of them saves
            return
        folder = set_aside(self.manager.output_dir)
        if folder is not None:
            logger.warning("the checkpoints of an earlier run are now in %s", folder)

    def attach(self, loader: WindowLoader) -> None:
        """Tell the saver whose position to keep."""
        trainer = self._trainer
        assert trainer.strategy is not None
        self._loader = loader
        self._fingerprints = take_fingerprints(
            trainer.strategy.unwrap(), loader, trainer.processing_class, trainer._ranks()
        )

    def prepare(self, *, expects_saves: bool) -> None:
        """Let optimizer steps wait for a copy under way, and see to it that saves will have room.

        A save may come that nobody expected: a signal, a command or a callback asks for it. The
        memory itself is brought in after the first step (`stager.make_ready`): that takes
        seconds, for which nobody has to wait.
        """
        strategy = self._trainer.strategy
        assert strategy is not None
        if strategy.device.type == "cuda":
            strategy.before_apply = self.manager.wait_before_update
        if expects_saves:
            self.manager.reserve(self._contents(), ready=False)

    def _contents(self) -> CheckpointContents:
        trainer = self._trainer
        assert trainer.strategy is not None and self._loader is not None
        # Ranks that read streams of their own are each at a place of their own.
        own = self._loader.is_sharded
        dataset_sharing = SharingPattern.PER_RANK if own else SharingPattern.GLOBAL
        components = [
            StateComponent("dataset", self._loader, dataset_sharing),
            StateComponent("callbacks", trainer.bus, SharingPattern.GLOBAL),
            StateComponent(
                "rng",
                RNGState(),
                SharingPattern.PER_RANK,
                metadata={"on_missing_rank": "fresh"},
            ),
        ]
        if trainer.lr_scheduler is not None:
            schedule = ScheduleState(trainer.lr_scheduler)
            components.insert(0, StateComponent("scheduler", schedule, SharingPattern.GLOBAL))
        kept = self._kept
        components = [component for component in components if component.key in kept]
        if "trainer" in kept:  # what a strategy adds counts as the trainer's own
            components += trainer.strategy.state_components()
            if trainer.strategy.loss_scale is not None:
                # Not required: a run that goes on from one without it finds its own scale.
                components.append(
                    StateComponent(
                        "scaler",
                        trainer.strategy.loss_scale,
                        SharingPattern.GLOBAL,
                        required=False,
                    )
                )
        model = trainer.strategy.unwrap()
        if "callbacks" in kept:
            components += tensor_components(trainer.bus, model)
        tokenizer_saver = getattr(trainer.processing_class, "save_pretrained", None)
        progress = {
            **trainer.state.to_dict(),
            "fingerprints": self._fingerprints,
            "samples_per_step": self._loader.deal.window_samples,
        }
        return CheckpointContents(
            model=model,
            optimizer=trainer.optimizer if "optimizer" in kept else None,
            components=components,
            trainer_state=progress if "trainer" in kept else {},
            model_config=hf_config_of(model),
            generation_config=generation_config_of(model),
            # The tokenizer is there for the model folder that the checkpoint is.
            save_tokenizer=(
                tokenizer_saver if callable(tokenizer_saver) and "model" in kept else None
            ),
            run_config=self._run_config,
            stores_model="model" in kept,
        )

    def _contents_to_save(self) -> CheckpointContents:
        strategy = self._trainer.strategy
        assert strategy is not None
        if strategy.before_save is not None:
            strategy.before_save()
        contents = self._contents()
        trainer = self._trainer
        if trainer._ranks().is_main:
            disabled = trainer.bus.disabled
            asked = {n: one for n, one in trainer.bus.callbacks.items() if n not in disabled}
            contents.run_files = collect_run_files(asked, trainer.args, trainer.state)
        return contents

    def save(self, metrics: dict[str, float] | None, lifetime: str = "regular") -> None:
        """Copy the state of the current step and begin to write it.

        `on_save` fires once it is committed: at a later step boundary, or now if saves are
        synchronous.
        """
        self.write_held()
        self._await_earlier()
        if self._trainer._ranks().leads:
            self._folder_lock.renew()
        started_s = time.monotonic()
        self.background.start(self._stage(metrics, lifetime))
        self._record_duration(
            SAVE_DURATION, time.monotonic() - started_s, self._trainer.state.global_step
        )
        if not self._asynchronous:
            self.deliver()

    def hold(self, lifetime: str = "regular") -> None:
        """Copy the state before the first step, to be written by `write_held`.

        A run that cannot start changes nothing on disk.
        """
        self._held = self._stage(None, lifetime)

    def write_held(self) -> None:
        """Begin to write what is held, if anything."""
        held, self._held = self._held, None
        if held is not None:
            self.background.start(held)
            if not self._asynchronous:
                self.deliver()

    def _await_earlier(self) -> None:
        """The save before this one must be through; training stands still until it is."""
        slow, started_s = self.background.under_way, time.monotonic()
        self.deliver()
        waited_s, step = time.monotonic() - started_s, self._trainer.state.global_step
        self._record_duration(SAVE_WAIT, waited_s if slow is not None else 0.0, step)
        if waited_s >= _LONG_WAIT_S and self._trainer.env.rank == 0 and not self._told_of_waits:
            self._told_of_waits = True
            logger.warning(
                "the checkpoint of step %d was still being written when that of step %d was due; "
                "training waited %.1f s (%s): save less often, or to a faster disk",
                slow,
                step,
                waited_s,
                SAVE_WAIT,
            )

    def _stage(self, metrics: dict[str, float] | None, lifetime: str) -> PendingSave:
        trainer, state = self._trainer, self._trainer.state
        metric = None
        if metrics is not None:
            metric = require_metric(metrics, self._metric_name, self._metric_option)
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = join_location(
                trainer.args.checkpoint_place, f"checkpoint-{state.global_step}"
            )
        self.last_step = state.global_step
        return self.manager.stage(
            self._contents_to_save(),
            state.global_step,
            metrics=metrics,
            metric=metric,
            permanent=lifetime == "permanent",
            ephemeral=lifetime == "ephemeral",
        )

    def save_now(self, path: str | None, checkpoint_id: str | int | None) -> str:
        """Save the current state, to a path or under an id, and wait for the commit."""
        trainer, step = self._trainer, self._trainer.state.global_step
        place = trainer.args.checkpoint_place
        named = next_checkpoint_path(place, step if checkpoint_id is None else checkpoint_id)
        folder, name = split_location(named if path is None else path)
        is_own = folder == split_location(next_checkpoint_path(place, step))[0]
        if is_own and name == f"checkpoint-{step}":
            self.save(None)
            self.deliver()
            return self.manager.storage.locate(self.manager.output_dir / name)
        self.write_held()
        self.deliver()
        manager = self.manager
        if not is_own:
            manager = CheckpointManager(
                folder,
                save_total_limit=None,
                topology={"strategy": trainer.args.strategy_name},
                ranks=trainer._ranks(),
            )
        saved = manager.save(self._contents_to_save(), step, name=name, permanent=True)
        target = manager.storage.locate(saved)
        trainer.bus.fire("on_save", checkpoint_path=target, step=step)
        return target

    def components(self) -> list[StateComponent]:
        """What a checkpoint holds besides model and optimizer."""
        return self._contents().components if self._loader is not None else []

    def deliver(self) -> None:
        """Wait for the save under way, if any, and announce it; what it failed with is raised."""
        saved = self.background.collect()
        if saved is not None:
            if self._asynchronous:
                self._record_duration(SAVE_ASYNC_DURATION, saved.duration_s, saved.step)
            where = self._locate(saved.path)
            self._trainer.bus.fire("on_save", checkpoint_path=where, step=saved.step)

    def _locate(self, path: Path) -> str:
        """A checkpoint's path, or its address, where it was only read or written here."""
        return self.manager.storage.locate(path)

    def finish(self) -> None:
        """At the end of a run: its last save, and one model on all ranks."""
        strategy = self._trainer.strategy
        if strategy is not None and strategy.before_save is not None:
            strategy.before_save()  # ranks may have grown apart since
        self.deliver()

    def _record_duration(self, name: str, seconds: float, step: int) -> None:
        """Under the step that was saved or loaded; of all ranks the slowest counts."""
        self._trainer.record_metric(name, seconds, "max", None, "latest", step=step)

    def settle(self) -> None:
        """After an error: let the save under way end; its own failure is only logged."""
        try:
            saved = self.background.collect()
        except Exception as error:
            logger.error("the last save failed: %s", error)
            return
        if saved is not None:
            where = self._locate(saved.path)
            self._trainer.bus.fire_to_all("on_save", checkpoint_path=where, step=saved.step)

    def rescue(self, reason: str) -> None:
        """Save the current step after an error, if it is sound and not saved yet."""
        trainer, step = self._trainer, self._trainer.state.global_step
        assert trainer.strategy is not None
        self.settle()
        saved = any(c.step == step and c.kind == "training" for c in self.manager.list())
        broken = [
            name
            for name, value in trainer.strategy.unwrap().named_parameters()
            if not bool(value.isfinite().all())
        ]
        # Ranks may hold other parameters, and a save takes all ranks or none.
        found = trainer.strategy.agree(saved | bool(broken) << 1)
        if found & 1:
            logger.info("%s: step %d is saved already", reason, step)
            return
        if found:
            name = broken[0] if broken else "a parameter of another rank"
            logger.error("%s: not saved, %s is not finite", reason, name)
            return
        self.save(None)
        self.deliver()
        if trainer.state.is_world_process_zero:
            logger.warning("%s: the last completed step, %d, is saved", reason, step)

    def load(
        self,
        path: Path,
        wanted: set[str] | None = None,
        *,
        change: Callable[[LoadedCheckpoint], None] | None = None,
    ) -> LoadedCheckpoint:
        """Take what the run's checkpoints hold, or only the wanted parts of it.

        `change` makes of it what is to be otherwise, before callbacks hear of it.
        """
        started_s = time.monotonic()
        trainer = self._trainer
        assert trainer.strategy is not None
        self.last_read = path
        self.manager.storage.fetch(path)
        wanted = self._kept if wanted is None else wanted
        contents = self._contents()
        required = {"model", "optimizer", *(c.key for c in contents.components if c.required)}
        storage, ranks = self.manager.storage, trainer._ranks()
        with storage.telling(), ranks.together("looking for the parts of the checkpoint"):
            require_parts(path, wanted & {*required, "trainer"})
        # What a strategy adds counts as the trainer's own.
        others = [c for c in contents.components if c.key not in LOADABLE]
        own = {c.key for c in others if part_of(c) in wanted}
        keys = {"model", "optimizer", *(c.key for c in contents.components)} & (wanted | own)
        if "model" not in self._kept:
            take_weights(trainer, str(path))
        loaded = self.manager.load(contents, path, components=keys)
        if "trainer" in wanted:
            with storage.telling():
                check_progress(loaded.trainer_state, loaded.path)
            trainer.state.restore(loaded.trainer_state)
        if len({"optimizer", "scheduler"} & keys) == 1:
            follow_scheduler(trainer.optimizer, trainer.lr_scheduler)
        if isinstance(trainer.lr_scheduler, CurveLR):
            trainer.lr_scheduler.mark()
        self.last_step = trainer.state.global_step
        seconds = time.monotonic() - started_s
        self._record_duration(LOAD_DURATION, seconds, trainer.state.global_step)
        if change is not None:
            change(loaded)
        trainer.bus.fire("on_load", path=self._locate(loaded.path))
        return loaded

    def resume(self, found: Found) -> None:
        """Go on from a checkpoint, and report what is not as it was."""
        assert self._loader is not None
        report = resume_run(
            self._trainer,
            found,
            self.load,
            self.manager if self._falls_back else None,
            config=self._run_config,
            fingerprints=self._fingerprints,
            loader=self._loader,
        )
        rank_anew(self._trainer, self.manager, self._metric_name, report)

    def rollback(self, request: RollbackRequest) -> None:
        """Return to an earlier checkpoint of this run."""
        assert self._loader is not None
        left_out = sorted({*LOADABLE} - self._kept)
        if left_out:
            raise RuntimeError(
                f"a rollback was asked for, but the run's checkpoints do not hold "
                f"{', '.join(left_out)} (checkpoint_components)"
            )
        self.deliver()
        roll_back(self._trainer, self, self._loader, request)

    def load_best(self) -> None:
        """Weights of the best checkpoint that is whole; counters and optimizer stay."""
        self.deliver()
        self.best_refused = load_best(self._trainer, self.manager, self._metric_name)
