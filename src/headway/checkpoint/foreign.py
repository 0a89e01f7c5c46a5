"""States of other tools as components of a checkpoint.

Owns: giving an optimizer's numbered parameters their names, and writing such states to a draft.
Does not own: where the states come from (convert.py, raw.py).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.checkpoint.component import SharingPattern, StateComponent, file_stem
from headway.checkpoint.contents import OPTIMIZER_STATE_NAME
from headway.checkpoint.draft import Draft
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.model import clean_name
from headway.checkpoint.optimizer import split_optimizer
from headway.checkpoint.tree import split_tree

_NEITHER_DECAYS = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


class _Held:
    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state_dict: Any) -> None:
        self._state = state_dict


def write_component(
    draft: Draft, key: str, state: Any, pattern: SharingPattern = SharingPattern.GLOBAL
) -> None:
    """Write a state as the component `key`."""
    component = StateComponent(key, _Held(state), pattern)
    files = draft.write_tree(file_stem(component), *split_tree(state, what=f"state of {key!r}"))
    draft.add_component(key, files, pattern=pattern.value)


def write_optimizer(
    draft: Draft,
    held: Any,
    path: Path,
    weights: Mapping[str, torch.Tensor],
    order: list[str],
) -> None:
    """Write the state that `path` held; `order` is the model's order of its parameters."""
    try:
        states: Mapping[int, Mapping[str, Any]] = held["state"]
        groups: list[dict[str, Any]] = held["param_groups"]
        sizes = [len(group["params"]) for group in groups]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not an optimizer's state: {error!r}") from error
    names = _name_parameters(path, order, groups, states, weights)
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
        is_adam = any(group.get("decoupled_weight_decay") is False for group in groups)
        return torch.optim.Adam(groups) if is_adam else torch.optim.AdamW(groups)
    if keys <= {"momentum_buffer"}:
        return torch.optim.SGD(groups, lr=0.0)
    raise CheckpointError(
        f"{path} holds the states {', '.join(sorted(keys))}; only those of AdamW and SGD are known "
        "(convert without the optimizer)"
    )


def _name_parameters(
    path: Path,
    order: list[str],
    groups: list[dict[str, Any]],
    states: Mapping[int, Mapping[str, Any]],
    weights: Mapping[str, torch.Tensor],
) -> list[str]:
    """Names in the order of the optimizer's numbers, checked against the shapes of its states.

    An optimizer that was made with names tells them. Else its numbers follow the model's order,
    as a whole or after being dealt to a group that decays and one that does not; which rule they
    were dealt by depends on the tool and its version.
    """
    numbers = [number for group in groups for number in group["params"]]
    told = [clean_name(name) for group in groups for name in group.get("param_names", ())]
    is_named = bool(told) and set(told) <= set(weights) and len(told) == len(numbers)
    if is_named and _shapes_fit(told, numbers, states, weights):
        return told
    if not set(order) <= set(weights) or len(numbers) != len(order):
        raise CheckpointError(
            f"{path}: the optimizer holds {len(numbers)} parameters, the model has {len(order)}; "
            "convert without the optimizer"
        )
    decays_by_name = [n for n in order if not _NEITHER_DECAYS.search(n.lower())]
    decays_by_dim = [n for n in order if weights[n].dim() > 1]
    for decays in (decays_by_name, decays_by_dim, order):
        names = [*decays, *(n for n in order if n not in set(decays))]
        if len(groups[0]["params"]) == len(decays) and _shapes_fit(names, numbers, states, weights):
            return names
    raise CheckpointError(
        f"{path}: the optimizer's states do not fit the model's parameters in any known order; "
        "convert without the optimizer"
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
