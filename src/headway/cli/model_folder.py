"""From a path a user gives to a model and its tokenizer.

Owns: which folder inside a run is meant, and the loading of a model whose class only the run's own
configuration knows. Does not own: model folders (models/hf), checkpoints (checkpoint).
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError, not_there

if TYPE_CHECKING:
    from torch import nn

    from headway.config.schema import RunConfig
    from headway.data.tokenizer import Tokenizer


def find_model_folder(given: str) -> Path:
    """The model folder a path means: itself, a run's newest checkpoint, or a run's `model/`."""
    from headway.checkpoint import find_latest_checkpoint
    from headway.checkpoint.discovery import find_whole_checkpoint

    if "://" in given:
        raise ConfigError(
            f"DIR: {given} is an address; fetch the model with: headway finalize {given} FOLDER"
        )
    path = Path(given)
    if not path.exists():
        raise ConfigError(f"DIR: {not_there(given)}")
    if not path.is_dir():
        raise ConfigError(f"DIR: {given} is a file; a model, checkpoint or run folder is needed")
    if (path / "config.json").is_file():
        return path
    has_model = (path / "model" / "config.json").is_file()
    checkpoint = find_latest_checkpoint(path) if has_model else find_whole_checkpoint(path)
    if checkpoint is not None:
        return Path(checkpoint)
    if has_model:
        return path / "model"
    raise ConfigError(
        f"DIR: {given} holds no model: no config.json, no committed checkpoint and no model/ in it"
    )


def load_model(folder: Path) -> nn.Module:
    """The model in a folder, ready to be asked."""
    from headway.models import load_causal_lm

    _check_whole(folder)
    if (folder / "config.json").is_file():
        return load_causal_lm(folder).eval()
    return _load_by_run(folder).eval()


def _check_whole(folder: Path) -> None:
    """Refuse weights that are not those their checkpoint was committed with."""
    from headway.checkpoint import (
        CHECKPOINT_MANIFEST_FILENAME,
        CheckpointError,
        read_manifest,
        verify,
    )

    if not (folder / CHECKPOINT_MANIFEST_FILENAME).is_file():
        return
    names = [
        name for name in read_manifest(folder).files if name.startswith(("model", "config.json"))
    ]
    problems = verify(folder, names=names, num_threads=4)
    if problems:
        advice = f"headway checkpoint verify {shlex.quote(str(folder.parent))}"
        problems.append(f"another one can be given; which are whole: {advice}")
        raise CheckpointError("\n".join(problems))


def outline_model(folder: Path) -> nn.Module:
    """The model in a folder by its layers and shapes, where possible without memory for them."""
    from headway.models.initial import blank_causal_lm
    from headway.trainers.from_config import build_model_to_look_at

    if (folder / "config.json").is_file():
        return blank_causal_lm(folder)
    return build_model_to_look_at(_run_of(folder))[0]


def _load_by_run(folder: Path) -> nn.Module:
    """A model without a Hugging Face configuration: built as its run built it."""
    from headway.checkpoint import CheckpointManager
    from headway.trainers.from_config import build_model_init

    model = build_model_init(_run_of(folder))()
    CheckpointManager(folder.parent).load_model(model, folder)
    return model


def _run_of(folder: Path) -> RunConfig:
    """As much of a checkpoint's run as builds its model."""
    from headway.config.schema import Component, RunConfig

    path = folder / "run" / "config.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    component = stored.get("model")
    if not isinstance(component, dict):
        raise ConfigError(
            f"{folder} has no config.json, and its run was not made from a run file: "
            f"load its weights in Python into a model of your own"
        )
    return RunConfig(model=Component(component["class_path"], component.get("init_args") or {}))


def load_folder_tokenizer(folder: Path, given: str | None = None) -> Tokenizer:
    """The tokenizer beside a model, or the one given instead of it."""
    from headway.data.tokenizer import load_tokenizer

    if given is not None:
        return load_tokenizer(given)
    if (
        not (folder / "tokenizer.json").is_file()
        and not (folder / "tokenizer_config.json").is_file()
    ):
        raise ConfigError(
            f"{folder} holds no tokenizer; name one with --tokenizer (bytes, or a folder)"
        )
    return load_tokenizer(folder)


def check_vocabulary(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Refuse a tokenizer with more ids than the model has."""
    from headway.trainers.preflight import vocabulary_size

    size = vocabulary_size(model)
    if size is not None and tokenizer.vocab_size > size:
        raise ConfigError(
            f"--tokenizer: {tokenizer.name} has {tokenizer.vocab_size} ids, but the model in "
            f"{folder} only {size}"
        )
