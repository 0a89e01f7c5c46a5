"""A module's tensors by name, out of the module and back into it.

Owns: the names under which weights are stored, strict matching at load, copying into live tensors.
Does not own: tie detection (models/ties.py), files (tensors.py), the choice of module (strategies).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headway.checkpoint.errors import CheckpointError, MisfitError
from headway.checkpoint.intake import Destination
from headway.checkpoint.sharding import as_destination
from headway.checkpoint.tensors import ShardReader
from headway.errors import nearest
from headway.models.ties import (
    input_embedding_names,
    listed_ties,
    split_ties,
    tensor_identity,
)

_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_EXTRA_STATE = "_extra_state"
_MOST_NAMED = 8

logger = logging.getLogger(__name__)


def clean_name(name: str) -> str:
    """A parameter's name without the parts that torch.compile and checkpoint wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


@dataclass
class ModelTensors:
    """The live tensors of a module: parameters and persistent buffers."""

    by_name: dict[str, torch.Tensor]
    """Every name, aliases included."""
    stored: dict[str, torch.Tensor]
    """What a checkpoint stores, sorted by name."""
    aliases: dict[str, str]
    """Alias -> stored name."""
    extra: dict[str, Any]
    """What modules return from `get_extra_state`."""

    def names_by_id(self) -> dict[int, str]:
        """Stored name of every tensor object."""
        return {id(t): self.aliases.get(name, name) for name, t in self.by_name.items()}


def collect_model(model: nn.Module) -> ModelTensors:
    """The module's tensors (not copied) with their ties."""
    by_name: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name.rpartition(".")[2] == _EXTRA_STATE or not isinstance(value, torch.Tensor):
            extra[clean_name(name)] = value
        else:
            by_name[clean_name(name)] = value
    if len({tensor_identity(tensor) for tensor in by_name.values()}) == len(by_name):
        # Nothing is tied; what would decide between names takes several looks at all modules.
        return ModelTensors(by_name, dict(sorted(by_name.items())), {}, extra)
    preferred = input_embedding_names(model)
    if preferred is not None:
        preferred = {clean_name(name) for name in preferred}
    stored, aliases = split_ties(by_name, preferred, set(map(clean_name, listed_ties(model))))
    return ModelTensors(by_name, stored, aliases, extra)


def load_extra_state(model: nn.Module, extra: Mapping[str, Any]) -> None:
    """Give modules back, by their own `load_state_dict`, what is none of their tensors."""
    if extra:
        own = {clean_name(name): name for name in model.state_dict()}
        model.load_state_dict({own.get(clean_name(n), n): v for n, v in extra.items()}, False)


def tensors_made(model: nn.Module, live: ModelTensors) -> dict[str, torch.Tensor]:
    """Tensors that `state_dict` makes, by a hook for example: to fill them fills no module."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return {name: tensor for name, tensor in live.by_name.items() if id(tensor) not in own}


def describe_names(names: Iterable[str], candidates: Collection[str] = ()) -> str:
    """A list of names for an error, each with the nearest candidate."""
    all_names = sorted(names)
    shown = []
    for name in all_names[:_MOST_NAMED]:
        hint = nearest(name, candidates) if candidates else None
        shown.append(f"{name} (nearest: {hint})" if hint else name)
    rest = len(all_names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _match(reader: ShardReader, live: ModelTensors, elsewhere: Collection[str]) -> dict[str, str]:
    """Stored name for each live tensor's name; all that does not fit goes into one error."""
    sources = {name: name for name in reader.weight_map}
    sources.update({alias: name for alias, name in reader.aliases.items() if name in sources})
    # One member of a live tie is enough: files of others may store it under another of its names.
    filled = {live.aliases.get(name, name) for name in sources if name in live.by_name}
    missing = [name for name in live.stored if name not in filled]
    used = {sources[name] for name in sources if name in live.by_name}
    taken_elsewhere = {sources[name] for name in sources if name in elsewhere}
    unexpected = set(reader.weight_map) - used - taken_elsewhere
    problems = []
    if missing:
        problems.append(f"missing in it: {describe_names(missing, unexpected)}")
    if unexpected:
        problems.append(f"not in the model: {describe_names(unexpected, missing)}")
    shapes = reader.shapes(used)
    wanted = {name: source for name, source in sources.items() if name in live.by_name}
    for name, source in sorted(wanted.items()):
        live_shape = tuple(live.by_name[name].shape)
        if shapes[source] != live_shape:
            problems.append(f"{name} is {list(shapes[source])} there, {list(live_shape)} here")
    meta = [name for name in wanted if live.by_name[name].is_meta]
    if meta:
        problems.append(f"still on the meta device here: {describe_names(meta)}")
    if problems:
        more = len(problems) - _MOST_NAMED
        listed = "; ".join(problems[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise MisfitError(f"{reader.index_path} does not fit the model: {listed}")
    return wanted


def plan_model(
    live: ModelTensors, reader: ShardReader, elsewhere: Collection[str] = ()
) -> list[Destination]:
    """Which stored weights go into which of a module's own tensors; an error unless all fit.

    Stored names `elsewhere`, which other ranks load, may be absent here.
    """
    targets: dict[str, list[str]] = {}
    for name, source in _match(reader, live, elsewhere).items():
        targets.setdefault(source, []).append(name)
    stored = reader.locate(targets)
    written: dict[str, str] = {}
    destinations, recast = [], []
    for source in stored:
        for name in targets[source]:
            canonical = live.aliases.get(name, name)
            target = live.by_name[name]
            if canonical in written:
                if written[canonical] != source:
                    _require_equal(reader, (canonical, name), (written[canonical], source), target)
                continue
            written[canonical] = source
            if target.dtype != stored[source].dtype:
                recast.append(name)
            destinations.append(as_destination(stored[source], target))
    if recast:
        logger.warning(
            "%d tensors are stored in another dtype than the model's and are converted: %s",
            len(recast),
            describe_names(recast),
        )
    return destinations


def _require_equal(
    reader: ShardReader, names: tuple[str, str], sources: tuple[str, str], target: torch.Tensor
) -> None:
    """Two stored tensors for one live tensor must have the same values there."""
    first, second = (tensor.to(target.dtype) for _, tensor in reader.items(sources))
    if not torch.equal(first, second):
        raise CheckpointError(
            f"{names[1]} and {names[0]} are one tensor in the model, but {reader.index_path} "
            f"holds different values for {sources[1]} and {sources[0]}"
        )
