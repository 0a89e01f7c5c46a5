"""Optimizer state by parameter name, out of the optimizer and back into it.

Owns: tensors keyed `<state>.<parameter name>`, param groups and scalars as JSON, strict matching
at load. Does not own: building optimizers, the shards (tensors.py), which settings a group takes
(param_groups.py), or states that are tensors made of tensors (wrapped.py), whose inner ones are
keyed `<state>:<inner>.<parameter name>`.
`Optimizer.load_state_dict` is not used: it matches by position and casts every state to its
parameter's dtype, so float32 moments of a bfloat16 parameter would not come back as they were.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from headway.checkpoint.contents import OPTIMIZER_STATE_NAME
from headway.checkpoint.errors import CheckpointError, OptimizerMisfitError
from headway.checkpoint.header import DTYPE_NAMES, StoredTensor
from headway.checkpoint.intake import Destination
from headway.checkpoint.model import describe_names
from headway.checkpoint.param_groups import (
    check_classes,
    match_groups,
    restore_settings,
    tell_regrouped,
)
from headway.checkpoint.sharding import as_destination, empty_state, local_tensor
from headway.checkpoint.staged import TensorSlice
from headway.checkpoint.tensors import ShardReader, num_bytes, why_not_storable
from headway.checkpoint.tree import join_tree, split_tree
from headway.checkpoint.wrapped import (
    inner_names,
    is_description,
    is_wrapped,
    put_together,
    take_apart,
)
from headway.errors import ConfigError
from headway.optim.multi import GROUP_CLASS

_NOT_HYPERPARAMETERS = frozenset({"params", "param_names"})


def _name_of(names: Mapping[int, str], param: torch.Tensor, group: int, number: int) -> str:
    if id(param) not in names:
        raise ConfigError(
            f"parameter {number} of optimizer group {group} (shape {list(param.shape)}) is not a "
            "parameter of the model; its state cannot be saved by name"
        )
    return names[id(param)]


def named_params(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> list[dict[str, torch.Tensor]]:
    """Parameters by name, one dict per group; `ConfigError` if one has no name, or two groups."""
    groups: list[dict[str, torch.Tensor]] = []
    seen: set[str] = set()
    for index, group in enumerate(optimizer.param_groups):
        members: dict[str, torch.Tensor] = {}
        for number, param in enumerate(group["params"]):
            name = _name_of(names, param, index, number)
            if name in seen:
                raise ConfigError(f"the optimizer holds parameter {name} more than once")
            seen.add(name)
            members[name] = param
        groups.append(members)
    return groups


def split_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The optimizer's state as a JSON object and tensors; `names` maps `id(param)` to its name.

    Of a state in few bits that ranks hold together, the tensors are `TensorSlice`.
    """
    tensors: dict[str, Any] = {}
    params: dict[str, Any] = {}
    groups = named_params(optimizer, names)
    for members in groups:
        for name, param in members.items():
            params[name] = _split_param(name, param, optimizer.state.get(param, {}), tensors)
    others = {key: value for key, value in optimizer.state.items() if isinstance(key, str)}
    hyperparameters = [
        {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}
        for group in optimizer.param_groups
    ]
    rest, rest_tensors = split_tree(
        {"param_groups": hyperparameters, "shared": others}, what="optimizer state"
    )
    tensors.update(rest_tensors)
    return {
        "class": type(optimizer).__qualname__,
        "groups": [list(members) for members in groups],
        "params": params,
        "rest": rest,
    }, tensors


