"""Values as strict JSON can hold them.

Owns: what becomes of NaN, infinities, tensors, arrays and other objects. Does not own: the text.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any

_DEEPEST = 32


def plain_value(value: Any, _depth: int = 0) -> Any:
    """A value as JSON can hold it. NaN and infinities become text, so do unknown objects.

    A tensor or array becomes a number or a list of numbers; reading one may wait for the device.
    """
    if value is None or (isinstance(value, bool | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return plain_value(value.value, _depth)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if _depth > _DEEPEST:
        return str(type(value).__name__)
    if isinstance(value, Mapping):
        return {str(key): plain_value(item, _depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item, _depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return [plain_value(item, _depth + 1) for item in sorted(value, key=str)]
    as_list = getattr(value, "tolist", None)
    if callable(as_list) and not isinstance(value, type):
        if hasattr(value, "detach"):
            value = value.detach()
            as_list = value.tolist
        return plain_value(as_list(), _depth + 1)
    return str(value)
