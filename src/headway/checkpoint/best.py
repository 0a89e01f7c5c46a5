"""Which of two checkpoints is better.

Owns: finding the ranking metric among evaluation results and comparing two of its values.
Does not own: how many of the best are kept (retention.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def lookup_metric(metrics: Mapping[str, Any], key: str) -> float | None:
    """The value of `key`, else of `eval_<key>`, else of `key` without `eval_`; None if absent."""
    for name in (key, f"eval_{key}", key.removeprefix("eval_")):
        value = metrics.get(name)
        if value is not None:
            return float(value)
    return None


def is_better(candidate: float, current: float | None, *, greater_is_better: bool) -> bool:
    """Whether `candidate` beats `current`; NaN beats nothing and an equal value does not win."""
    if math.isnan(candidate):
        return False
    if current is None or math.isnan(current):
        return True
    return candidate > current if greater_is_better else candidate < current