def _split_param(
    name: str,
    param: torch.Tensor,
    state: Mapping[str, Any],
    tensors: dict[str, torch.Tensor | TensorSlice],
) -> dict[str, Any]:
    stored, on_host, values, wrapped = [], [], {}, {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            values[key] = value
            continue
        if is_wrapped(value):
            wrapped[key], inner = take_apart(value, param)
            stored += [f"{key}:{part}" for part in inner]
            tensors.update({f"{key}:{part}.{name}": tensor for part, tensor in inner.items()})
            continue
        reason = why_not_storable(local_tensor(value))
        if reason:
            raise ConfigError(f"optimizer state {key} of {name} cannot be stored: {reason}")
        stored.append(key)
        tensors[f"{key}.{name}"] = value
        if value.device.type == "cpu" and param.device.type != "cpu":
            on_host.append(key)
    encoded: Any = {}
    contained: dict[str, torch.Tensor] = {}
    if values:  # rarely, and a GPU may wait while thousands of parameters are gone through
        encoded, contained = split_tree(values, what=f"optimizer state of {name}")
    if contained:
        raise ConfigError(
            f"optimizer state of {name}: {', '.join(contained)} is a tensor inside a container; "
            "only tensors directly in the state can be saved"
        )
    described = {
        "shape": list(param.shape),
        "dtype": DTYPE_NAMES.get(param.dtype),
        "tensors": stored,
        "on_host": on_host,
        "values": encoded,
    }
    return {**described, "wrapped": wrapped} if wrapped else described


# Tensors of the parameter's size that a step creates, for classes that create them lazily.
_NUM_MOMENTS = {
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adadelta": 2,
    "RMSprop": 1,
    "Adagrad": 1,
    "Muon": 1,
    "StochasticAdamW": 2,
}
_COUNTER_BYTES = 4


def expected_state_bytes(
    optimizer: torch.optim.Optimizer, padded: Callable[[int], int] = int
) -> int:
    """Bytes of the state's tensors, each rounded up by `padded`; estimated before the first step.

    The estimate of a class that is not known here is what its state holds already.
    """
    total = 0
    for group in optimizer.param_groups:
        kind = group.get(GROUP_CLASS, type(optimizer).__name__)
        moments = _NUM_MOMENTS.get(kind, 0)
        moments += bool(group.get("amsgrad")) + (
            kind in ("SGD", "RMSprop") and bool(group.get("momentum"))
        )
        for param in group["params"]:
            state = optimizer.state.get(param)
            if state:
                tensors: dict[str, torch.Tensor | TensorSlice] = {}
                _split_param("", param, state, tensors)
                total += sum(padded(_size_of(tensor)) for tensor in tensors.values())
            elif moments and param.requires_grad:
                total += moments * padded(num_bytes(local_tensor(param))) + padded(_COUNTER_BYTES)
    return total


def _size_of(held: torch.Tensor | TensorSlice) -> int:
    return num_bytes(held.tensor if isinstance(held, TensorSlice) else local_tensor(held))


def merge_optimizers(encoded: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One description of an optimizer whose parameters the ranks hold together.

    Groups with the same settings are one group; a parameter that several ranks hold is listed once.
    """
    first = encoded[0]
    if all(one == first for one in encoded):
        return first
    groups: dict[tuple[str, int], list[str]] = {}
    settings: list[Any] = []
    params: dict[str, Any] = {}
    for one in encoded:
        if one["class"] != first["class"]:
            raise CheckpointError(
                f"the ranks use different optimizers: {one['class']}, {first['class']}"
            )
        seen: Counter[str] = Counter()
        for members, setting in zip(one["groups"], one["rest"]["param_groups"]):
            text = json.dumps(setting, sort_keys=True)
            key = (text, seen[text])
            seen[text] += 1
            if key not in groups:
                groups[key] = []
                settings.append(setting)
            groups[key] += [name for name in members if name not in params]
        for name, param in one["params"].items():
            params.setdefault(name, param)
    rest = {**first["rest"], "param_groups": settings}
    return {**first, "groups": list(groups.values()), "params": params, "rest": rest}


class OptimizerPlan(NamedTuple):
    """A saved state that fits a live optimizer."""

    destinations: list[Destination]
    """To be filled first."""
    finish: Callable[[], None]
    """Puts settings and states into the optimizer."""


def plan_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    encoded: Mapping[str, Any],
    reader: ShardReader,
    elsewhere: Collection[str] = (),
) -> OptimizerPlan:
    """How to put a saved state into the live optimizer, by parameter name; changes nothing yet.

    Parameters `elsewhere`, which other ranks hold, may be absent here.
    """
    file = str(reader.directory / OPTIMIZER_STATE_NAME)
    _check_structure(encoded, file)
    present = {n: p for n, p in encoded["params"].items() if n not in elsewhere}
    encoded = {**encoded, "params": present}
    groups = named_params(optimizer, names)
    live = {name: param for members in groups for name, param in members.items()}
    _check_fit(optimizer, live, encoded, reader)
    rest_names = [n for n in reader.weight_map if n.startswith(("param_groups/", "shared/"))]
    rest = join_tree(encoded["rest"], dict(reader.items(rest_names)), what=file)
    _check_settings(rest, len(encoded["groups"]), file)
    there = encoded["groups"], rest["param_groups"]
    check_classes(optimizer.param_groups, groups, *there, file)
    chosen = match_groups(optimizer.param_groups, groups, *there)
    states, destinations = _plan_states(optimizer, groups, encoded["params"], reader)

    def finish() -> None:
        for group, settings in zip(optimizer.param_groups, chosen):
            if settings is not None:
                restore_settings(group, settings)
        for key in [key for key in optimizer.state if isinstance(key, str)]:
            del optimizer.state[key]
        optimizer.state.update(rest["shared"])
        for name, param in live.items():
            if states[name]:
                optimizer.state[param] = states[name]
            else:  # it had not been stepped yet when it was saved
                optimizer.state.pop(param, None)

    return OptimizerPlan(destinations, finish)


def find_regrouped(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], encoded: Mapping[str, Any]
) -> list[str]:
    """How the live groups differ from those of a state that fits the optimizer, in words."""
    groups = named_params(optimizer, names)
    live = [list(members) for members in groups]
    saved = encoded["rest"]["param_groups"]
    return tell_regrouped(optimizer.param_groups, live, encoded["groups"], saved)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _check_structure(encoded: Mapping[str, Any], file: str) -> None:
    """Refuse what `split_optimizer` does not return."""
    params, groups = encoded.get("params"), encoded.get("groups")
    fits = (
        isinstance(encoded.get("class"), str)
        and isinstance(encoded.get("rest"), dict)
        and isinstance(params, dict)
        and isinstance(groups, list)
        and all(map(_is_texts, groups))
        and {name for members in groups for name in members} == params.keys()
        and all(
            isinstance(param, dict)
            and {"shape", "tensors", "on_host", "values"} <= param.keys()
            and isinstance(param["values"], dict)
            and _is_texts(param["tensors"])
            and _is_texts(param["on_host"])
            and _is_wrapped_part(param.get("wrapped", {}), param["tensors"])
            for param in params.values()
        )
    )
    if not fits:
        raise CheckpointError(f"{file} does not have the structure of an optimizer's state")


def _is_wrapped_part(wrapped: Any, tensors: list[str]) -> bool:
    return isinstance(wrapped, dict) and all(
        is_description(described)
        and {f"{key}:{inner}" for inner in inner_names(described)} <= set(tensors)
        for key, described in wrapped.items()
    )


def _check_settings(rest: Any, num_groups: int, file: str) -> None:
    """Refuse settings that are not one dict for each group, and one for all of them."""
    fits = (
        isinstance(rest, dict)
        and isinstance(rest.get("shared"), dict)
        and isinstance(rest.get("param_groups"), list)
        and len(rest["param_groups"]) == num_groups
        and all(isinstance(settings, dict) for settings in rest["param_groups"])
    )
    if not fits:
        raise CheckpointError(f"{file} does not have the settings of its {num_groups} groups")


def _check_fit(
    optimizer: torch.optim.Optimizer,
    live: Mapping[str, torch.Tensor],
    encoded: Mapping[str, Any],
    reader: ShardReader,
) -> None:
    saved = encoded["params"]
    problems = []
    if encoded["class"] != type(optimizer).__qualname__:
        problems.append(
            f"it is the state of {encoded['class']}, the run uses {type(optimizer).__qualname__}"
        )
    missing, unexpected = set(live) - set(saved), set(saved) - set(live)
    if missing:
        problems.append(f"parameters missing in it: {describe_names(missing, unexpected)}")
    if unexpected:
        problems.append(f"parameters the run does not have: {describe_names(unexpected, missing)}")
    for name in sorted(set(live) & set(saved)):
        shape = list(live[name].shape)
        if saved[name]["shape"] != shape:
            problems.append(f"{name} is {saved[name]['shape']} there, {shape} here")
    kind = OptimizerMisfitError if problems else CheckpointError
    listed = (f"{key}.{name}" for name in saved for key in saved[name]["tensors"])
    absent = [name for name in listed if name not in reader.weight_map]
    if absent:
        problems.append(f"state tensors missing: {describe_names(absent)}")
    if problems:
        raise kind(
            f"{reader.index_path} does not fit the optimizer: {'; '.join(problems[:8])}. To start "
            "its state anew, leave the optimizer out of load_components"
        )


def _plan_states(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, torch.Tensor]],
    saved: Mapping[str, Any],
    reader: ShardReader,
) -> tuple[dict[str, dict[str, Any]], list[Destination]]:
    """The state of every parameter, its tensors (in place) yet to be filled."""
    states: dict[str, dict[str, Any]] = {}
    destinations = []
    located = reader.locate([f"{key}.{name}" for name in saved for key in saved[name]["tensors"]])
    for group, members in zip(optimizer.param_groups, groups):
        counts_on_device = bool(group.get("capturable") or group.get("fused"))
        for name, param in members.items():
            states[name] = join_tree(saved[name]["values"], {})
            held = optimizer.state.get(param, {})
            inside: set[str] = set()
            for key, described in saved[name].get("wrapped", {}).items():
                names = {part: f"{key}:{part}" for part in inner_names(described)}
                inside.update(names.values())
                stored_parts = {part: located[f"{full}.{name}"] for part, full in names.items()}
                states[name][key], parts = put_together(
                    described, stored_parts, param, held.get(key), f"state {key} of {name}"
                )
                destinations += parts
            for key in saved[name]["tensors"]:
                if key in inside:
                    continue
                if key == "step":
                    on_host = not counts_on_device
                else:
                    on_host = key in saved[name]["on_host"]
                stored = located[f"{key}.{name}"]
                device = torch.device("cpu") if on_host else param.device
                dtype = _dtype_of(key, stored, saved[name], param, group)
                tensor = _place(held.get(key), stored.shape, dtype, param, device)
                states[name][key] = tensor
                destinations.append(as_destination(stored, tensor))
    return states, destinations


def _dtype_of(
    key: str,
    stored: StoredTensor,
    saved: Mapping[str, Any],
    param: torch.Tensor,
    group: Mapping[str, Any],
) -> torch.dtype:
    """The stored dtype; what was in its parameter's goes with that, if it is another one now.

    Counters have a dtype of their own, and so have moments where the group says which.
    """
    is_counter = key == "step" or (not stored.shape and param.dim() > 0)
    has_own = is_counter or group.get("moment_dtype", "parameter") != "parameter"
    follows = saved.get("dtype") == DTYPE_NAMES[stored.dtype] and not has_own
    return param.dtype if follows else stored.dtype


def _place(
    current: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    param: torch.Tensor,
    device: torch.device,
) -> torch.Tensor:
    """The tensor that a stored one is read into: the one in use, if it is of that kind."""
    if (
        isinstance(current, torch.Tensor)
        and (current.shape, current.dtype) == (shape, dtype)
        and current.device == device
    ):
        return current  # no second copy of the moments in device memory
    return empty_state(param, shape, dtype, device)
