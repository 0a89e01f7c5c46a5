"""Optimizer states that are tensors made of tensors, such as moments in 8 bits.

Owns: the classes that are allowed, their inner tensors by name, and which part of these a rank
holds. Does not own: the state of an optimizer as a whole (optimizer.py).

Such a state keeps its values in blocks of consecutive ones that have one scale. So it can be cut
between two blocks only.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.header import DTYPE_NAMES, StoredTensor
from headway.checkpoint.intake import Destination
from headway.checkpoint.sharding import is_spread, local_offsets, local_tensor
from headway.checkpoint.staged import TensorSlice
from headway.errors import missing_extra

_TABLE = "qmap"
"""An inner tensor that is no part of the values: the same on all ranks."""


class _Kind(NamedTuple):
    module: str
    tensors: tuple[str, ...]
    attributes: tuple[str, ...]


# Nothing else is ever made from what a checkpoint names.
_ALLOWED = {
    "OptimState8bit": _Kind(
        "torchao.optim.subclass_8bit", ("codes", "scale", _TABLE), ("signed", "dtype")
    ),
    "OptimState4bit": _Kind(
        "torchao.optim.subclass_4bit", ("codes", "scale", _TABLE), ("signed", "shape", "dtype")
    ),
    "OptimStateFp8": _Kind("torchao.optim.subclass_fp8", ("codes", "scale"), ("dtype",)),
}


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a state (this rank's part of it) is of one of the classes known here."""
    kind = type(local_tensor(tensor))
    return kind.__name__ in _ALLOWED and kind.__module__ == _ALLOWED[kind.__name__].module


def take_apart(
    value: Tensor, param: Tensor
) -> tuple[dict[str, Any], dict[str, Tensor | TensorSlice]]:
    """What a state is, as a JSON value, and its inner tensors as a checkpoint takes them."""
    local: Any = local_tensor(value)
    kind = _ALLOWED[type(local).__name__]
    described: dict[str, Any] = {"class": type(local).__name__}
    if "signed" in kind.attributes:
        described["signed"] = bool(local.signed)
    described["dtype"] = str(local.dtype).removeprefix("torch.")
    inner: dict[str, Tensor | TensorSlice] = {}
    for name in kind.tensors:
        tensor = getattr(local, name)
        inner[name] = tensor
        if is_spread(param) and name != _TABLE and local.numel() != param.numel():
            shape, offsets = _whole_of(tensor, param, local)
            inner[name] = TensorSlice(tensor, shape, offsets)
    return described, inner


def _whole_of(
    inner: Tensor, param: Tensor, local: Tensor
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of the whole inner tensor, and where this rank's part begins in it."""
    assert is_spread(param)
    offsets = local_offsets(param)
    if inner.shape == local.shape:
        return tuple(param.shape), offsets
    ratio = local.numel() // inner.numel()
    first = offsets[0] * (param.numel() // param.shape[0])
    return (param.numel() // ratio,), (first // ratio,)


def is_description(value: Any) -> bool:
    """Whether a JSON value is what `take_apart` describes a state by."""
    return (
        isinstance(value, dict)
        and value.get("class") in _ALLOWED
        and isinstance(value.get("dtype"), str)
        and ("signed" not in _ALLOWED[value["class"]].attributes or "signed" in value)
    )


def inner_names(described: Mapping[str, Any]) -> tuple[str, ...]:
    """The inner tensors of a described state."""
    return _ALLOWED[described["class"]].tensors


def put_together(
    described: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    param: Tensor,
    current: Any,
    what: str,
) -> tuple[Tensor, list[Destination]]:
    """A state like the described one, and where its inner tensors are to be read to.

    `current`, the state in use, is it where it is of that kind.
    """
    kind = _ALLOWED[described["class"]]
    packed = 2 if described["class"] == "OptimState4bit" else 1
    num_codes, num_scales = (math.prod(stored[name].shape) for name in ("codes", "scale"))
    if num_codes * packed != param.numel() or not num_scales or param.numel() % num_scales:
        raise CheckpointError(
            f"{what}: {num_codes} codes and {num_scales} scales do not fit {param.numel()} values"
        )
    local_param = local_tensor(param)
    device = param.device
    inner: dict[str, Tensor] = {}
    places: dict[str, tuple[int, ...] | None] = {}
    for name in kind.tensors:
        shape, places[name] = _part_of(stored[name], name, param, local_param, what)
        inner[name] = torch.empty(shape, dtype=stored[name].dtype, device=device)
    value = _reuse(current, kind, described, inner)
    if value is None:
        value = _make(described, kind, inner, local_param)
        value = _spread(value, param)
    else:
        inner = {name: getattr(local_tensor(value), name) for name in kind.tensors}
    return value, [Destination(stored[name], inner[name], places[name]) for name in kind.tensors]


def _part_of(
    stored: StoredTensor, name: str, param: Tensor, local: Tensor, what: str
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The shape of this rank's part of an inner tensor, and where it begins if it is a part."""
    if name == _TABLE or not is_spread(param) or local.numel() == param.numel():
        return stored.shape, None
    offsets = local_offsets(param)
    row = math.prod(param.shape[1:])
    ratio = param.numel() // max(1, math.prod(stored.shape))
    first, count = offsets[0] * row, local.numel()
    cut_by_rows = not any(offsets[1:]) and tuple(local.shape[1:]) == tuple(param.shape[1:])
    if not cut_by_rows or not count or first % ratio or count % ratio:
        raise CheckpointError(
            f"{what} was saved in blocks of {ratio} values, which this number of ranks would cut "
            f"through; go on with the number of ranks it was saved with, or leave the optimizer "
            f"out of load_components"
        )
    if stored.shape == tuple(param.shape):
        return tuple(local.shape), offsets
    return (count // ratio,), (first // ratio,)


def _reuse(
    current: Any, kind: _Kind, described: Mapping[str, Any], inner: Mapping[str, Tensor]
) -> Tensor | None:
    if not isinstance(current, Tensor) or not is_wrapped(current):
        return None
    local: Any = local_tensor(current)
    same = type(local).__name__ == described["class"] and all(
        (getattr(local, name).shape, getattr(local, name).dtype, getattr(local, name).device)
        == (inner[name].shape, inner[name].dtype, inner[name].device)
        for name in kind.tensors
    )
    same = same and described.get("signed") in (None, getattr(local, "signed", None))
    return current if same else None


def _make(
    described: Mapping[str, Any], kind: _Kind, inner: Mapping[str, Tensor], local: Tensor
) -> Tensor:
    try:
        cls = getattr(importlib.import_module(kind.module), described["class"])
    except ImportError as error:
        raise missing_extra("torchao", "quant", f"a state of {described['class']}") from error
    dtype = getattr(torch, described["dtype"], None)
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{described['dtype']!r} is no dtype of a {described['class']}")
    values = {"signed": described.get("signed"), "shape": tuple(local.shape), "dtype": dtype}
    made: Tensor = cls(
        *(inner[name] for name in kind.tensors), *(values[name] for name in kind.attributes)
    )
    return made


def _spread(value: Tensor, param: Tensor) -> Tensor:
    if not is_spread(param):
        return value
    from headway.optim.low_bit import spread_like

    return spread_like(value, param)
