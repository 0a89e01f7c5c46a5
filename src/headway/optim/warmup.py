"""How long a warm-up is, by count or as a share of the training.

Owns the choice between the two and its errors. Does not own the climb itself (curves.py).
"""

from __future__ import annotations

import math

from headway.errors import ConfigError


def resolve_warmup_steps(
    warmup_steps: int, warmup_ratio: float, total_steps: int | None, *, unit: str = "steps"
) -> int:
    """A positive count wins, else a positive ratio takes its share, rounded down; else 0.

    `unit` is what is counted, `steps` or `tokens`, and names the options in errors.
    """
    count = f"warmup_{unit}"
    problems = []
    if isinstance(warmup_steps, bool) or int(warmup_steps) != warmup_steps or warmup_steps < 0:
        problems.append(f"{count} must be a whole number and not negative, got {warmup_steps!r}")
    if not (math.isfinite(warmup_ratio) and 0 <= warmup_ratio <= 1):
        problems.append(f"warmup_ratio must lie in [0, 1], got {warmup_ratio!r}")
    if problems:
        raise ConfigError(problems)
    if warmup_steps > 0:
        if total_steps is not None and warmup_steps > total_steps:
            raise ConfigError(
                f"{count}={warmup_steps} is longer than the training of {total_steps} {unit}"
            )
        return int(warmup_steps)
    if warmup_ratio > 0:
        if total_steps is None:
            raise ConfigError(
                f"warmup_ratio={warmup_ratio:g} needs to know how many {unit} the training has: "
                f"give its length in {unit}, or {count}"
            )
        return int(warmup_ratio * total_steps)
    return 0
