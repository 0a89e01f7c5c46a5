"""Weights in files of any supported form, by name, and into a module.

Owns: one way to read index or single file, safetensors or PyTorch, and the matching of names
against a module (`strict`, `assign`). Does not own: the choice of a file (meta.py), unpickling
(legacy.py), the weights of a run's own checkpoint, which are always strict (model.py), what a
quantized weight consists of (precision/quantized.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from headway.checkpoint import legacy
from headway.checkpoint.errors import CheckpointError, MisfitError
from headway.checkpoint.jsonfile import read_json_object
from headway.checkpoint.meta import (
    SAFE_WEIGHTS_INDEX_NAME,
    WEIGHTS_INDEX_NAME,
    CheckpointMeta,
    get_checkpoint_metadata,
)
from headway.checkpoint.model import clean_name, collect_model, describe_names
from headway.checkpoint.storage import check_name
from headway.checkpoint.tensors import open_tensor_file
from headway.precision.quantized import (
    Parts,
    QuantizedFormError,
    check_versions,
    described,
    find_parts,
    is_quantized,
    move,
)

Tensors = Iterator[tuple[str, torch.Tensor]]


class LoadReport(NamedTuple):
    """What did not match; empty after a strict load."""

    missing_keys: list[str]
    """Names of the module that the files do not have."""
    unexpected_keys: list[str]
    """Names in the files that the module does not have."""


class Weights:
    """Tensors by name. `path` is the index or file that errors name."""

    def __init__(
        self,
        path: Path,
        weight_map: Mapping[str, str],
        aliases: Mapping[str, str],
        read_file: Callable[[Path, Collection[str]], Tensors],
    ) -> None:
        self.path = path
        self.weight_map = dict(weight_map)
        self.aliases = {a: name for a, name in aliases.items() if name in self.weight_map}
        self._read_file = read_file

    def source(self, name: str) -> str | None:
        """The stored name behind a name: itself, or what it is an alias of."""
        return name if name in self.weight_map else self.aliases.get(name)

    def require(self, names: Collection[str]) -> None:
        """Every name must be stored, or an alias."""
        absent = [name for name in names if self.source(name) is None]
        if absent:
            known = {*self.weight_map, *self.aliases}
            raise CheckpointError(f"{self.path} does not hold {describe_names(absent, known)}")

    def items(self, names: Collection[str]) -> Tensors:
        """Stored names with their tensors, file by file; copy what is to be kept."""
        by_file: dict[str, list[str]] = {}
        for name in sorted(names):
            by_file.setdefault(self.weight_map[name], []).append(name)
        for file_name, members in by_file.items():
            yield from self._read_file(self.path.parent / file_name, members)

    def read(
        self, names: Collection[str] | None = None, device: str | torch.device = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Tensors on a device, names that share one give the same object."""
        wanted = [*self.weight_map, *self.aliases] if names is None else list(names)
        self.require(wanted)
        sources = {name: self.source(name) or name for name in wanted}
        found = {name: move(tensor, device) for name, tensor in self.items({*sources.values()})}
        return {name: found[source] for name, source in sources.items()}


class QuantizedWeights(Weights):
    """Tensors by name of which some are stored in parts; those come as torchao's tensors."""

    def __init__(self, stored: Weights, parts: Parts) -> None:
        self._stored, self._parts = stored, parts
        names = parts.real_names(stored.weight_map)
        files = {name: stored.weight_map.get(parts.names_in_file(name)[0], "") for name in names}
        super().__init__(stored.path, files, stored.aliases, stored._read_file)

    def items(self, names: Collection[str]) -> Tensors:
        for name in sorted(names):
            wanted = [n for n in self._parts.names_in_file(name) if n in self._stored.weight_map]
            try:
                yield name, self._parts.join(name, dict(self._stored.items(wanted)))
            except QuantizedFormError as error:
                raise CheckpointError(str(error)) from error


def open_weights(
    directory: str | Path, *, allow_legacy: bool = False, meta: CheckpointMeta | None = None
) -> Weights:
    """The weights of a folder; pickled ones only with `allow_legacy`."""
    folder = Path(directory)
    meta = meta or get_checkpoint_metadata(folder)
    path = folder / meta.file_name
    if not meta.safetensors:
        legacy.require_permission(path, allow_legacy)
    index = read_json_object(path) if meta.is_index else {}
    return _open(path, meta, index)


