"""Weights of one folder into the shards of another, in another dtype, one tensor at a time.

Owns: the copy, of which no more than a tensor is in memory. Does not own: the folder around the
shards (draft.py), exports of weights that are in memory (export.py).
"""

from __future__ import annotations

import torch

from headway.checkpoint.draft import Draft
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.export import DTYPES
from headway.checkpoint.tensors import MAX_SHARD_BYTES, TensorFile, TensorSpec, index_text, spec_of
from headway.checkpoint.weights import QuantizedWeights, Weights
from headway.models.shards import index_name, plan_shards, shard_name


def write_cast(
    draft: Draft,
    weights: Weights,
    dtype: str | None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Write all weights to a draft, floating-point ones in `dtype`; returns the files' names.

    A value that the dtype cannot hold is an error that names the tensor.
    """
    if isinstance(weights, QuantizedWeights):
        raise CheckpointError(f"{weights.path} holds quantized weights, which have no other dtype")
    specs = _plan(weights, None if dtype is None else DTYPES[dtype])
    sizes = {name: spec.num_bytes for name, spec in specs.items()}
    shards = plan_shards(sizes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = shard_name(number, len(shards))
        part = {name: specs[name] for name in names}
        path = draft.directory / file_name
        with TensorFile(draft.storage, path, part, draft.digest) as file:
            for name in file.order:
                ((_, tensor),) = weights.items([name])
                file.write(name, _cast(name, tensor, specs[name].dtype))
        draft.files[file_name] = file.record
        weight_map.update(dict.fromkeys(names, file_name))
    draft.write_bytes(index_name(), index_text(weight_map, sum(sizes.values()), weights.aliases))
    return [*dict.fromkeys(weight_map.values()), index_name()]


def _plan(weights: Weights, dtype: torch.dtype | None) -> dict[str, TensorSpec]:
    specs = {}
    # The files are mapped: a tensor's values are not read before they are used.
    for name, tensor in weights.items(weights.weight_map):
        spec = spec_of(tensor, name)
        if dtype is not None and tensor.is_floating_point():
            spec = TensorSpec(dtype, spec.shape)
        specs[name] = spec
    return specs


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype == dtype:
        return tensor
    cast = tensor.to(dtype)
    if not bool(cast.isfinite().all()) and bool(tensor.isfinite().all()):
        raise CheckpointError(
            f"tensor {name!r} has values that {str(dtype).removeprefix('torch.')} cannot hold; "
            "choose another dtype"
        )
    return cast
