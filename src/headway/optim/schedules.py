"""Learning-rate schedules: pure functions from steps done to a factor of the base rate.

Owns the curves. Each is clamped past its end, is never negative, and its first warm-up step is
above zero. Does not own the optimizer that the factor is applied to.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

from headway.errors import ConfigError, unknown

Schedule = Callable[[int], float]
Decay = Callable[..., float]


def _linear(progress: float, *, min_ratio: float = 0.0) -> float:
    return min_ratio + (1 - min_ratio) * (1 - progress)


def _cosine(progress: float, *, min_ratio: float = 0.0, num_cycles: float = 0.5) -> float:
    wave = 0.5 * (1 + math.cos(2 * math.pi * num_cycles * progress))
    return min_ratio + (1 - min_ratio) * wave


def _polynomial(progress: float, *, power: float = 1.0, min_ratio: float = 0.0) -> float:
    return float(min_ratio + (1 - min_ratio) * (1 - progress) ** power)


# Curves over the part after warm-up, from 0 to 1.
_DECAYS: dict[str, Decay] = {"linear": _linear, "cosine": _cosine, "polynomial": _polynomial}
SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt", *_DECAYS)


def make_schedule(
    kind: str, *, total_steps: int | None, warmup_steps: int = 0, **options: float
) -> Schedule:
    """The schedule of a name. `total_steps` may be None where the curve does not need it."""
    kind = str(getattr(kind, "value", kind))
    if kind not in SCHEDULES:
        raise ConfigError("lr_scheduler_type: " + unknown("schedule", kind, SCHEDULES))
    if warmup_steps < 0:
        raise ConfigError(f"warmup_steps must not be negative, got {warmup_steps}")
    if total_steps is not None and warmup_steps > total_steps:
        raise ConfigError(
            f"warmup_steps={warmup_steps} is longer than the training of {total_steps} steps"
        )
    if kind in _DECAYS:
        _check_options(kind, options)
        return _with_decay(kind, _DECAYS[kind], total_steps, warmup_steps, options)
    if options:
        raise ConfigError(
            f"lr_scheduler_kwargs: the schedule {kind!r} takes no options, got {sorted(options)}"
        )
    if kind == "inverse_sqrt":
        scale = max(1, warmup_steps)
        return lambda step: (
            _warmup(step, warmup_steps)
            if step < warmup_steps
            else math.sqrt(scale / (scale + step - warmup_steps))
        )
    return lambda step: _warmup(step, warmup_steps) if step < warmup_steps else 1.0


def _warmup(step: int, warmup_steps: int) -> float:
    # (step + 1): the first update moves, and the last warm-up step has the full rate.
    return min(1.0, (step + 1) / warmup_steps)


def _with_decay(
    kind: str,
    decay: Decay,
    total_steps: int | None,
    warmup_steps: int,
    options: dict[str, float],
) -> Schedule:
    if total_steps is None:
        raise ConfigError(
            f"lr_scheduler_type={kind!r} needs to know how many steps the training has: give "
            f"max_steps (or train_for in steps), or use 'constant_with_warmup'"
        )
    length = max(1, total_steps - warmup_steps)

    def schedule(step: int) -> float:
        if step < warmup_steps:
            return _warmup(step, warmup_steps)
        return max(0.0, decay(min(1.0, (step - warmup_steps) / length), **options))

    return schedule


def _check_options(kind: str, options: dict[str, float]) -> None:
    allowed = [
        p.name
        for p in inspect.signature(_DECAYS[kind]).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    ]
    problems = []
    for key, value in options.items():
        if key not in allowed:
            problems.append("lr_scheduler_kwargs: " + unknown(f"option of {kind!r}", key, allowed))
        elif isinstance(value, bool) or not isinstance(value, int | float):
            problems.append(f"lr_scheduler_kwargs.{key} must be a number, got {value!r}")
    if problems:
        raise ConfigError(problems)
