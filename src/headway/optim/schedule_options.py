"""The options of schedules: their spellings, what each may be, and which schedule takes which.

Owns the check of `lr_scheduler_kwargs` and its errors. Does not own the curves (schedules.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from headway.errors import ConfigError, unknown
from headway.optim.curves import DECAY_TYPES, WARMUP_TYPES

# Other spellings, most of them Hugging Face's.
_SAME = {
    "min_lr_rate": "min_ratio",
    "min_lr_ratio": "min_ratio",
    "lr_end": "min_lr",
    "num_decay_steps": "decay_steps",
    "num_stable_steps": "stable_steps",
}
FLOORS = ("min_ratio", "min_lr")
WARMUPS = ("warmup_type", "warmup_start")
_RATIOS = ("min_ratio", "warmup_start", "warmup_lr_rate", "decay_ratio", "constant_ratio")
_LENGTHS = ("decay_steps", "stable_steps", "cooldown_steps", "decay_start")
_ABOVE_ZERO = ("num_cycles", "power", "timescale", "constant_lr", "warmup_lr_rate")
_NAMES = {
    "warmup_type": WARMUP_TYPES,
    "decay_type": DECAY_TYPES,
    # The exponential goes to the floor, and a cool-down ends above it.
    "cooldown_type": tuple(kind for kind in DECAY_TYPES if kind != "exponential"),
}


def read_options(
    kind: str, given: Mapping[str, Any], allowed: Collection[str], unit: str
) -> dict[str, Any]:
    """The options of a schedule by their own names; every mistake is told at once.

    Lengths are named after the unit: `decay_steps`, or `decay_tokens` where tokens are counted.
    """
    problems: list[str] = []
    options: dict[str, Any] = {}
    shown = [_in_unit(name, unit) for name in allowed]
    shown += [
        _in_unit(other, unit)
        for other, name in _SAME.items()
        if name in allowed and _in_unit(other, unit) not in shown
    ]
    for key, value in given.items():
        name = _canonical(key, unit)
        if name not in allowed:
            problems.append(_say_unknown(kind, key, shown, unit))
        elif name in options:
            problems.append(f"lr_scheduler_kwargs: {key} is a second spelling of an option given")
        elif value is not None:  # None is Hugging Face's word for an option that is not given
            problem = _check(name, value)
            if problem is not None:
                problems.append(f"lr_scheduler_kwargs.{key} {problem}, got {value!r}")
            options[name] = value
    for one, other in (FLOORS, ("constant_ratio", "constant_lr"), ("decay_steps", "decay_ratio")):
        if one in options and other in options:
            problems.append(
                f"lr_scheduler_kwargs: {_in_unit(one, unit)} and {other} say the same thing; "
                f"give one of them"
            )
    if problems:
        raise ConfigError(problems)
    return options


def _in_unit(name: str, unit: str) -> str:
    return name.replace("_steps", f"_{unit}")


def _canonical(key: str, unit: str) -> str:
    name = str(key)
    if unit != "steps":
        if name.endswith("_steps"):
            return ""  # a count of steps means nothing on a curve over tokens
        name = name.replace(f"_{unit}", "_steps")
    return _SAME.get(name, name)


def _say_unknown(kind: str, key: str, shown: list[str], unit: str) -> str:
    if not shown:
        return f"lr_scheduler_kwargs: the schedule {kind!r} takes no options, got {key!r}"
    in_unit = _in_unit(str(key), unit)
    if in_unit != key and in_unit in shown:
        return (
            f"lr_scheduler_kwargs.{key}: lr_scheduler_unit={unit!r} counts {unit}; give {in_unit}"
        )
    return "lr_scheduler_kwargs: " + unknown(f"option of {kind!r}", str(key), shown)


def _check(name: str, value: Any) -> str | None:
    """What is wrong with a value, if anything."""
    if name in _NAMES:
        if value in _NAMES[name]:
            return None
        return f"is unknown: {unknown(name, str(value), _NAMES[name])}"
    if name == "schedules":
        fits = isinstance(value, list | tuple) and len(value) > 0
        return None if fits else "must be a list of schedules"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "must be a number"
    if name in _LENGTHS and (value < 0 or int(value) != value):
        return "must be a whole number and not negative"
    if name in _RATIOS and not 0 <= value <= 1:
        return "must lie in [0, 1]"
    if name in _ABOVE_ZERO and value <= 0:
        return "must be above 0"
    return "must not be negative" if value < 0 else None