def open_weight_file(path: Path, *, allow_legacy: bool = False) -> Weights:
    """The weights in one file, told by its ending."""
    safe = path.suffix == ".safetensors"
    if not safe:
        legacy.require_permission(path, allow_legacy)
    return _open(path, CheckpointMeta(path.name, False, safe), {})


def open_index(
    directory: Path, index: Mapping[str, Any], *, safetensors: bool, allow_legacy: bool = False
) -> Weights:
    """The weights behind an index that was read, or made, before."""
    name = SAFE_WEIGHTS_INDEX_NAME if safetensors else WEIGHTS_INDEX_NAME
    if not safetensors:
        legacy.require_permission(directory / name, allow_legacy)
    return _open(directory / name, CheckpointMeta(name, True, safetensors), index)


def _open(path: Path, meta: CheckpointMeta, index: Mapping[str, Any]) -> Weights:
    if meta.is_index:
        weight_map, aliases = _check_index(path, index)
        if meta.safetensors:
            return _with_parts(Weights(path, weight_map, aliases, _read_safe))
        return Weights(path, weight_map, aliases, _read_torch)
    if meta.safetensors:
        with open_tensor_file(path) as file:
            names = list(file.keys())
        return _with_parts(Weights(path, dict.fromkeys(names, path.name), {}, _read_safe))
    held = legacy.read_state_dict(path)
    return Weights(
        path,
        dict.fromkeys(held, path.name),
        {},
        lambda _, wanted: ((name, held[name]) for name in wanted),
    )


def _with_parts(weights: Weights) -> Weights:
    """The same weights; where files say that some are in parts, these are put together."""
    folder, metadata = weights.path.parent, []
    for name in sorted(set(weights.weight_map.values())):
        if (folder / name).is_file():  # a missing one is named when it is read
            with open_tensor_file(folder / name) as file:
                metadata.append(file.metadata())
    try:
        parts = find_parts(metadata, str(weights.path))
    except QuantizedFormError as error:
        raise CheckpointError(str(error)) from error
    if parts is None or not parts.quantized:
        return weights
    config = folder / "config.json"
    block = described(read_json_object(config)) if config.is_file() else None
    check_versions(block or {}, str(folder))
    return QuantizedWeights(weights, parts)


