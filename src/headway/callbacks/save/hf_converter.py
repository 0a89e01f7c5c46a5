"""Checkpoints as Hugging Face model folders, made while and after a run."""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

from headway.callbacks.save.checkpointer import find_checkpointer
from headway.callbacks.save.hf_converter_folder import (
    FolderPlan,
    check_target,
    is_made,
    load_tokenizer,
    make_folder,
)
from headway.callbacks.watch.ranges import require_count, require_flag
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerState
from headway.errors import ConfigError, missing_extra, unknown

logger = logging.getLogger(__name__)

CHOICES = ("last", "permanent", "best")
DTYPES = ("float32", "bfloat16", "float16", "float64")
# After these a run's last checkpoint is its result; a run that is interrupted goes on some day.
_FINAL = ("completed", "stopped")
_LOOK_S = 0.2
_HARD_TIMEOUT_S = 6 * 3600.0
_OPERATION = "conversion to a model folder"


class HFConverterCallback(TrainerCallback):
    """Makes a model folder, in `dtype` (None: as stored), of checkpoints that are complete.

    `checkpoints`: the `last` one when the run has ended, each `permanent` one while training goes
    on, or the `best` one in the end. The folder is `output_folder`, or `<checkpoint>-hf` beside the
    checkpoint; for `permanent`, `output_folder` is where the folders go. Rank 0 reads the
    checkpoint's files, whatever the strategy; what fails there fails on every rank, at the end.

    `validate` compares the logits of the checkpoint's model and of the folder's as transformers
    loads it, on `device`, before the folder gets its name; `debug` logs the differences layer by
    layer. `tokenizer_id` puts another tokenizer in the place of the checkpoint's.
    `max_sequence_length` is written to the tokenizer's and the model's configuration.
    """

    priority = -1

    def __init__(
        self,
        enabled: bool = True,
        output_folder: str | None = None,
        dtype: str | None = "bfloat16",
        validate: bool = False,
        debug: bool = False,
        tokenizer_id: str | None = None,
        max_sequence_length: int | None = None,
        device: str | None = None,
        moe_capacity_factor: float | None = None,
        checkpoints: str = "last",
    ) -> None:
        for option, flag in (("enabled", enabled), ("validate", validate), ("debug", debug)):
            require_flag(f"HFConverterCallback: {option}", flag)
        for option, text in (
            ("output_folder", output_folder),
            ("tokenizer_id", tokenizer_id),
            ("device", device),
        ):
            if text is not None and (not isinstance(text, str) or not text):
                raise ConfigError(f"HFConverterCallback: {option} is {text!r}; allowed: text, None")
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"HFConverterCallback: dtype: {unknown('dtype', dtype, DTYPES)}")
        if checkpoints not in CHOICES:
            raise ConfigError(
                f"HFConverterCallback: checkpoints: {unknown('choice', checkpoints, CHOICES)}"
            )
        require_count(
            "HFConverterCallback: max_sequence_length", max_sequence_length, least=1, optional=True
        )
        if debug and not validate:
            raise ConfigError("HFConverterCallback: debug=True needs validate=True")
        if moe_capacity_factor is not None:
            raise ConfigError(
                f"HFConverterCallback: moe_capacity_factor={moe_capacity_factor!r} has nothing to "
                "act on: no model here drops tokens of its experts; leave it out"
            )
        self.enabled = enabled
        self.output_folder = output_folder
        self.checkpoints = checkpoints
        self.plan = FolderPlan(
            dtype, tokenizer_id, max_sequence_length, validate, debug, device or "cpu"
        )
        self._waiting: deque[Path] = deque()
        self._under_way: Path | None = None
        self._failed: list[str] = []

    def folder_of(self, checkpoint: Path) -> Path:
        """Where the folder of a checkpoint is, or will be."""
        if self.output_folder is None:
            return checkpoint.with_name(f"{checkpoint.name}-hf")
        folder = Path(self.output_folder).absolute()
        return folder / checkpoint.name if self.checkpoints == "permanent" else folder

    # Before the first step

    def on_init_end(self, args: Any, trainer: Any) -> None:
        """Refuse what cannot work, on all ranks, before anything is trained."""
        if not self.enabled:
            return
        with trainer._ranks().together("checking the options of HFConverterCallback"):
            self._check_run(args, trainer)

    def _check_run(self, args: Any, trainer: Any) -> None:
        from headway.models.hf import hf_config_of

        saves = args.save_strategy != "no" or args.save_every is not None
        if not saves and find_checkpointer(trainer.callbacks) is None:
            raise ConfigError(
                "HFConverterCallback: the run saves no checkpoint to convert "
                "(save_strategy='no', and no CheckpointerCallback)"
            )
        if args.checkpoint_address is not None:
            raise ConfigError(
                f"HFConverterCallback: checkpoint_address={args.checkpoint_address!r} is where the "
                "checkpoints are, and their files are not here; use: headway finalize"
            )
        kept = getattr(args, "checkpoint_components", None)
        if kept is not None and "model" not in kept:
            raise ConfigError(
                "HFConverterCallback: checkpoint_components leaves out model, so that checkpoints "
                "hold nothing to convert"
            )
        if hf_config_of(trainer.strategy.unwrap()) is None:
            raise ConfigError(
                f"HFConverterCallback: {type(trainer.strategy.unwrap()).__name__} has no Hugging "
                "Face configuration, so that no model folder can be made of it"
            )
        keeps_best = args.load_best_model_at_end or args.preserve_best_model
        if self.checkpoints == "best" and not keeps_best:
            raise ConfigError(
                "HFConverterCallback: checkpoints='best' needs preserve_best_model=True or "
                "load_best_model_at_end=True, which keep the best checkpoint"
            )
        if self.plan.validate:
            self._require_validation()
        if trainer.env.rank != 0:
            return
        if self.output_folder is not None and self.checkpoints != "permanent":
            check_target(Path(self.output_folder).absolute())
        if self.plan.tokenizer_id is not None:
            load_tokenizer(self.plan.tokenizer_id)

    def _require_validation(self) -> None:
        import importlib.util

        import torch

        if importlib.util.find_spec("transformers") is None:
            raise missing_extra("transformers", "transformers", "HFConverterCallback: validate")
        try:
            torch.empty(0, device=self.plan.device)
        except (RuntimeError, AssertionError, ValueError) as error:
            raise ConfigError(
                f"HFConverterCallback: device={self.plan.device!r} is not here: "
                f"{str(error).splitlines()[0]}"
            ) from error

    # In the run

    def on_train_begin(self, state: TrainerState, args: Any, trainer: Any) -> None:
        """Take up what an earlier run left: permanent checkpoints without their folders."""
        self._waiting.clear()
        self._failed.clear()
        self._under_way = None
        if self._converts_each(state) and state.global_step > 0:
            from headway.checkpoint import list_checkpoints

            for found in list_checkpoints(args.output_dir):
                self._add(found.path, trainer)

    def on_save(self, state: TrainerState, checkpoint_path: str, trainer: Any) -> None:
        """A checkpoint is complete: convert it beside training if each permanent one is wanted."""
        if self._converts_each(state):
            self._add(Path(checkpoint_path), trainer)

    def _converts_each(self, state: TrainerState) -> bool:
        return self.enabled and self.checkpoints == "permanent" and state.is_world_process_zero

    def _add(self, checkpoint: Path, trainer: Any) -> None:
        from headway.checkpoint import CheckpointError, read_manifest

        try:
            manifest = read_manifest(checkpoint)
        except CheckpointError:
            return  # replaced by another timeline, which announces its own
        wanted = manifest.kind == "training" and manifest.metadata.get("permanent")
        if wanted and not is_made(checkpoint, self.folder_of(checkpoint), self.plan):
            self._waiting.append(checkpoint)
            self._begin_next(trainer)

    def _begin_next(self, trainer: Any) -> None:
        """One at a time: each may take the memory of a model."""
        if self._under_way is not None or not self._waiting:
            return
        self._under_way = self._waiting.popleft()
        trainer.run_bookkeeping_op(
            self._convert,
            self._under_way,
            cb=lambda problem: self._note(problem, trainer),
            op_name=_OPERATION,
            soft_timeout=_HARD_TIMEOUT_S,
            hard_timeout=_HARD_TIMEOUT_S,
        )

    def _convert(self, checkpoint: Path) -> str | None:
        """In a thread; returns what went wrong."""
        started_s = time.monotonic()
        try:
            folder = make_folder(
                checkpoint,
                self.folder_of(checkpoint),
                self.plan,
                apart=self.checkpoints == "permanent",
            )
        except Exception as error:
            logger.error("HFConverterCallback: %s was not converted: %s", checkpoint, error)
            logger.debug("HFConverterCallback: where it failed", exc_info=True)
            return f"{checkpoint}: {type(error).__name__}: {error}"
        logger.info("%s is the model of %s", folder, checkpoint.name)
        logger.debug("it took %.1f s", time.monotonic() - started_s)
        return None

    def _note(self, problem: str | None, trainer: Any) -> None:
        self._under_way = None
        if problem is not None:
            self._failed.append(problem)
        self._begin_next(trainer)

    # At the end

    def on_train_end(self, state: TrainerState, trainer: Any) -> None:
        """Convert what is chosen, wait for all conversions, and fail on every rank or on none."""
        if not self.enabled:
            return
        if state.outcome not in _FINAL:
            if self.checkpoints != "permanent" and state.is_world_process_zero:
                logger.info("HFConverterCallback: the run is %s: no folder is made", state.outcome)
            return
        if state.is_world_process_zero and self.checkpoints != "permanent":
            self._add_last(trainer)
        self._wait(trainer, leads=state.is_world_process_zero)

    def _add_last(self, trainer: Any) -> None:
        manager = trainer._manager()
        chosen = manager.best() if self.checkpoints == "best" else manager.find_latest()
        if chosen is None:
            self._failed.append(f"there is no {self.checkpoints} checkpoint to convert")
        elif not is_made(chosen, self.folder_of(chosen), self.plan):
            self._waiting.append(chosen)
            self._begin_next(trainer)

    def _wait(self, trainer: Any, *, leads: bool) -> None:
        """All ranks hear from rank 0 again and again, so that none waits too long for one word."""
        while True:
            if leads:
                trainer.bookkeeping.deliver()
            busy = self._under_way is not None
            busy, failed = trainer._ranks().share([busy, self._failed])
            if not busy:
                break
            if leads:
                time.sleep(_LOOK_S)
        if failed:
            raise RuntimeError("HFConverterCallback: " + "; ".join(failed))
