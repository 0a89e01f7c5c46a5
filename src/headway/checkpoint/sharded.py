"""Sharded weights step by step: plan an index, write each part, read it back.

Owns: the functions for callers that place tensors themselves, such as one pipeline stage per rank.
Does not own: a whole checkpoint in one call (api.py), the commit of what is written here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.checkpoint.jsonfile import read_json_object
from headway.checkpoint.meta import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME
from headway.checkpoint.model import collect_model
from headway.checkpoint.storage import Storage, check_name
from headway.checkpoint.tensors import MAX_SHARD_BYTES, num_bytes, write_tensor_file
from headway.checkpoint.weights import load_into, open_index, unwrap
from headway.errors import ConfigError
from headway.models.shards import plan_shards, shard_name

ShardIndex = dict[str, Any]
StateDictLike = nn.Module | Mapping[str, torch.Tensor]

logger = logging.getLogger(__name__)


def refuse_pickles(safetensors: bool) -> None:
    """No pickle is written here."""
    if not safetensors:
        raise ConfigError(
            "safetensors=False is not written: a pickled file can run code when it is read; to "
            "make one for another tool: headway checkpoint convert SRC DST --to bin"
        )


def named_tensors(module: StateDictLike) -> dict[str, torch.Tensor]:
    """The tensors to store, tied ones once for a module; a dict is taken as it is."""
    if isinstance(module, nn.Module):
        return collect_model(unwrap(module)).stored
    return dict(module)


def make_shard_index(
    state_dictionaries: Sequence[Mapping[str, torch.Tensor]],
    metadata: Mapping[str, Any] | None = None,
    safetensors: bool = True,
    max_shard_size: int = MAX_SHARD_BYTES,
    param_sharing_metadata: Sequence[Sequence[str]] | None = None,
) -> ShardIndex:
    """Plan which file each tensor goes to; two dicts never share one. Meta tensors will do.

    Of a group of names that share a tensor, the first that is there is stored, and the others are
    recorded in the metadata.
    """
    refuse_pickles(safetensors)
    if max_shard_size < 1:
        raise ConfigError(f"max_shard_size is {max_shard_size}; allowed: at least 1 byte")
    shards: list[list[str]] = []
    total_bytes = 0
    placed: set[str] = set()
    aliases: dict[str, str] = {}
    for tensors in state_dictionaries:
        twice = placed & set(tensors)
        if twice:
            raise ConfigError(f"{sorted(twice)[0]!r} is in more than one of the state dictionaries")
        placed.update(tensors)
        own = {name: t for name, t in tensors.items() if name not in aliases}
        for group in param_sharing_metadata or []:
            there = [name for name in group if name in own]
            aliases.update(dict.fromkeys(there[1:], there[0]))
        own = {name: t for name, t in own.items() if name not in aliases}
        sizes = {name: num_bytes(own[name]) for name in sorted(own)}
        shards += plan_shards(sizes, max_shard_size)
        total_bytes += sum(sizes.values())
    files = {
        name: shard_name(number, len(shards))
        for number, names in enumerate(shards, start=1)
        for name in names
    }
    described: dict[str, Any] = {**(metadata or {}), "total_size": total_bytes}
    if param_sharing_metadata:
        described["param_sharing"] = [list(group) for group in param_sharing_metadata]
        described["headway_aliases"] = dict(sorted(aliases.items()))
    return {"metadata": described, "weight_map": dict(sorted(files.items()))}


def index_file_name(safetensors: bool = True) -> str:
    """The name of the index file."""
    return SAFE_WEIGHTS_INDEX_NAME if safetensors else WEIGHTS_INDEX_NAME


def encode_index(shard_index: ShardIndex) -> bytes:
    """The index as it is stored."""
    try:
        return json.dumps(shard_index, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metadata: only JSON values can be stored: {error}") from error


def save_shard_index(
    shard_index: ShardIndex, output_dir: str | Path, safetensors: bool = True
) -> None:
    """Write the index file, new; after the shards, so that it never names what is not there."""
    refuse_pickles(safetensors)
    storage = Storage(output_dir)
    storage.make_root()
    storage.write_bytes(storage.root / index_file_name(safetensors), encode_index(shard_index))
    storage.sync_dir(storage.root)


def load_shard_index(model_dir: str | Path, safetensors: bool = True) -> ShardIndex:
    """Read an index file."""
    return read_json_object(Path(model_dir) / index_file_name(safetensors))


def shard_parts(
    shard_index: ShardIndex, module: StateDictLike
) -> dict[str, dict[str, torch.Tensor]]:
    """The module's tensors that the index names, by file; each file is whole or not touched."""
    tensors = named_tensors(module)
    if isinstance(module, nn.Module):
        tensors = {**collect_model(unwrap(module)).by_name, **tensors}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    lacking: dict[str, str] = {}
    for name, file_name in shard_index["weight_map"].items():
        if name in tensors:
            parts.setdefault(check_name(file_name), {})[name] = tensors[name]
        else:
            lacking[file_name] = name
    for file_name in parts:
        if file_name in lacking:
            raise ConfigError(
                f"{file_name} needs {lacking[file_name]!r}, which this part does not hold; plan "
                "the index with one dictionary per part"
            )
    return parts


def save_sharded_checkpoint(
    output_dir: str | Path,
    shard_index: ShardIndex,
    module: StateDictLike,
    safetensors: bool = True,
    debug: bool = False,
) -> None:
    """Write the files whose tensors this module holds; the index is written by its own function."""
    refuse_pickles(safetensors)
    storage = Storage(output_dir)
    storage.make_root()
    for file_name, part in shard_parts(shard_index, module).items():
        if debug:
            log_weights(file_name, part)
        write_tensor_file(storage, storage.root / file_name, part)
    storage.sync_dir(storage.root)


def log_weights(file_name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """One log line per tensor."""
    for name, tensor in tensors.items():
        logger.info("%s: %s %s %s", file_name, name, tensor.dtype, list(tensor.shape))


def load_sharded_checkpoint(
    model_dir: str | Path,
    shard_index: ShardIndex,
    module: nn.Module | None = None,
    device: str | torch.device = "cpu",
    safetensors: bool = True,
    strict: bool = True,
    assign: bool = False,
    debug: bool = False,
    keys: Collection[str] | None = None,
    *,
    allow_legacy: bool = False,
) -> set[str] | dict[str, torch.Tensor]:
    """Into a module: the names it has and the files do not. Without one: the tensors."""
    weights = open_index(
        Path(model_dir), shard_index, safetensors=safetensors, allow_legacy=allow_legacy
    )
    if debug:
        for name, file_name in sorted(weights.weight_map.items()):
            logger.info("%s: %s", file_name, name)
    if module is None:
        return weights.read(keys, device)
    report = load_into(unwrap(module), weights, device=device, strict=strict, assign=assign)
    return set(report.missing_keys)
