"""Fills live objects from the files of one committed checkpoint.

Owns: the order of loading and what counts as missing. Does not own: verification (manifest.py) or
the choice of a checkpoint (manager.py).
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn

from headway.checkpoint.component import StateComponent, file_stem
from headway.checkpoint.contents import (
    MODEL_EXTRA_STEM,
    OPTIMIZER_STATE_NAME,
    TRAINER_STATE_NAME,
    CheckpointContents,
)
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.jsonfile import read_json
from headway.checkpoint.manifest import Manifest
from headway.checkpoint.model import collect_model, load_extra_state, load_model_tensors
from headway.checkpoint.optimizer import join_optimizer
from headway.checkpoint.rng import RNGState
from headway.checkpoint.tensors import ShardReader, read_tensor_file
from headway.checkpoint.tree import join_tree
from headway.errors import ConfigError, unknown

logger = logging.getLogger(__name__)


def read_tree(directory: Path, stem: str, manifest: Manifest) -> Any:
    """The state stored as `<stem>.json`, with its tensors if it has any."""
    path = directory / f"{stem}.json"
    encoded = read_json(path)
    tensor_file = f"{stem}.safetensors"
    stored = tensor_file in manifest.files
    tensors = read_tensor_file(directory / tensor_file) if stored else {}
    return join_tree(encoded, tensors, what=str(path))


def load_weights(model: nn.Module, directory: Path, manifest: Manifest) -> None:
    """Load the weights (and the modules' extra state) into a live model."""
    load_model_tensors(model, ShardReader(directory, "model"))
    if f"{MODEL_EXTRA_STEM}.json" in manifest.files:
        load_extra_state(model, read_tree(directory, MODEL_EXTRA_STEM, manifest))


def load_contents(
    contents: CheckpointContents,
    directory: Path,
    manifest: Manifest,
    *,
    components: Collection[str] | None = None,
) -> dict[str, Any]:
    """Fill `contents` (or only the named `components`); returns the saved trainer state."""
    contents.check_keys()
    known = {"model", "optimizer", *(component.key for component in contents.components)}
    wanted = known if components is None else set(components)
    for name in sorted(wanted - known):
        raise ConfigError(unknown("checkpoint component", name, known))

    if "model" in wanted:
        load_weights(contents.model, directory, manifest)
    if "optimizer" in wanted and contents.optimizer is not None:
        _load_optimizer(contents, directory, manifest)
    # The generators last: restoring another component may draw random numbers.
    ordered = sorted(contents.components, key=lambda c: isinstance(c.stateful, RNGState))
    for component in ordered:
        if component.key in wanted:
            _load_component(component, directory, manifest)
    unclaimed = {entry["key"] for entry in manifest.components} - known
    if unclaimed:
        logger.warning(
            "%s holds state that nothing in this run takes: %s",
            directory,
            ", ".join(sorted(unclaimed)),
        )
    trainer_state = join_tree(read_json(directory / TRAINER_STATE_NAME), {})
    if not isinstance(trainer_state, dict):
        raise CheckpointError(f"{directory / TRAINER_STATE_NAME} does not hold a JSON object")
    return trainer_state


def _load_optimizer(contents: CheckpointContents, directory: Path, manifest: Manifest) -> None:
    assert contents.optimizer is not None
    if manifest.component("optimizer") is None:
        raise CheckpointError(
            f"{directory} holds no optimizer state; name the components to load to go without it"
        )
    join_optimizer(
        contents.optimizer,
        collect_model(contents.model).names_by_id(),
        read_json(directory / OPTIMIZER_STATE_NAME),
        ShardReader(directory, "optimizer"),
    )


def _load_component(component: StateComponent, directory: Path, manifest: Manifest) -> None:
    entry = manifest.component(component.key)
    if entry is None:
        if component.required:
            raise CheckpointError(
                f"{directory} holds no state for the required component {component.key!r}"
            )
        logger.warning("%s holds no state for %r; it starts fresh", directory, component.key)
        return
    stem = file_stem(component)
    if f"{stem}.json" not in entry["files"]:
        raise CheckpointError(
            f"component {component.key!r} is {component.sharing_pattern.value} here and "
            f"{entry['sharing_pattern']} in {directory}, which has no {stem}.json"
        )
    try:
        component.stateful.load_state_dict(read_tree(directory, stem, manifest))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"component {component.key!r} could not take its state from "
            f"{directory / stem}.json: {type(error).__name__}: {error}"
        ) from error
