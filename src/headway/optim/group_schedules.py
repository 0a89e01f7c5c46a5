"""Which schedule each param group has: the run's, or one of its own.

Owns: from arguments to `ScheduleSpec`, and the meaning of `lr_scheduler` in the config of an
optimizer group. Does not own the curves (schedules.py) nor the optimizer. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from headway.args import TrainingArguments
from headway.errors import ConfigError, unknown
from headway.optim.schedules import ScheduleSpec
from headway.optim.warmup import resolve_warmup_steps

GROUP_KEY = "lr_scheduler"
# Where an update's tokens are not known, the warm-up's first one counts for this part of it.
_UNKNOWN_STRIDE = 0.01


def make_specs(
    groups: Iterable[MutableMapping[str, Any]],
    args: TrainingArguments,
    *,
    total_steps: int | None,
    total_tokens: int | None = None,
    tokens_per_step: int | None = None,
) -> list[ScheduleSpec]:
    """The schedule of each group; takes `lr_scheduler` out of those that have it.

    Every schedule is drawn once, so that what is wrong with any of them is told, by its group.
    """
    unit = args.lr_scheduler_unit
    length = total_tokens if unit == "tokens" else total_steps
    run = _make_spec(
        args.lr_scheduler_type,
        args.lr_scheduler_kwargs or {},
        getattr(args, f"warmup_{unit}"),
        args.warmup_ratio,
        length,
        unit,
        tokens_per_step,
    )
    specs, problems = [], []
    for number, group in enumerate(groups):
        own = group.pop(GROUP_KEY, None)
        name = group.get("group_name", number)
        where = f"optimizer_groups.{name}.config.{GROUP_KEY}" if own is not None else ""
        try:
            spec = run if own is None else _override(own, run, tokens_per_step)
            spec.draw(float(group.get("initial_lr", group["lr"])))
            specs.append(spec)
        except ConfigError as error:
            problems += [_in_group(text, where) for text in error.problems]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return specs


def _in_group(problem: str, where: str) -> str:
    """A problem in the words of a group's own schedule, if it has one."""
    if not where:
        return problem
    for option in ("type", "kwargs"):
        problem = problem.replace(f"lr_scheduler_{option}", option)
    return f"{where}: {problem}"


def refuse_group_schedules(groups: Iterable[Mapping[str, Any]]) -> None:
    """Where the run has a scheduler object, nothing would follow a group's own schedule."""
    for number, group in enumerate(groups):
        if group.get(GROUP_KEY) is not None:
            name = group.get("group_name", number)
            raise ConfigError(
                f"optimizer_groups.{name}.config.{GROUP_KEY} has no effect beside an lr_scheduler "
                f"of the run's own; use args.lr_scheduler_type, or leave it out"
            )


def _override(own: Any, run: ScheduleSpec, tokens_per_step: int | None) -> ScheduleSpec:
    """A group's schedule: what it does not say is as in the run."""
    if not isinstance(own, Mapping):
        raise ConfigError(f"must be a mapping with 'type' and 'kwargs', got {own!r}")
    count = f"warmup_{run.unit}"
    keys = ("type", "kwargs", count, "warmup_ratio")
    problems = [unknown("key", str(key), keys) for key in own if key not in keys]
    if own.get(count) and own.get("warmup_ratio"):
        problems.append(f"{count} and warmup_ratio each set the warm-up; give one of them")
    if not isinstance(own.get("kwargs") or {}, Mapping):
        problems.append(f"kwargs must be a mapping, got {own['kwargs']!r}")
    if problems:
        raise ConfigError(problems)
    kwargs = own.get("kwargs")
    if kwargs is None:
        kwargs = {} if "type" in own else run.options
    warmed = count in own or "warmup_ratio" in own
    return _make_spec(
        own.get("type", run.kind),
        kwargs,
        (own.get(count) or 0) if warmed else run.warmup,
        own.get("warmup_ratio") or 0.0,
        run.length,
        run.unit,
        tokens_per_step,
    )


def _make_spec(
    kind: Any,
    options: Mapping[str, Any],
    warmup: int,
    warmup_ratio: float,
    length: int | None,
    unit: str,
    tokens_per_step: int | None,
) -> ScheduleSpec:
    count = resolve_warmup_steps(warmup, warmup_ratio, length, unit=unit)
    stride = 1
    if unit == "tokens":
        stride = tokens_per_step or max(1, int(_UNKNOWN_STRIDE * count))
    name = str(getattr(kind, "value", kind))
    return ScheduleSpec(name, length, count, dict(options), unit, stride)
