"""A nested batch as one run of bytes, to be handed from one rank to another.

Owns: the form that travels: a JSON header, then the raw bytes of every tensor. Does not own:
sending it (feeding). Nothing is pickled, so a rank runs nothing that another rank sent.
"""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.errors import ConfigError

# So that every tensor may be read in place: no element is wider.
_ALIGNMENT_BYTES = 16
_PLAIN = (bool, int, float, str, type(None))


def pack(value: Any) -> Tensor:
    """The value as bytes. It may hold dicts, lists, tuples, tensors, arrays and plain values."""
    tensors: list[Tensor] = []
    tree = _describe(value, tensors)
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size = _align(size + tensor.numel() * tensor.element_size())
    header = {
        "tree": tree,
        "tensors": [
            [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset]
            for tensor, offset in zip(tensors, offsets)
        ],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    start = _align(8 + len(text))
    parcel = torch.zeros(start + size, dtype=torch.uint8)
    view = parcel.numpy()
    view[:8] = np.frombuffer(len(text).to_bytes(8, "little"), np.uint8)
    view[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
    for tensor, offset in zip(tensors, offsets):
        width = tensor.numel() * tensor.element_size()
        place = parcel[start + offset : start + offset + width]
        place.view(tensor.dtype).copy_(tensor.reshape(-1))
    return parcel


def unpack(parcel: Tensor) -> Any:
    """The inverse of `pack`; the tensors share the parcel's memory."""
    size = int.from_bytes(parcel[:8].numpy().tobytes(), "little")
    header = json.loads(parcel[8 : 8 + size].numpy().tobytes())
    start = _align(8 + size)
    tensors = []
    for name, shape, offset in header["tensors"]:
        dtype = getattr(torch, name)
        width = torch.Size(shape).numel() * dtype.itemsize
        raw = parcel[start + offset : start + offset + width]
        tensors.append(raw.view(dtype).reshape(shape))
    return _restore(header["tree"], tensors)


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    """JSON for the shape of a value: plain values as they are, all else as [kind, ...]."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise _refuse(f"tensor of layout {value.layout}, dtype {value.dtype}")
        tensors.append(value.detach().cpu())
        return ["tensor", len(tensors) - 1]
    if isinstance(value, np.generic):
        return ["scalar", *_describe(np.asarray(value), tensors)[1:]]
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise _refuse(f"numpy array of dtype {value.dtype}")
        tensors.append(torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape))
        return ["array", len(tensors) - 1]
    if isinstance(value, Mapping):
        if not all(isinstance(key, _PLAIN) for key in value):
            raise _refuse("dict whose keys are not plain values")
        return ["dict", [[key, _describe(item, tensors)] for key, item in value.items()]]
    if isinstance(value, tuple | list):
        items = [_describe(item, tensors) for item in value]
        fields = getattr(value, "_fields", None)
        if fields is not None:
            return ["named", type(value).__name__, list(fields), items]
        return ["tuple" if isinstance(value, tuple) else "list", items]
    raise _refuse(type(value).__name__)


def _refuse(what: str) -> ConfigError:
    return ConfigError(
        f"dispatch_batches: a batch with a {what} cannot be handed to other ranks; allowed: dicts, "
        "lists and tuples of tensors, numpy arrays, numbers and strings. Change the data collator, "
        "or set dispatch_batches=False so that every rank reads its own share"
    )


def _restore(tree: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, *content = tree
    match kind:
        case "tensor":
            return tensors[content[0]]
        case "array":
            return tensors[content[0]].numpy()
        case "scalar":
            return tensors[content[0]].numpy()[()]
        case "dict":
            return {key: _restore(item, tensors) for key, item in content[0]}
        case "named":
            name, fields, items = content
            return namedtuple(name, fields)(*(_restore(item, tensors) for item in items))
        case _:
            items = [_restore(item, tensors) for item in content[0]]
            return tuple(items) if kind == "tuple" else items
