"""Points of a run at which something changes, as options name them.

Owns: reading such an option, telling whether a run is there, and whether a learning-rate schedule
still ends where the run does. Does not own: what happens at a point (the callbacks).

Points are in steps, tokens or epochs, which all ranks count alike; clocks of ranks differ.
"""

from __future__ import annotations

from typing import Any

from headway.config.duration import Duration
from headway.engine.state import TrainerState
from headway.errors import ConfigError

Point = Duration | str | int
"""How an option names a point: '500 steps', '2B tokens', '1.5 epochs'; a number counts steps."""

COUNTED = ("steps", "tokens", "epochs")
_SLACK = 1e-9  # epochs are sums of fractions


def read_point(option: str, given: Any) -> Duration:
    """The point that an option names; `ConfigError` with the option for what is none."""
    try:
        point = Duration.parse(given)
    except ConfigError as error:
        raise ConfigError(f"{option}: {given!r} given; {error}") from error
    if point.unit not in COUNTED:
        raise ConfigError(
            f"{option}: {given!r} given; allowed: a number of {', '.join(COUNTED)}, which all "
            "ranks count alike, and no time"
        )
    return point


def is_reached(point: Duration, state: TrainerState) -> bool:
    """Whether so much of the run is done."""
    done: float = state.global_step
    if point.unit != "steps":
        done = state.epoch if point.unit == "epochs" else state.num_input_tokens_seen
    return done >= point.value - _SLACK


def run_unit(args: Any) -> str:
    """What the length of a run is given in."""
    if args.train_for is not None:
        return Duration.parse(args.train_for).unit
    return "steps" if args.max_steps > 0 else "epochs"


def require_known_end(args: Any, scheduler: Any, what: str) -> None:
    """Refuse a learning-rate schedule that would end elsewhere than the run does.

    `what` changes the tokens of a step, so that a length in one unit tells nothing in the other.
    """
    specs = getattr(scheduler, "specs", None)
    if not specs or all(spec.describe()["length"] is None for spec in specs):
        return
    of_run, of_rates = run_unit(args), scheduler.unit
    if of_rates == ("tokens" if of_run == "tokens" else "steps") and of_run != "seconds":
        return
    raise ConfigError(
        f"{what}: lr_scheduler_type={str(specs[0].kind)!r} goes by {of_rates} "
        f"(lr_scheduler_unit) and the length of the run is in {of_run}; how many {of_rates} it "
        f"has is not known where steps change their size. Give both in one unit, or use "
        f"'constant_with_warmup'"
    )
