"""Checkpoints of other tools in, and ours out.

Owns: telling what a source is, and importing the Hugging Face Trainer's checkpoints with their
optimizer, scheduler and generators. Does not own: unpickling (legacy.py), writing (export.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint import legacy
from headway.checkpoint.component import SharingPattern
from headway.checkpoint.contents import TRAINER_STATE_NAME
from headway.checkpoint.draft import Draft
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.export import Source, model_files, require_new, require_whole
from headway.checkpoint.foreign import write_component, write_optimizer
from headway.checkpoint.jsonfile import read_json_object
from headway.checkpoint.manifest import MANIFEST_NAME, read_manifest
from headway.checkpoint.meta import find_weights, is_half_checkpoint
from headway.checkpoint.raw import PICKLED_WEIGHTS, read_raw
from headway.checkpoint.tree import split_tree
from headway.checkpoint.weights import (
    QuantizedWeights,
    Weights,
    open_weight_file,
    open_weights,
)
from headway.errors import ConfigError, missing_extra
from headway.models.ties import split_ties

_PICKLED_STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
_OF_THE_PROCESS = ("stateful_callbacks", "is_local_process_zero", "is_world_process_zero")


@dataclass(frozen=True)
class Kind:
    """What a source is."""

    name: str
    """checkpoint, hf-trainer, model folder, file or pickled states."""
    needs_legacy: bool


def recognise(source: Path) -> Kind:
    """What a source is, by its files; `ConfigError` for what is none of them."""
    if source.is_file():
        return Kind("file", source.suffix != ".safetensors")
    if not source.is_dir():
        raise ConfigError(f"SRC: {source} does not exist")
    if os.path.lexists(source / MANIFEST_NAME):
        return Kind("checkpoint", False)
    if is_half_checkpoint(source):
        raise CheckpointError(f"{source / MANIFEST_NAME} is missing: it was never committed")
    weights = find_weights(source)
    if (source / TRAINER_STATE_NAME).is_file() and weights is not None:
        pickled = any((source / name).exists() for name in _PICKLED_STATES)
        return Kind("hf-trainer", pickled or not weights.safetensors)
    if weights is not None:
        return Kind("model folder", not weights.safetensors)
    if (source / PICKLED_WEIGHTS).is_file():
        return Kind("pickled states", True)
    raise ConfigError(f"SRC: {source} holds no weights that can be converted")


def read_source(source: Path, *, allow_legacy: bool = False) -> Source:
    """The weights of a source and the files that belong to them."""
    kind = recognise(source)
    if kind.name == "file" and not kind.needs_legacy:
        return _take_all(open_weight_file(source))
    if kind.name in ("file", "pickled states"):
        raw = read_raw(source, allow_legacy=allow_legacy)
        raw.warn(("step",))
        tensors, aliases = split_ties(raw.weights)
        return Source({n: t.clone() for n, t in tensors.items()}, aliases, step=raw.step or 0)
    step = 0
    if kind.name == "checkpoint":
        manifest = read_manifest(source)
        entry = manifest.component("model")
        if entry is None:
            raise CheckpointError(f"{source} holds no model")
        # All that is taken along is verified, not the weights alone.
        names = {*entry["files"], *(n for n in manifest.files if "/" not in n)}
        require_whole(source, [n for n in names if not n.startswith("optimizer")])
        step = manifest.step
    found = _take_all(open_weights(source, allow_legacy=allow_legacy))
    found.files = model_files(source)
    found.step = step
    return found


def _take_all(weights: Weights) -> Source:
    if isinstance(weights, QuantizedWeights):
        raise ConfigError(
            f"SRC: {weights.path} holds quantized weights, which are not changed any more; take "
            "the checkpoint that they were made of"
        )
    tensors = {name: tensor.clone() for name, tensor in weights.items(weights.weight_map)}
    return Source(tensors, dict(weights.aliases))


# -- the Hugging Face Trainer -----------------------------------------------------------------


def import_hf_trainer(
    source: Path, target: Path, *, allow_legacy: bool = False, with_optimizer: bool = True
) -> Path:
    """A Hugging Face Trainer's checkpoint as one of ours, of kind training.

    It holds model, optimizer, scheduler, generators and counters; the position in the data has no
    counterpart there.
    """
    require_new(target)
    kind = recognise(source)
    if kind.name != "hf-trainer":
        raise ConfigError(f"SRC: {source} is not a checkpoint of the Hugging Face Trainer")
    for name in _PICKLED_STATES:
        if (source / name).exists():
            legacy.require_permission(source / name, allow_legacy)
    found = read_source(source, allow_legacy=allow_legacy)
    counters = read_json_object(source / TRAINER_STATE_NAME)
    counters = {key: value for key, value in counters.items() if key not in _OF_THE_PROCESS}
    with Draft(target) as draft:
        files = draft.write_shards("model", found.tensors, aliases=found.aliases)
        for name, path in found.files.items():
            draft.take(path, name)
            files.append(name)
        draft.add_component("model", files)
        if with_optimizer and (source / "optimizer.pt").exists():
            path = source / "optimizer.pt"
            held, order = legacy.read_pickled(path), _parameter_order(source)
            write_optimizer(draft, held, path, found.tensors, order)
        if (source / "scheduler.pt").exists():
            write_component(draft, "scheduler", legacy.read_pickled(source / "scheduler.pt"))
        if (source / "rng_state.pth").exists():
            state = _generators(legacy.read_pickled(source / "rng_state.pth"), source)
            write_component(draft, "rng", state, SharingPattern.PER_RANK)
        encoded, _ = split_tree(counters, what=str(source / TRAINER_STATE_NAME))
        draft.write_json(TRAINER_STATE_NAME, encoded)
        step = counters.get("global_step", 0)
        return draft.commit(
            draft.describe(
                kind="training", step=int(step), metadata={"imported_from": "hf-trainer"}
            )
        )


def _generators(held: Any, source: Path) -> dict[str, Any]:
    """The Trainer's generator states in the form of `RNGState`."""
    try:
        cuda = held.get("cuda", [])
        name, keys, position, has_gauss, cached = held["numpy"]
        return {
            "torch": held["cpu"],
            "cuda": list(cuda) if isinstance(cuda, list | tuple) else [cuda],
            "python": held["python"],
            "numpy": {
                "bit_generator": name,
                "state": {"key": keys, "pos": position},
                "has_gauss": has_gauss,
                "gauss": cached,
            },
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source / 'rng_state.pth'} is not understood: {error!r}") from error


def _parameter_order(source: Path) -> list[str]:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise missing_extra(
            "transformers", "transformers", "naming the parameters of optimizer.pt"
        ) from None
    try:
        config = AutoConfig.from_pretrained(source)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{source / 'config.json'} describes no model that can be built, so the parameters of "
            f"optimizer.pt have no names ({error}); convert without the optimizer"
        ) from error
    return [name for name, _ in model.named_parameters()]
