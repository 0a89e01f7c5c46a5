"""What a trainer offers to those who save and load it from outside the loop.

Owns: the methods of `CheckpointInterface` and `StatefulProvider`. Does not own: what goes into a
checkpoint (saving), when the loop saves (engine).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint import (
    CheckpointContents,
    CheckpointError,
    CheckpointManager,
    SharingPattern,
    StateComponent,
    read_manifest,
)
from headway.checkpoint.contents import STATE_FOLDER, TRAINER_STATE_NAME
from headway.checkpoint.manifest import MANIFEST_NAME, is_committed
from headway.checkpoint.storage import is_url, list_files, split_location
from headway.errors import ConfigError
from headway.models.hf import (
    generation_config_of,
    hf_config_of,
    remove_stale_weights,
    save_pretrained,
)
from headway.trainers.adapters import Adapters, has_adapters, is_whole
from headway.trainers.best_model import keep_chosen
from headway.trainers.resume import kept_components
from headway.trainers.weights_saving import begin_to_save

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from headway.args import TrainingArguments
    from headway.checkpoint.ranks import Ranks
    from headway.engine.events import EventBus
    from headway.engine.state import TrainerState
    from headway.strategies.base import Strategy
    from headway.trainers.saving import Saver


class Checkpointing:
    """The part of a trainer that saves and loads on request."""

    args: TrainingArguments
    bus: EventBus
    state: TrainerState
    model: nn.Module | None
    optimizer: Optimizer | None
    strategy: Strategy | None
    processing_class: Any
    _saver: Saver | None = None

    def _prepare_model(self) -> None:
        raise NotImplementedError

    def _ranks(self) -> Ranks:
        raise NotImplementedError

    @property
    def last_saved_step(self) -> int | None:
        """The step of the newest save that was begun, or of the checkpoint that was loaded."""
        return None if self._saver is None else self._saver.last_step

    def block_ephemeral_saves(self, name: str) -> None:
        """No ephemeral saves until `name` is unblocked; to be called on all ranks alike."""
        self.bus.ephemeral_blockers.add(name)

    def unblock_ephemeral_saves(self, name: str) -> None:
        """`name` has nothing against ephemeral saves any more; others may."""
        self.bus.ephemeral_blockers.discard(name)

    @property
    def last_read(self) -> Path | None:
        """The files of the checkpoint that the run loaded last, or could not load."""
        return None if self._saver is None else self._saver.last_read

    def save_checkpoint(
        self, checkpoint_path: str | None = None, checkpoint_id: str | int | None = None
    ) -> str:
        """Save the full state and wait until it is committed; returns the directory.

        Without a path it goes to `checkpoint-<id>` where the run's checkpoints are, the id being
        the step unless one is given. A save under another name than the loop's own is not subject
        to retention.
        """
        if self._saver is None:
            raise ConfigError(
                "save_checkpoint() needs a run: call it from a callback, or after train()"
            )
        return self._saver.save_now(checkpoint_path, checkpoint_id)

    def load_checkpoint(self, checkpoint_path: str | None = None) -> None:
        """Load a checkpoint, by default the newest good one of the run's own.

        In a run, or after one, the full state is restored; before, the weights.
        """
        path = self.resolve_checkpoint_path(checkpoint_path)
        if path is None and self._saver is None and checkpoint_path is not None:
            # Weights alone are wanted, and checkpoints that no run resumes from have them too.
            manager = self._manager()  # held: what is at an address has files as long as it lives
            there = manager.storage.path_of(checkpoint_path)
            path = checkpoint_path if is_committed(there) else None
        if path is None:
            where = checkpoint_path or self.args.checkpoint_place
            raise CheckpointError(f"{where} is, or holds, no checkpoint that can be loaded")
        if self._saver is not None:
            self._saver.deliver()
            self._saver.load(self._saver.manager.storage.path_of(path))
            return
        if "model" not in kept_components(self.args):
            raise ConfigError(
                "load_checkpoint() before train() loads weights, and checkpoint_components leaves "
                "out model: they come from outside"
            )
        self._prepare_model()
        assert self.strategy is not None
        self._manager().load_model(self.strategy.unwrap(), path)
        self.bus.fire("on_load_model_weights", path=path)

    def save_model(self, output_dir: str | None = None, overwrite_output_dir: bool = False) -> None:
        """Write the weights, config and tokenizer as a Hugging Face model folder; of a model of
        PEFT its adapters."""
        self._prepare_model()
        assert self.strategy is not None
        if self.strategy.before_save is not None:
            self.strategy.before_save()
        if output_dir is not None and is_url(output_dir):
            raise ConfigError(
                f"save_model: output_dir={output_dir!r} is an address; a model folder is written "
                "to a disk, from where any tool can copy it"
            )
        target = Path(output_dir or self.args.output_dir)
        model, ranks = self.strategy.unwrap(), self._ranks()
        if ranks.world_size > 1 and self._saver is not None:
            self._saver.deliver()  # a save that is being written talks over the same group
        found = None
        with ranks.together("looking at the folder for the model"):
            # By one rank: another might look when the first has begun to write.
            if ranks.leads and not overwrite_output_dir:
                found = _find_model(target)
        taken = next(filter(None, ranks.exchange(found)), None)
        if taken is not None:
            raise ConfigError(
                f"save_model: {target} already holds {taken}; choose another folder or "
                f"pass overwrite_output_dir=True"
            )
        replicated = self.strategy.data_shard().world_size == ranks.world_size
        if ranks.world_size == 1 or (has_adapters(model) and replicated and is_whole(model)):
            with ranks.together("writing the model's files"):
                if ranks.leads:
                    save_pretrained(model, target, tokenizer=self.processing_class)
        else:
            self._export_by_ranks(target)

    def _export_by_ranks(self, target: Path) -> None:
        """Every rank writes what it holds, so that none has to hold the model."""
        assert self.strategy is not None
        model, ranks = self.strategy.unwrap(), self._ranks()
        adapters = Adapters(model, ranks) if has_adapters(model) else None
        tokenizer_saver = getattr(self.processing_class, "save_pretrained", None)
        contents = CheckpointContents(
            model=model,
            model_config=hf_config_of(model),
            generation_config=generation_config_of(model),
            save_tokenizer=tokenizer_saver if callable(tokenizer_saver) else None,
        )
        if adapters is not None:
            contents = adapters.contents()
        manager = CheckpointManager(target, save_total_limit=None, ranks=ranks)
        exported = manager.save(contents, self.state.global_step, kind="export")
        with ranks.together("putting the model's files in place"):
            if ranks.leads:
                if adapters is not None:
                    adapters.save(exported, target, self.processing_class)
                else:
                    _put_in_place(exported, target)
                shutil.rmtree(exported)

    def save_weights(self, suffix: str, *, wait: bool = False) -> str:
        """In a run: begin to write the weights as they are now as `checkpoint-<step>-<suffix>`.

        For weights that are not those in training, such as an average; every rank calls it. The
        directory is a model folder, is kept for good, and no run resumes from it. `on_save` fires
        once it is complete; with `wait`, before this returns.
        """
        assert self._saver is not None, "called in a run"
        return begin_to_save(self, self._saver, suffix, wait=wait)

    def set_best_checkpoint(self, best_checkpoint: str) -> None:
        """Say which checkpoint is the best: it is recorded, and kept for the rest of the run, also
        where that is resumed."""
        manager = self._manager()
        path = manager.storage.path_of(best_checkpoint)
        read_manifest(path)
        if self.state.chosen_checkpoint is not None:
            manager.pinned.discard(split_location(self.state.chosen_checkpoint)[1], "best")
        self.state.best_model_checkpoint = self.state.chosen_checkpoint = str(best_checkpoint)
        keep_chosen(self.state, manager)

    def keep_checkpoint(self, path: str, owner: str = "") -> None:
        """Retention leaves a checkpoint of `output_dir` alone until every `owner` who keeps it has
        released it, or the process ends; to be called on all ranks alike. A name will do for the
        path."""
        self._manager().pinned.add(split_location(path)[1], owner)

    def release_checkpoint(self, path: str, owner: str = "") -> None:
        """`owner` no longer keeps a checkpoint: retention may have it, unless somebody else keeps
        it, such as `set_best_checkpoint`."""
        self._manager().pinned.discard(split_location(path)[1], owner)

    def resolve_checkpoint_path(self, checkpoint_path: str | None) -> str | None:
        """The checkpoint that is meant, the newest good one without a path; None if there is none.

        A path to something that is no checkpoint, or a damaged one, gives None as well.
        """
        # A manager of its own: that of the run does not read again what it has verified.
        manager = CheckpointManager(self.args.checkpoint_place)
        try:
            found = manager.resolve(True if checkpoint_path is None else checkpoint_path)
        except (CheckpointError, ConfigError):
            return None
        if found is None:
            return None
        # What is at an address has files here for as long as this manager lives.
        return manager.storage.locate(found)

    def get_state_components(self) -> list[StateComponent]:
        """Every object whose state a checkpoint holds, and how ranks share it."""
        given = {"model": self.model, "optimizer": self.optimizer}
        own = [
            StateComponent(key, value, SharingPattern.GLOBAL)
            for key, value in given.items()
            if value is not None and key in kept_components(self.args)
        ]
        return [*own, *(self._saver.components() if self._saver is not None else [])]

    def get_process_groups(self) -> dict[str, Any]:
        """The process groups by name that components are shared by: the trainers' own need none."""
        return {}

    def _manager(self) -> CheckpointManager:
        if self._saver is not None:
            return self._saver.manager
        return CheckpointManager(self.args.checkpoint_place, ranks=self._ranks())


def _find_model(folder: Path) -> str | None:
    """The name of weights that are in a folder."""
    existing = sorted(folder.glob("*model*.safetensors")) if folder.is_dir() else []
    return existing[0].name if existing else None


def _put_in_place(exported: Path, target: Path) -> None:
    """Move the files of a model folder out of what ranks wrote, in the place of older ones."""
    own = (MANIFEST_NAME, TRAINER_STATE_NAME, f"{STATE_FOLDER}/")
    names = [name for name in list_files(exported) if not name.startswith(own)]
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (exported / name).replace(target / name)
    remove_stale_weights(target, set(names))
