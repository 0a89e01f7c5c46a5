"""Checkpoints of other tools in, and ours out.

Owns: telling what a source is, and importing the Hugging Face Trainer's checkpoints with their
optimizer, scheduler and generators. Does not own: unpickling (legacy.py), writing (export.py).
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.checkpoint import legacy
from headway.checkpoint.component import SharingPattern, StateComponent, file_stem
from headway.checkpoint.contents import OPTIMIZER_STATE_NAME, TRAINER_STATE_NAME
from headway.checkpoint.draft import Draft
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.export import Source, model_files, require_new, require_whole
from headway.checkpoint.jsonfile import read_json_object
from headway.checkpoint.manifest import MANIFEST_NAME, read_manifest
from headway.checkpoint.meta import find_weights, is_half_checkpoint
from headway.checkpoint.optimizer import split_optimizer
from headway.checkpoint.tree import split_tree
from headway.checkpoint.weights import Weights, open_weight_file, open_weights
from headway.errors import ConfigError, missing_extra

_PICKLED_WEIGHTS = "model.pt"
_PICKLED_STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
_OF_THE_PROCESS = ("stateful_callbacks", "is_local_process_zero", "is_world_process_zero")
_NEITHER_DECAYS = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")

logger = logging.getLogger(__name__)


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
    if (source / _PICKLED_WEIGHTS).is_file():
        return Kind("pickled states", True)
    raise ConfigError(f"SRC: {source} holds no weights that can be converted")


def read_source(source: Path, *, allow_legacy: bool = False) -> Source:
    """The weights of a source and the files that belong to them."""
    kind = recognise(source)
    if kind.name == "file":
        return _take_all(open_weight_file(source, allow_legacy=allow_legacy))
    if kind.name == "pickled states":
        path = source / _PICKLED_WEIGHTS
        return _take_all(open_weight_file(path, allow_legacy=allow_legacy))
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
            _write_optimizer(draft, source, found.tensors)
        if (source / "scheduler.pt").exists():
            _write_component(draft, "scheduler", legacy.read_pickled(source / "scheduler.pt"))
        if (source / "rng_state.pth").exists():
            state = _generators(legacy.read_pickled(source / "rng_state.pth"), source)
            _write_component(draft, "rng", state, SharingPattern.PER_RANK)
        encoded, _ = split_tree(counters, what=str(source / TRAINER_STATE_NAME))
        draft.write_json(TRAINER_STATE_NAME, encoded)
        step = counters.get("global_step", 0)
        return draft.commit(
            draft.describe(
                kind="training", step=int(step), metadata={"imported_from": "hf-trainer"}
            )
        )


class _Held:
    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state_dict: Any) -> None:
        self._state = state_dict


def _write_component(
    draft: Draft, key: str, state: Any, pattern: SharingPattern = SharingPattern.GLOBAL
) -> None:
    component = StateComponent(key, _Held(state), pattern)
    files = draft.write_tree(file_stem(component), *split_tree(state, what=f"state of {key!r}"))
    draft.add_component(key, files, pattern=pattern.value)


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


def _write_optimizer(draft: Draft, source: Path, weights: Mapping[str, torch.Tensor]) -> None:
    path = source / "optimizer.pt"
    held = legacy.read_pickled(path)
    try:
        states: Mapping[int, Mapping[str, Any]] = held["state"]
        groups: list[dict[str, Any]] = held["param_groups"]
        sizes = [len(group["params"]) for group in groups]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not an optimizer's state: {error!r}") from error
    names = _name_parameters(source, groups, states, weights, sizes)
    params = {name: nn.Parameter(weights[name], requires_grad=False) for name in names}
    ordered = iter(names)
    rebuilt = [
        {**group, "params": [params[name] for name in itertools.islice(ordered, size)]}
        for group, size in zip(groups, sizes)
    ]
    for group in rebuilt:
        group.pop("param_names", None)
    optimizer = _empty_optimizer(states, rebuilt, path)
    numbers = [number for group in groups for number in group["params"]]
    for number, name in zip(numbers, names):
        if number in states:
            optimizer.state[params[name]] = dict(states[number])
    encoded, tensors = split_optimizer(optimizer, {id(p): name for name, p in params.items()})
    files = draft.write_shards("optimizer", tensors)
    draft.write_json(OPTIMIZER_STATE_NAME, encoded)
    draft.add_component("optimizer", [*files, OPTIMIZER_STATE_NAME])


def _empty_optimizer(
    states: Mapping[int, Mapping[str, Any]], groups: list[dict[str, Any]], path: Path
) -> torch.optim.Optimizer:
    keys = {key for state in states.values() for key in state}
    if keys <= {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}:
        return torch.optim.AdamW(groups)
    if keys <= {"momentum_buffer"}:
        return torch.optim.SGD(groups, lr=0.0)
    raise CheckpointError(
        f"{path} holds the states {', '.join(sorted(keys))}; only those of AdamW and SGD are known "
        "(convert without the optimizer)"
    )


def _name_parameters(
    source: Path,
    groups: list[dict[str, Any]],
    states: Mapping[int, Mapping[str, Any]],
    weights: Mapping[str, torch.Tensor],
    sizes: list[int],
) -> list[str]:
    """Names in the order of the optimizer's numbers, checked against the shapes of its states.

    The Trainer deals the parameters, in the model's order, to a group that decays and one that does
    not; which rule it dealt them by depends on its version.
    """
    order = _parameter_order(source)
    if not set(order) <= set(weights) or sum(sizes) != len(order):
        raise CheckpointError(
            f"{source / 'optimizer.pt'} holds {sum(sizes)} parameters, the model has {len(order)}; "
            "convert without the optimizer"
        )
    decays_by_name = [n for n in order if not _NEITHER_DECAYS.search(n.lower())]
    decays_by_dim = [n for n in order if weights[n].dim() > 1]
    numbers = [number for group in groups for number in group["params"]]
    for decays in (decays_by_name, decays_by_dim, order):
        names = [*decays, *(n for n in order if n not in set(decays))]
        if sizes[0] == len(decays) and _shapes_fit(names, numbers, states, weights):
            return names
    raise CheckpointError(
        f"{source / 'optimizer.pt'}: its states do not fit the model's parameters in any known "
        "order; convert without the optimizer"
    )


def _shapes_fit(
    names: list[str],
    numbers: list[int],
    states: Mapping[int, Mapping[str, Any]],
    weights: Mapping[str, torch.Tensor],
) -> bool:
    for name, number in zip(names, numbers):
        for key, value in states.get(number, {}).items():
            is_moment = isinstance(value, torch.Tensor) and key != "step"
            if is_moment and value.shape != weights[name].shape:
                return False
    return True


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
