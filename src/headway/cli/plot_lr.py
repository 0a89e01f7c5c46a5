"""`headway plot-lr CONFIG`: the learning-rate schedule of a run, before the run.

The model is built only where it decides which groups there are, and at which rates, and then
without memory for its weights. The data is opened only where the length of the training, or the
tokens of a step, depend on it. Writes nothing but the picture that `--output` names.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.args import TrainingArguments
    from headway.cli.charts import Chart
    from headway.config.schema import RunConfig
    from headway.optim.curves import Curve

TAKES_OVERRIDES = True
_MOST_POINTS = 2000
_FEWEST_STEPS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.usage = (
        "headway plot-lr CONFIG [--output FILE.png|FILE.html] [--json] [--nproc N] [--steps N] "
        "[--any.key=value ...]"
    )
    parser.add_argument("config", metavar="CONFIG", help="a run file (YAML)")
    parser.add_argument("--output", metavar="FILE", help="draw into this .png or .html file")
    parser.add_argument("--json", action="store_true", help="print JSON, with all points")
    parser.add_argument(
        "--nproc", type=int, default=1, metavar="N", help="ranks that share the data (1)"
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="how much to show of a schedule without an end"
    )


def run(options: argparse.Namespace) -> int:
    """Print the schedule, or draw it into a file."""
    from headway.cli.charts import write_charts
    from headway.cli.messages import print_json
    from headway.config.load import load_run

    _check(options)
    run_config = load_run(options.config, options.overrides)
    span = _measure(run_config, options.nproc)
    schedules = _read_schedules(run_config, span, options.steps)
    horizon = _horizon(schedules, span, options.steps)
    chart = _chart(schedules, horizon, span.unit)
    if options.output is not None:
        kinds = ", ".join(dict.fromkeys(schedule.kind for schedule in schedules))
        write_charts(options.output, [chart], f"{kinds} ({run_config.args.output_dir})")
    if options.json:
        print_json(_facts(schedules, horizon, span))
    else:
        _print(schedules, chart, horizon, span, to_file=options.output)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse what the words alone show to be wrong."""
    from headway.cli.charts import check_output

    problems = [
        f"--{name}: must be 1 or more, got {value}"
        for name, value in (("nproc", options.nproc), ("steps", options.steps))
        if value is not None and value < 1
    ]
    if options.output is not None:
        try:
            check_output(options.output, "--output")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


@dataclass(frozen=True)
class Span:
    """How long the training is, as far as it is known."""

    unit: str
    steps: int | None
    tokens: int | None
    tokens_per_step: int | None

    @property
    def length(self) -> int | None:
        """In the unit of the schedule."""
        return self.tokens if self.unit == "tokens" else self.steps

    @property
    def last_update(self) -> int | None:
        """The progress at which the last update is made."""
        if self.length is None:
            return None
        one = 1 if self.unit == "steps" else self.tokens_per_step or 0
        return max(0, self.length - one)


@dataclass
class Schedule:
    """What some param groups share: a schedule and a base rate."""

    groups: list[str]
    kind: str
    warmup: int
    base_lr: float
    curve: Callable[[float], float]
    parts: Curve | None
    """The curve by its segments; None for a scheduler that was only tried out."""

    def rate(self, progress: float) -> float:
        """The learning rate of the update at this progress."""
        return self.base_lr * self.curve(progress)


def _measure(run_config: RunConfig, num_ranks: int) -> Span:
    """The length from the arguments, else from the data as the trainer takes it."""
    from headway.config.duration import Duration

    args = run_config.args
    train_for = None if args.train_for is None else Duration.parse(args.train_for)
    if args.lr_scheduler_unit == "steps" or run_config.lr_scheduler is not None:
        if train_for is not None and train_for.unit == "steps":
            return Span("steps", int(train_for.value), None, None)
        if train_for is not None and train_for.unit == "seconds":
            return Span("steps", None, None, None)
        if train_for is None and args.max_steps > 0:
            return Span("steps", args.max_steps, None, None)
        return _measure_data(run_config, "steps", num_ranks)
    return _measure_data(run_config, "tokens", num_ranks)


