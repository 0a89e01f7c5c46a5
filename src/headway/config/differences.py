"""Where two nested values differ.

Owns: the names of nested values and the comparison. Does not own: what a difference means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ABSENT = "absent"
CIRCUMSTANTIAL = (
    "args.output_dir",
    "args.checkpoint_address",
    "args.logging_dir",
    "args.run_name",
)
"""Values of a run's configuration that do not make another experiment of it."""


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value inside nested mappings and lists of them, under its dotted name."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for number, item in enumerate(value):
            yield from flatten(item, f"{prefix}.{number}")
    else:
        yield prefix, value


def differences(first: Any, second: Any) -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (value in the first, value in the second), for those that differ."""
    left, right = dict(flatten(first)), dict(flatten(second))
    return {
        key: (left.get(key, ABSENT), right.get(key, ABSENT))
        for key in sorted({*left, *right})
        if left.get(key, ABSENT) != right.get(key, ABSENT)
    }
