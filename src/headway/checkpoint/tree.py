"""Nested state as JSON plus named tensors, and back, exactly.

Owns: the encoding. Ordinary JSON values stand for themselves; anything else is an object with one
key that starts with `$` (`{"$tuple": [...]}`, `{"$tensor": "a/b"}`, `{"$float": "nan"}`).
Does not own: the files (writer.py, reader.py). Nothing here can run code: there is no pickle.
"""

from __future__ import annotations

import base64
import collections
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.tensors import why_not_storable
from headway.errors import ConfigError

_ALLOWED = (
    "dict, list, tuple, set, deque, int, float, bool, str, bytes, None, "
    "torch tensors and numpy arrays and scalars"
)
_PLAIN_INT = 2**63  # beyond it JSON readers lose digits, and Python limits decimal conversion
_NUMPY_KINDS = "biufcmM"

_PAIR_TYPES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "$dict": dict,
    "$ordered": collections.OrderedDict,
    "$counter": lambda pairs: collections.Counter(dict(pairs)),
}
_LIST_TYPES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
}


def _stands_for_itself(value: Any) -> bool:
    """Whether JSON has it. Asked before all else: long histories are made of these."""
    kind = type(value)
    if kind is float:
        return math.isfinite(value)
    if kind is int:
        return bool(-_PLAIN_INT <= value < _PLAIN_INT)
    return kind is str or kind is bool or value is None


def has_plain_keys(value: dict[Any, Any]) -> bool:
    """Whether a JSON object can have these keys as they are."""
    return all(type(key) is str and not key.startswith("$") for key in value)


class _Splitter:
    def __init__(self, what: str) -> None:
        self.what = what
        self.tensors: dict[str, torch.Tensor] = {}
        self._open: set[int] = set()
        self._plain_keys: set[tuple[str, ...]] = set()

    def refuse(self, path: tuple[str, ...], reason: str) -> ConfigError:
        where = f"key {'.'.join(path)}" if path else "the whole state"
        return ConfigError(f"{self.what}: {where} {reason}; only {_ALLOWED} can be saved")

    def store(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        base = "/".join(path) or "value"
        name, number = base, 1
        while name in self.tensors:
            number += 1
            name = f"{base}#{number}"
        self.tensors[name] = tensor
        return name

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        if _stands_for_itself(value):
            return value
        if isinstance(value, np.generic):
            self.check_numpy(value.dtype, path)
            data = base64.b64encode(value.tobytes()).decode()
            return {"$scalar": [value.dtype.str, data]}
        if isinstance(value, np.ndarray):
            self.check_numpy(value.dtype, path)
            raw = torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy())
            return {"$array": [self.store(raw, path), value.dtype.str, list(value.shape)]}
        if isinstance(value, torch.Tensor):
            reason = why_not_storable(value)
            if reason:
                raise self.refuse(path, f"is a tensor that cannot be stored ({reason})")
            return {"$tensor": self.store(value.detach(), path)}
        kind = type(value)
        if kind is int:
            return {"$int": hex(value)}
        if kind is float:
            # repr drops the sign of a NaN
            return {"$float": ("-" if math.copysign(1, value) < 0 else "") + repr(abs(value))}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        return self.encode_container(value, kind, path)

    def encode_container(self, value: Any, kind: type, path: tuple[str, ...]) -> Any:
        if id(value) in self._open:
            raise self.refuse(path, "contains itself")
        self._open.add(id(value))
        try:
            if kind is dict:
                if self.keys_are_plain(value):
                    return {
                        key: item if _stands_for_itself(item) else self.encode(item, (*path, key))
                        for key, item in value.items()
                    }
                return {"$dict": self.encode_pairs(value, path)}
            if kind is collections.OrderedDict:
                return {"$ordered": self.encode_pairs(value, path)}
            if kind is collections.Counter:
                return {"$counter": self.encode_pairs(value, path)}
            if kind is collections.deque:
                return {"$deque": [self.encode_items(value, path), value.maxlen]}
            if kind is list:
                return self.encode_items(value, path)
            if kind is tuple:
                return {"$tuple": self.encode_items(value, path)}
            if kind is set or kind is frozenset:
                return {f"${kind.__name__}": self.encode_items(value, path)}
            raise self.refuse(path, f"is a {kind.__module__}.{kind.__qualname__}")
        finally:
            self._open.discard(id(value))

    def keys_are_plain(self, value: dict[Any, Any]) -> bool:
        """The same as `has_plain_keys`; many objects of a state have the same keys."""
        keys = tuple(value)
        if keys in self._plain_keys:
            return True
        if not has_plain_keys(value):
            return False
        self._plain_keys.add(keys)
        return True

    def encode_items(self, items: Iterable[Any], path: tuple[str, ...]) -> list[Any]:
        return [self.encode(item, (*path, str(number))) for number, item in enumerate(items)]

    def encode_pairs(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> list[list[Any]]:
        pairs = []
        for key, item in value.items():
            if isinstance(key, torch.Tensor):
                raise self.refuse(path, "has a tensor as a key")
            inner = (*path, str(key))
            pairs.append([self.encode(key, inner), self.encode(item, inner)])
        return pairs

    def check_numpy(self, dtype: np.dtype[Any], path: tuple[str, ...]) -> None:
        if dtype.kind not in _NUMPY_KINDS:
            raise self.refuse(path, f"is a numpy value of dtype {dtype}")


def split_tree(
    state: Any, *, what: str = "state", path: tuple[str, ...] = ()
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Encode `state` as a JSON value and the tensors it refers to.

    A leaf that cannot be stored is a `ConfigError` that opens with `what` and names the leaf, from
    `path` on.
    """
    splitter = _Splitter(what)
    return splitter.encode(state, path), splitter.tensors


def join_tree(encoded: Any, tensors: Mapping[str, torch.Tensor], *, what: str = "state") -> Any:
    """The state that `split_tree` was given; tensors come back on the CPU.

    What cannot be decoded is a `CheckpointError` that opens with `what`.
    """
    try:
        return _join(encoded, tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{what} {error}") from error
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deeply to be read") from None


def _join(encoded: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(encoded, list):
        return [_join(item, tensors) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if len(encoded) == 1:
        tag, payload = next(iter(encoded.items()))
        if tag.startswith("$"):
            try:
                return _join_tagged(tag, payload, tensors)
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"has a malformed {tag} entry: {error!r}") from error
    return {key: _join(item, tensors) for key, item in encoded.items()}


def _join_tagged(tag: str, payload: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if tag in _LIST_TYPES:
        return _LIST_TYPES[tag](_join(item, tensors) for item in payload)
    if tag in _PAIR_TYPES:
        return _PAIR_TYPES[tag](
            (_join(key, tensors), _join(item, tensors)) for key, item in payload
        )
    match tag:
        case "$tensor":
            return tensors[payload]
        case "$float":
            return float(payload)
        case "$int":
            return int(payload, 16)
        case "$bytes":
            return base64.b64decode(payload)
        case "$deque":
            items, maxlen = payload
            return collections.deque(_join(items, tensors), maxlen)
        case "$scalar":
            dtype, data = payload
            return np.frombuffer(base64.b64decode(data), dtype=_numpy_dtype(dtype))[0]
        case "$array":
            name, dtype, shape = payload
            raw = tensors[name].numpy().tobytes()
            return np.ndarray(shape, dtype=_numpy_dtype(dtype), buffer=raw).copy()
        case _:
            raise ValueError("unknown tag")


def _numpy_dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"numpy dtype {text} is not allowed")
    return dtype
