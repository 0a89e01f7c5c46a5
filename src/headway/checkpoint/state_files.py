"""The full training state as files in one directory of any name, in the layout of every checkpoint.

Owns: encoding contents to JSON and tensors (copied, if they may change meanwhile) and writing that
through a `Draft`. Does not own: a run's own saves (manager.py, writer.py), reading (reader.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint.component import StateComponent, file_stem
from headway.checkpoint.contents import (
    MODEL_EXTRA_STEM,
    OPTIMIZER_STATE_NAME,
    TRAINER_STATE_NAME,
    CheckpointContents,
)
from headway.checkpoint.draft import Draft
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.manifest import MANIFEST_NAME, read_manifest
from headway.checkpoint.meta import find_weights, weight_files
from headway.checkpoint.model import collect_model
from headway.checkpoint.optimizer import split_optimizer
from headway.checkpoint.pins import PIN_NAME
from headway.checkpoint.storage import list_files
from headway.checkpoint.tree import split_tree
from headway.errors import ConfigError

Tree = tuple[Any, dict[str, torch.Tensor]]


@dataclass
class EncodedState:
    """One state, ready to be written; nothing in it belongs to a live object if it was copied."""

    weights: dict[str, torch.Tensor]
    aliases: dict[str, str]
    extra: Tree | None
    optimizer: Tree | None
    components: list[tuple[StateComponent, Tree]]
    trainer_state: Any
    model_config: dict[str, Any] | None = None
    generation_config: dict[str, Any] | None = None
    run_config: dict[str, Any] | None = None
    save_tokenizer: Callable[[str], Any] | None = None


def _to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}


def encode_state(contents: CheckpointContents, *, copy: bool) -> EncodedState:
    """Encode everything; with `copy` every tensor, however deep, is copied to host memory."""
    assert contents.stores_model, "only a run of a trainer takes weights from elsewhere"
    contents.check_keys()
    own = _to_host if copy else dict

    def encode(state: Any, what: str) -> Tree:
        encoded, tensors = split_tree(state, what=what)
        return encoded, own(tensors)

    model = collect_model(contents.model)
    optimizer: Tree | None = None
    if contents.optimizer is not None:
        encoded, tensors = split_optimizer(contents.optimizer, model.names_by_id())
        optimizer = encoded, own(tensors)
    trainer_state, tensors = split_tree(contents.trainer_state, what="trainer state")
    if tensors:
        raise ConfigError(f"trainer state: {', '.join(tensors)} is a tensor; numbers are needed")
    return EncodedState(
        weights=own(model.stored),
        aliases=model.aliases,
        extra=encode(model.extra, "extra state of the model") if model.extra else None,
        optimizer=optimizer,
        components=[
            (c, encode(c.stateful.state_dict(), f"state of {c.key!r}")) for c in contents.components
        ],
        trainer_state=trainer_state,
        model_config=contents.model_config,
        generation_config=contents.generation_config,
        save_tokenizer=contents.save_tokenizer,
        run_config=contents.run_config,
    )


def write_state(draft: Draft, state: EncodedState) -> None:
    """Write all files and list the components."""
    if state.save_tokenizer is not None:
        state.save_tokenizer(str(draft.directory))
        for name in list_files(draft.directory):
            draft.adopt(name)
    files = draft.write_shards("model", state.weights, aliases=state.aliases)
    if state.extra is not None:
        files += draft.write_tree(MODEL_EXTRA_STEM, *state.extra)
    configs = {
        "config.json": state.model_config,
        "generation_config.json": state.generation_config,
    }
    for name, config in configs.items():
        if config is not None:
            draft.write_bytes(name, _plain(config))
            files.append(name)
    draft.add_component("model", files)
    if state.optimizer is not None:
        encoded, tensors = state.optimizer
        files = draft.write_shards("optimizer", tensors)
        draft.write_json(OPTIMIZER_STATE_NAME, encoded)
        draft.add_component("optimizer", [*files, OPTIMIZER_STATE_NAME])
    for component, tree in state.components:
        draft.add_component(
            component.key,
            draft.write_tree(file_stem(component), *tree),
            pattern=component.sharing_pattern.value,
            metadata=component.metadata,
        )
    draft.write_json(TRAINER_STATE_NAME, state.trainer_state)
    if state.run_config is not None:
        draft.write_bytes("run/config.json", _plain(state.run_config))


def _plain(config: Mapping[str, Any]) -> bytes:
    return json.dumps(config, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"


def save_state(state: EncodedState, directory: str | Path, step: int, **fields: Any) -> str:
    """Write and commit a training checkpoint; returns where it is.

    An earlier one of that name makes room for it.
    """
    with Draft(directory) as draft:
        kept = files_to_keep(draft.target, kind="training")
        write_state(draft, state)
        for name in kept:
            if name not in draft.files:
                draft.take(draft.target / name, name)
        manifest = draft.describe(kind="training", step=step, **fields)
        return draft.storage.locate(draft.commit(manifest, replace=True))


def files_to_keep(target: Path, *, kind: str) -> list[str]:
    """What must survive when `target` is replaced; refuses a directory that must not be.

    A checkpoint of the same kind may be replaced: files that belong to none of its components are
    kept.
    So may a folder of plain files without weights, all of them kept.
    """
    if not os.path.lexists(target):
        return []
    if target.is_symlink() or not target.is_dir():
        raise ConfigError(f"{target} is not a directory; a checkpoint needs a new name or its own")
    if os.path.lexists(target / MANIFEST_NAME):
        manifest = read_manifest(target)
        if manifest.kind != kind:
            raise ConfigError(
                f"{target} is a checkpoint of kind {manifest.kind!r}, which one of kind {kind!r} "
                "does not replace; choose another directory"
            )
        # The pin is on what was there, not on what takes its name.
        own = {MANIFEST_NAME, TRAINER_STATE_NAME, "eval_metrics.json", "run/config.json", PIN_NAME}
        own.update(name for entry in manifest.components for name in entry["files"])
        return [name for name in list_files(target) if name not in own]
    weights = find_weights(target)
    if weights is not None:
        raise ConfigError(
            f"{target} already holds {weight_files(target, weights)[0]}, which was not committed "
            "by Headway; choose another directory"
        )
    folders = [
        entry.name for entry in os.scandir(target) if not entry.is_file(follow_symlinks=False)
    ]
    if folders:
        raise ConfigError(
            f"{target} is no checkpoint and holds more than plain files ({sorted(folders)[0]}); "
            "choose a new directory inside it"
        )
    return list_files(target)


def require_state(directory: Path) -> None:
    """Refuse a directory without a manifest, with a word on what it may be instead."""
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} does not exist or is not a directory")
    if os.path.lexists(directory / MANIFEST_NAME):
        return
    if any((directory / name).exists() for name in ("model.pt", "optimizer.pt")):
        raise CheckpointError(
            f"{directory} holds pickled states (model.pt, optimizer.pt) and no manifest; turn it "
            "into a checkpoint with: headway checkpoint convert --allow-legacy"
        )
    raise CheckpointError(f"{directory} is not a committed checkpoint: it has no {MANIFEST_NAME}")