def _measure_data(run_config: RunConfig, unit: str, num_ranks: int) -> Span:
    from headway.data.loader import WindowLoader
    from headway.trainers import from_config
    from headway.trainers.plan import accumulation_steps, has_length, plan_run

    args = run_config.args
    tokenizer = from_config.build_tokenizer(run_config)
    train, _ = from_config.build_datasets(run_config, tokenizer)
    shares = _count_shares(args, num_ranks)
    accumulation = accumulation_steps(args, shares, train)
    loader = WindowLoader(
        train,
        batch_size=args.per_device_train_batch_size,
        accumulation=accumulation,
        drop_last=args.dataloader_drop_last,
        world_size=shares,
        epoch_batches=None if has_length(train) else args.epoch_train_steps * accumulation,
    )
    plan = plan_run(args, loader, shares)
    return Span(unit, plan.expected_steps, plan.expected_tokens, plan.tokens_per_step)


def _count_shares(args: TrainingArguments, num_ranks: int) -> int:
    """The ranks of a pipeline read the same data."""
    if args.strategy_name != "pipeline":
        return num_ranks
    return max(1, num_ranks // (getattr(args, "pipeline_size", None) or num_ranks))


def _has_one_rate(run_config: RunConfig) -> bool:
    """Whether the arguments tell all rates, so that no model is needed to know the groups."""
    args = run_config.args
    return (
        run_config.optimizer is None
        and run_config.lr_scheduler is None
        and not any((run_config.optimizer_groups or {}).values())
        and args.optim != "muon"
        and not args.no_decay_on
    )


def _read_groups(run_config: RunConfig) -> tuple[list[dict[str, Any]], Any, Any]:
    """Param groups as the run will have them, and the optimizer and the scheduler they are of.

    The model is built without memory for its weights: which groups there are, and at which rates,
    is decided by its parameters, the optimizer, and what makes the optimizer of a group.
    """
    if _has_one_rate(run_config):
        rate = run_config.args.learning_rate
        return [{"group_name": "__default__", "lr": rate}], None, None
    from headway.trainers import from_config

    model, _ = from_config.build_model_to_look_at(run_config)
    optimizer, scheduler = from_config.build_optimizer_and_scheduler(run_config, model)
    return optimizer.param_groups, optimizer, scheduler


def _name_groups(groups: list[dict[str, Any]]) -> list[str]:
    """A name for each; one that several optimizers share is told apart by them."""
    names = [str(group.get("group_name", number)) for number, group in enumerate(groups)]
    return [
        f"{name} ({group['optimizer_class']})"
        if names.count(name) > 1 and "optimizer_class" in group
        else name
        for name, group in zip(names, groups)
    ]


def _read_schedules(run_config: RunConfig, span: Span, shown_steps: int | None) -> list[Schedule]:
    groups, optimizer, scheduler = _read_groups(run_config)
    names = _name_groups(groups)
    if run_config.lr_scheduler is not None:
        num_steps = span.steps or shown_steps or _FEWEST_STEPS
        kind = run_config.lr_scheduler.class_path
        return _try_out(optimizer, scheduler, names, kind, num_steps)
    from headway.optim.group_schedules import make_specs

    specs = make_specs(
        groups,
        run_config.args,
        total_steps=span.steps,
        total_tokens=span.tokens,
        tokens_per_step=span.tokens_per_step,
    )
    found: list[Schedule] = []
    keys: list[Any] = []
    for name, group, spec in zip(names, groups, specs):
        rate = float(group["lr"])
        key = (spec.describe(), rate)
        if key in keys:
            found[keys.index(key)].groups.append(name)
            continue
        keys.append(key)
        curve = spec.draw(rate)
        kind = spec.describe()["type"]
        found.append(Schedule([name], kind, spec.warmup, rate, curve, curve))
    return found


def _try_out(
    optimizer: Any, scheduler: Any, names: list[str], kind: str, num_steps: int
) -> list[Schedule]:
    """The rates that a scheduler object gives, by stepping it; nothing has a gradient."""
    rates: list[list[float]] = [[] for _ in names]
    optimizer.step()  # torch wants to see one before the scheduler's
    for _ in range(num_steps + 1):
        for own, group in zip(rates, optimizer.param_groups):
            own.append(float(group["lr"]))
        scheduler.step()
    found: dict[tuple[float, ...], Schedule] = {}
    for name, own in zip(names, rates):
        if tuple(own) in found:
            found[tuple(own)].groups.append(name)
        else:
            found[tuple(own)] = Schedule([name], kind, 0, 1.0, _look_up(own), None)
    return list(found.values())


def _look_up(rates: list[float]) -> Callable[[float], float]:
    return lambda progress: rates[min(int(progress), len(rates) - 1)]


def _horizon(schedules: list[Schedule], span: Span, shown_steps: int | None) -> int:
    """How far to show: to the end of the training, or past the last change of a curve."""
    if span.length is not None:
        return span.length
    if shown_steps is not None:
        return shown_steps * (span.tokens_per_step or 1)
    places = [
        place
        for schedule in schedules
        if schedule.parts is not None
        for segment in schedule.parts.segments
        for place in (segment.start, segment.end)
        if math.isfinite(place)
    ]
    fewest = _FEWEST_STEPS * (span.tokens_per_step or 1)
    return max(fewest, math.ceil(1.25 * max(places, default=0)))


def _key_points(schedule: Schedule, horizon: int, span: Span) -> list[dict[str, Any]]:
    """Where something begins or ends, with the rate there."""
    places: dict[str, float] = {"first update": 0}
    segments = () if schedule.parts is None else schedule.parts.segments
    for segment in segments:
        if segment.name.endswith("warm-up") and segment.end <= horizon:
            step = (span.tokens_per_step or 0) if span.unit == "tokens" else 1
            places[f"{segment.name}, last update"] = max(segment.start, segment.end - step)
        elif segment.start and segment.start <= horizon:
            places[f"{segment.name} begins"] = segment.start
    if schedule.parts is None:
        peak = max(range(horizon + 1), key=schedule.rate)
        places["highest rate"] = peak
    if span.last_update is not None:
        places["last update"] = span.last_update
    places["end" if span.length is not None else "shown until"] = horizon
    return [
        {"name": name, "progress": math.ceil(place), "learning_rate": schedule.rate(place)}
        for name, place in places.items()
    ]


def _facts(schedules: list[Schedule], horizon: int, span: Span) -> dict[str, Any]:
    groups = []
    for schedule in schedules:
        points = _key_points(schedule, horizon, span)
        places = _places([schedule], horizon)
        groups.append(
            {
                "groups": schedule.groups,
                "type": schedule.kind,
                "base_lr": schedule.base_lr if schedule.parts is not None else None,
                "warmup": schedule.warmup,
                "key_points": points,
                "progress": places,
                "learning_rate": [schedule.rate(place) for place in places],
            }
        )
    return {
        "unit": span.unit,
        "length": span.length,
        "steps": span.steps,
        "tokens_per_step": span.tokens_per_step,
        "schedules": groups,
    }


def _places(schedules: list[Schedule], horizon: int) -> list[int]:
    """Whole places from 0 to the horizon, and those where a curve changes."""
    count = max(2, min(_MOST_POINTS, horizon + 1))
    places = {round(number * horizon / (count - 1)) for number in range(count)}
    changes = {
        round(place)
        for schedule in schedules
        if schedule.parts is not None
        for segment in schedule.parts.segments
        for place in (segment.start, segment.start - 1)
        if 0 <= place <= horizon
    }
    return sorted(places | changes)


def _chart(schedules: list[Schedule], horizon: int, unit: str) -> Chart:
    from headway.cli.charts import Chart, Line

    places = _places(schedules, horizon)
    lines = [
        Line(f"{', '.join(s.groups)}: {s.kind}", places, [s.rate(place) for place in places])
        for s in schedules
    ]
    return Chart("learning rate", unit, lines, from_zero=True)


def _print(
    schedules: list[Schedule], chart: Chart, horizon: int, span: Span, *, to_file: str | None
) -> None:
    from headway.cli.charts import draw_text
    from headway.cli.messages import print_table

    if to_file is not None:
        print(f"drawn into {to_file}")
    else:
        print(draw_text(chart))
    for schedule in schedules:
        title = f"{', '.join(schedule.groups)}: {schedule.kind}"
        rows = [
            (point["name"], f"{point['learning_rate']:.4e}  at {point['progress']:,} {span.unit}")
            for point in _key_points(schedule, horizon, span)
        ]
        print()
        print_table(rows, title=title)
