"""Foreign state as JSON: the state dicts of other libraries hold tensors, arrays and bytes.

Owns: a lossless encoding of such state into plain JSON values, and its inverse.
Does not own: what is in the state. Nothing is unpickled.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from headway.errors import ConfigError

_TAG = "__headway__"


def encode(value: Any) -> Any:
    """Plain JSON values for `value`; raises ConfigError for what has no such form."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: encode(item) for key, item in value.items()}
        return {_TAG: "dict", "items": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [encode(item) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "data": base64.b64encode(value).decode("ascii")}
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return _encode_array("array", value)
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        return _encode_array("tensor", value.detach().cpu().numpy())
    raise ConfigError(
        f"the data's state_dict holds a {type(value).__name__}, which cannot be stored; "
        "allowed: numbers, strings, bytes, lists, tuples, dicts, arrays, tensors"
    )


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    if kind == "dict":
        return {decode(key): decode(item) for key, item in value["items"]}
    if kind == "tuple":
        return tuple(decode(item) for item in value["items"])
    if kind == "bytes":
        return base64.b64decode(value["data"])
    raw = np.frombuffer(base64.b64decode(value["data"]), dtype=value["dtype"])
    array = raw.reshape(value["shape"]).copy()
    if kind == "array":
        return array
    import torch

    return torch.from_numpy(array)


def _encode_array(kind: str, array: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {
        _TAG: kind,
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii"),
    }