def _check_index(path: Path, index: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    try:
        weight_map = index["weight_map"]
        if not isinstance(weight_map, Mapping):
            raise TypeError(f"weight_map is a {type(weight_map).__name__}")
        metadata = index.get("metadata") or {}
        aliases = dict(metadata.get("headway_aliases") or {})
        for group in metadata.get("param_sharing") or []:
            stored = [name for name in group if name in weight_map]
            aliases.update({name: stored[0] for name in group if stored and name != stored[0]})
        for name in weight_map.values():
            check_name(name)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a valid index: {error!r}") from error
    return dict(weight_map), {a: n for a, n in aliases.items() if a not in weight_map}


def _read_safe(path: Path, names: Collection[str]) -> Tensors:
    with open_tensor_file(path) as file:
        absent = set(names) - set(file.keys())
        if absent:
            raise CheckpointError(f"{path} lacks {describe_names(absent)}, which the index places")
        for name in names:
            yield name, file.get_tensor(name)


def _read_torch(path: Path, names: Collection[str]) -> Tensors:
    held = legacy.read_state_dict(path)
    absent = set(names) - set(held)
    if absent:
        raise CheckpointError(f"{path} lacks {describe_names(absent)}, which the index places")
    for name in names:
        yield name, held[name]


# -- into a module ----------------------------------------------------------------------------


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside torch's data-parallel wrappers."""
    while isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        module = module.module
    return module


def load_into(
    module: nn.Module,
    weights: Weights,
    *,
    device: str | torch.device = "cpu",
    strict: bool = True,
    assign: bool = False,
) -> LoadReport:
    """Load by name. Nothing is changed unless all names (if `strict`) and all shapes fit.

    Without `assign` values are copied into the module's tensors, which keep device and dtype; with
    it the module takes the loaded tensors, on `device`, and tied names keep sharing one.
    Quantized weights take the place of a linear layer's own, on whose device and in whose dtype
    they compute; values cannot be copied into those.
    """
    live = collect_model(module)
    targets: dict[str, list[str]] = {}
    for name in live.by_name:
        source = weights.source(name)
        if source is not None:
            targets.setdefault(source, []).append(name)
    reached = {live.aliases.get(name, name) for names in targets.values() for name in names}
    missing = sorted(set(live.stored) - reached)
    unexpected = sorted(set(weights.weight_map) - set(targets))
    problems = _find_misfits(module, weights, live.by_name, targets, assign)
    if strict and missing:
        problems.append(f"missing in it: {describe_names(missing, unexpected)}")
    if strict and unexpected:
        problems.append(f"not in the model: {describe_names(unexpected, missing)}")
    if problems:
        raise MisfitError(f"{weights.path} does not fit the model: {'; '.join(problems[:8])}")
    if assign:
        _assign(module, weights, targets, live.aliases, device)
    else:
        _copy(module, weights, targets, live.by_name, device)
    for tensor in module.state_dict(keep_vars=True).values():
        if isinstance(tensor, torch.Tensor):
            # transformers initialises what does not carry this flag
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    return LoadReport(missing, unexpected)


def _find_misfits(
    module: nn.Module,
    weights: Weights,
    live: Mapping[str, torch.Tensor],
    targets: Mapping[str, list[str]],
    assign: bool,
) -> list[str]:
    problems = []
    real_names = _real_names(module)
    for source, tensor in weights.items(targets):
        for name in targets[source]:
            if tensor.shape != live[name].shape:
                problems.append(
                    f"{name} is {list(tensor.shape)} there, {list(live[name].shape)} here"
                )
            owner = type(module.get_submodule(real_names[name].rpartition(".")[0]))
            if is_quantized(tensor) and owner not in (nn.Linear, nn.Embedding):
                problems.append(
                    f"{name} is quantized there and belongs to a {owner.__name__} here; only "
                    "nn.Linear can take it"
                )
    meta = [name for names in targets.values() for name in names if live[name].is_meta]
    if meta and not assign:
        problems.append(
            f"still on the meta device here (assign=True gives them values): {describe_names(meta)}"
        )
    return problems


def _real_names(module: nn.Module) -> dict[str, str]:
    """By stored name: what the module itself calls it."""
    return {clean_name(name): name for name in module.state_dict(keep_vars=True)}


@torch.no_grad()
def _copy(
    module: nn.Module,
    weights: Weights,
    targets: Mapping[str, list[str]],
    live: Mapping[str, torch.Tensor],
    device: str | torch.device,
) -> None:
    real_names = _real_names(module)
    for source, tensor in weights.items(targets):
        if is_quantized(tensor):
            for name in targets[source]:
                new = move(tensor, live[name].device, live[name].dtype)
                path, _, leaf = real_names[name].rpartition(".")
                setattr(module.get_submodule(path), leaf, nn.Parameter(new, requires_grad=False))
            continue
        moved = tensor.to(device)
        for name in targets[source]:
            live[name].copy_(moved)


def _assign(
    module: nn.Module,
    weights: Weights,
    targets: Mapping[str, list[str]],
    aliases: Mapping[str, str],
    device: str | torch.device,
) -> None:
    state = module.state_dict(keep_vars=True)
    real_names = _real_names(module)
    adopted: dict[str, torch.Tensor] = {}
    taken: dict[str, Any] = {}
    for source, tensor in weights.items(targets):
        for name in targets[source]:
            canonical = aliases.get(name, name)
            current = state[real_names[name]]
            if canonical not in adopted:
                new = move(tensor, device)
                if isinstance(current, nn.Parameter):
                    trains = current.requires_grad and not is_quantized(new)
                    new = nn.Parameter(new, requires_grad=trains)
                adopted[canonical] = new
            taken[real_names[name]] = adopted[canonical]
    # A tie of which the files hold one name: its other names take the same tensor.
    for name, canonical in aliases.items():
        if canonical in adopted:
            taken[real_names[name]] = adopted[canonical]
    module.load_state_dict(taken, strict=False, assign=True)
