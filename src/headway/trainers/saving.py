"""What a trainer puts into a checkpoint and takes out of it.

Owns the list of components, resume, rollback and the best model. The bytes, the commit and the
retention rule are the checkpoint room's.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint import (
    CheckpointContents,
    CheckpointManager,
    RNGState,
    SharingPattern,
    StateComponent,
)
from headway.data.loader import WindowLoader
from headway.engine.best import require_metric
from headway.errors import ConfigError
from headway.models.hf import hf_config_of

if TYPE_CHECKING:
    from headway.trainers.trainer import Trainer

logger = logging.getLogger(__name__)


class Saver:
    """Saves and restores one trainer in its output directory."""

    def __init__(self, trainer: Trainer, run_config: dict[str, Any]) -> None:
        args = trainer.args
        self._trainer = trainer
        self._run_config = run_config
        self._loader: WindowLoader | None = None
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
        self.manager = CheckpointManager(
            args.output_dir,
            save_total_limit=args.save_total_limit,
            preserve_n_best=num_best,
            greater_is_better=bool(greater),
            keep_every_n_steps=args.keep_every_n_steps,
            topology={"world_size": trainer.env.world_size, "strategy": "single"},
        )

    def find(self, resume: bool | str) -> Path | None:
        """The checkpoint to resume from, if any."""
        self.manager.clean_leftovers()
        if resume is False and self.manager.list() and not self._trainer.args.overwrite_output_dir:
            newest = self.manager.list()[-1].path
            raise ConfigError(
                f"resume_from_checkpoint=False, but output_dir already holds {newest}; choose "
                f"another output_dir, or set overwrite_output_dir=True to let this run replace it"
            )
        path = self.manager.resolve(resume)
        if path is not None:
            logger.info("resuming from %s", path)
        return path

    def saved_seed(self, path: Path | None) -> int | None:
        """The seed of the run that wrote a checkpoint."""
        if path is None:
            return None
        state = json.loads((path / "trainer_state.json").read_text())
        seed = state.get("seed")
        if seed is not None and self._trainer.args.seed not in (-1, seed):
            logger.warning(
                "seed=%d is given, but the checkpoint was made with %d, which wins",
                self._trainer.args.seed,
                seed,
            )
        return seed if isinstance(seed, int) else None

    def attach(self, loader: WindowLoader) -> None:
        """Tell the saver whose position to keep."""
        self._loader = loader

    def _contents(self) -> CheckpointContents:
        trainer = self._trainer
        assert trainer.strategy is not None and self._loader is not None
        components = [
            StateComponent("dataset", self._loader, SharingPattern.GLOBAL),
            StateComponent("callbacks", trainer.bus, SharingPattern.GLOBAL),
            StateComponent("rng", RNGState(), SharingPattern.PER_RANK),
            *trainer.strategy.state_components(),
        ]
        if trainer.lr_scheduler is not None:
            components.insert(
                0, StateComponent("scheduler", trainer.lr_scheduler, SharingPattern.GLOBAL)
            )
        model = trainer.strategy.unwrap()
        tokenizer_saver = getattr(trainer.processing_class, "save_pretrained", None)
        return CheckpointContents(
            model=model,
            optimizer=trainer.optimizer,
            components=components,
            trainer_state=trainer.state.to_dict(),
            model_config=hf_config_of(model),
            generation_config=None,
            save_tokenizer=tokenizer_saver if callable(tokenizer_saver) else None,
            run_config=self._run_config,
        )

    def save(self, metrics: dict[str, float] | None) -> None:
        """Write a checkpoint of the current step."""
        trainer, state = self._trainer, self._trainer.state
        metric = None
        if metrics is not None:
            metric = require_metric(metrics, self._metric_name, self._metric_option)
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(
                Path(trainer.args.output_dir) / f"checkpoint-{state.global_step}"
            )
        path = self.manager.save(
            self._contents(), state.global_step, metrics=metrics, metric=metric
        )
        trainer.bus.fire("on_save", checkpoint_path=str(path), step=state.global_step)

    def load(self, path: Path) -> None:
        """Take everything from a checkpoint."""
        trainer = self._trainer
        loaded = self.manager.load(self._contents(), path)
        trainer.state.restore(loaded.trainer_state)
        trainer.bus.fire("on_load", path=str(loaded.path))

    def rollback(self, skip_data: bool) -> None:
        """Return to the newest checkpoint of this run."""
        assert self._loader is not None
        path = self.manager.resolve(True)
        if path is None:
            raise RuntimeError(
                "a rollback was asked for, but output_dir holds no checkpoint to return to"
            )
        position = self._loader.state_dict()
        step = self._trainer.state.global_step
        self.load(path)
        if skip_data:
            self._loader.load_state_dict(position)
        logger.warning(
            "rolled back from step %d to step %d%s",
            step,
            self._trainer.state.global_step,
            ", keeping the data position" if skip_data else "",
        )

    def load_best(self) -> None:
        """Weights of the best checkpoint; counters and optimizer stay where they are."""
        trainer = self._trainer
        assert trainer.strategy is not None
        best = self.manager.best()
        if best is None:
            logger.warning(
                "load_best_model_at_end: no checkpoint was evaluated; the last one stays"
            )
            return
        logger.info("loading the best model, %s (%s)", best, trainer.state.best_metric)
        self.manager.load_model(trainer.strategy.unwrap(), best)
        trainer.bus.fire("on_load_model_weights", path=str(best))
