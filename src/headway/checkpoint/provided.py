"""Checkpoints of whatever a `StatefulProvider` lists, in one run directory.

Owns: `ProviderCheckpoints`, the `CheckpointInterface` for a training loop that is not Headway's.
Does not own: the save and the load (manager.py), what trainers of Headway save (trainers).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from headway.checkpoint.contents import CheckpointContents
from headway.checkpoint.discovery import next_checkpoint_path
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.manager import CheckpointManager
from headway.checkpoint.manifest import read_manifest
from headway.checkpoint.protocols import StatefulProvider
from headway.checkpoint.rewrite import rewrite
from headway.checkpoint.state_files import encode_state, save_state
from headway.errors import ConfigError
from headway.models.hf import generation_config_of, hf_config_of, save_pretrained


class ProviderCheckpoints:
    """Saves and loads a provider's components through a manager.

    Of the components, `model` (required) and `optimizer` are stored by the names of their tensors.
    `progress` gives what goes to `trainer_state.json`; its `global_step` is the step of a save that
    is given no id. `loaded` gets that content back.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        provider: StatefulProvider,
        *,
        progress: Callable[[], dict[str, Any]] = dict,
        loaded: Callable[[dict[str, Any]], None] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._manager = manager
        self._provider = provider
        self._progress = progress
        self._loaded = loaded
        self._tokenizer = tokenizer
        self._best: str | None = None

    def _contents(self) -> CheckpointContents:
        components = self._provider.get_state_components()
        own = {c.key: c.stateful for c in components if c.key in ("model", "optimizer")}
        model: Any = own.get("model")
        if not isinstance(model, nn.Module):
            raise ConfigError("get_state_components() lists no component 'model' with a Module")
        save_tokenizer = getattr(self._tokenizer, "save_pretrained", None)
        optimizer: Any = own.get("optimizer")
        return CheckpointContents(
            model=model,
            optimizer=optimizer,
            components=[c for c in components if c.key not in own],
            trainer_state=self._progress(),
            model_config=hf_config_of(model),
            generation_config=generation_config_of(model),
            save_tokenizer=save_tokenizer if callable(save_tokenizer) else None,
        )

    def save_checkpoint(
        self, checkpoint_path: str | None = None, checkpoint_id: str | int | None = None
    ) -> str:
        """Save everything; returns the directory once it is committed.

        Without a path it is `checkpoint-<id>` of the run directory, the id being a step. What goes
        to a path of its own is not subject to retention.
        """
        contents = self._contents()
        step = contents.trainer_state.get("global_step") if checkpoint_id is None else checkpoint_id
        if step is None:
            raise ConfigError(
                "save_checkpoint() needs checkpoint_id, or a progress with a global_step"
            )
        next_checkpoint_path(self._manager.output_dir, step)  # refuses what is no number
        if checkpoint_path is None:
            return str(self._manager.save(contents, int(step)))
        encoded = encode_state(contents, copy=False)
        return save_state(encoded, checkpoint_path, int(step), metadata={"permanent": True})

    def load_checkpoint(self, checkpoint_path: str | None = None) -> None:
        """Load everything from a checkpoint, by default from the newest good one."""
        path = self.resolve_checkpoint_path(checkpoint_path)
        if path is None:
            where = checkpoint_path or self._manager.output_dir
            raise CheckpointError(f"{where} is, or holds, no checkpoint that can be loaded")
        found = self._manager.load(self._contents(), path)
        if self._loaded is not None:
            self._loaded(found.trainer_state)

    def save_model(self, output_dir: str | None = None, overwrite_output_dir: bool = False) -> None:
        """Write the model as a Hugging Face folder, with config and tokenizer."""
        target = Path(output_dir or self._manager.output_dir)
        if not overwrite_output_dir and any(target.glob("model*.safetensors")):
            raise ConfigError(
                f"save_model: {target} already holds weights; choose another folder or pass "
                "overwrite_output_dir=True"
            )
        save_pretrained(self._contents().model, target, tokenizer=self._tokenizer)

    def resolve_checkpoint_path(self, checkpoint_path: str | None) -> str | None:
        """The checkpoint that is meant, the newest good one without a path; None if there is none.

        A path to something that is no checkpoint, or a damaged one, gives None as well.
        """
        try:
            found = self._manager.resolve(True if checkpoint_path is None else checkpoint_path)
        except (CheckpointError, ConfigError):
            return None
        return None if found is None else str(found)

    def set_best_checkpoint(self, best_checkpoint: str) -> None:
        """Say which checkpoint is the best; it is kept for as long as this object's manager is."""
        read_manifest(best_checkpoint)
        if self._best is not None:
            self._manager.pinned.discard(self._best)
        self._best = Path(best_checkpoint).name
        self._manager.pinned.add(self._best)

    def update_best_checkpoints(self, checkpoint_path: str, metric: float) -> bool:
        """Rank a checkpoint by a metric; whether it is now among the best that are kept."""
        rewrite(checkpoint_path, {}, fields={"metric": float(metric)})
        return Path(checkpoint_path).absolute() in [path for path, _ in self._manager.ranking()]

    def get_best_checkpoints_summary(self) -> str:
        """The best checkpoints, best first, in one line."""
        ranked = self._manager.ranking()
        return ", ".join(f"{path.name} ({metric:g})" for path, metric in ranked) or "none"
