"""The rules on the learning-rate schedule: its name, its unit and its warm-up.

Owns: what arguments alone can tell. Does not own: the options of a schedule (optim), nor a length
that only the data tells.
"""

from __future__ import annotations

from typing import Any

from headway.config.duration import Duration
from headway.config.rules import Rule
from headway.config.rules_pairs import parse_or_none
from headway.config.rules_values import LR_SCHEDULES, REFUSED_SCHEDULES, SCHEDULE_UNITS, one_of


def _schedule_name(args: Any) -> str | None:
    value = args.lr_scheduler_type
    if value in REFUSED_SCHEDULES:
        return f"lr_scheduler_type={str(value)!r} {REFUSED_SCHEDULES[value]}"
    return one_of("lr_scheduler_type", LR_SCHEDULES)(args)


def _one_warmup(args: Any) -> str | None:
    counts = [f"warmup_{unit}" for unit in ("steps", "tokens") if getattr(args, f"warmup_{unit}")]
    if not counts or not args.warmup_ratio:
        return None
    return f"{counts[0]} and warmup_ratio each set the length of the warm-up; give one of them"


def _warmup_unit(args: Any) -> str | None:
    unit = args.lr_scheduler_unit
    other = {"steps": "tokens", "tokens": "steps"}.get(unit)
    if other is None or not getattr(args, f"warmup_{other}"):
        return None
    given = f"warmup_{other}={getattr(args, f'warmup_{other}')}"
    return (
        f"{given} counts {other}, but lr_scheduler_unit={unit!r} counts {unit}: give warmup_{unit} "
        f"or warmup_ratio, or set lr_scheduler_unit={other!r}"
    )


def _warmup_beyond_end(args: Any) -> str | None:
    unit, whole = args.lr_scheduler_unit, parse_or_none(args.train_for)
    if whole is None and args.max_steps > 0:
        whole = Duration.steps(args.max_steps)
    if whole is None or whole.unit != unit:
        return None
    warmup = getattr(args, f"warmup_{unit}")
    if warmup <= whole.value:
        return None
    return f"warmup_{unit}={warmup} is longer than the training of {whole.value} {unit}"


# fmt: off
RULES: list[Rule] = [
    Rule("H48", ("lr_scheduler_type",), "args",
         f"lr_scheduler_type is one of {', '.join(LR_SCHEDULES)}.", _schedule_name),
    Rule("H80", ("warmup_ratio", "warmup_steps", "warmup_tokens"), "args",
         "The warm-up is given by a count or by a ratio.", _one_warmup),
    Rule("H81", ("lr_scheduler_unit", "warmup_steps", "warmup_tokens"), "args",
         "The warm-up is counted in the unit of the schedule.", _warmup_unit),
    Rule("H82", ("warmup_steps", "warmup_tokens", "max_steps", "train_for"), "args",
         "The warm-up is no longer than the training.", _warmup_beyond_end),
    Rule("H83", ("lr_scheduler_unit",), "args",
         f"lr_scheduler_unit is one of {', '.join(SCHEDULE_UNITS)}.",
         one_of("lr_scheduler_unit", SCHEDULE_UNITS)),
]
# fmt: on
