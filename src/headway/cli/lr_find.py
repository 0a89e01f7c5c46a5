"""`headway lr-find CONFIG`: tries learning rates on a run's own model and data, and suggests one.

Owns: the verb. Does not own: the search (trainers/lr_find.py), writing into a run file
(run_file_edit.py). Nothing is trained for good, and nothing is written but what is asked for.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.launch import add_launch_arguments, launch, refuse_without_nproc
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.config.schema import RunConfig
    from headway.optim.lr_finder import LRFinderResult

TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.usage = (
        "headway lr-find CONFIG [--start-lr X] [--end-lr Y] [--num-iterations N] [--seeds N] "
        "[--output FILE] [--apply] [--json] [--nproc N] [--any.key=value ...]"
    )
    parser.epilog = (
        "Takes one optimizer step at each of N rates, from low to high, with the run's optimizer, "
        "precision, accumulation, clipping, strategy and data. Weights and data stay as they are. "
        "The exit code is 1 where the losses suggest no rate."
    )
    parser.add_argument("config", metavar="CONFIG", help="a run file (YAML)")
    parser.add_argument("--start-lr", type=float, default=1e-7, metavar="X", help="default: 1e-7")
    parser.add_argument("--end-lr", type=float, default=1.0, metavar="Y", help="default: 1")
    parser.add_argument(
        "--num-iterations", type=int, default=100, metavar="N", help="rates to try; default: 100"
    )
    parser.add_argument(
        "--smoothing-factor",
        type=float,
        default=0.05,
        metavar="F",
        help="weight of the newest loss in the running mean; default: 0.05",
    )
    parser.add_argument(
        "--divergence-threshold",
        type=float,
        default=4.0,
        metavar="T",
        help="stop when the mean is T times its best; default: 4",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="repeat with N orders of the data, and show how far they agree; default: 3",
    )
    parser.add_argument("--output", metavar="FILE", help="a picture (.png, .html) or .json")
    parser.add_argument(
        "--apply", action="store_true", help="write the suggestion into the run file"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_launch_arguments(parser, restarts=False)


def run(options: argparse.Namespace) -> int:
    """Search and print; 1 where nothing can be suggested."""
    _check(options)
    if options.nproc is not None:
        return launch(options)
    refuse_without_nproc(options)
    from headway.cli.rank import group_options, run_as_rank
    from headway.config.load import load_run

    def load() -> tuple[RunConfig, dict[str, Any]]:
        run_config = load_run(options.config, options.overrides)
        if options.apply:
            find_keys(run_config)
        return run_config, group_options(run_config.args)

    return run_as_rank(load, lambda run_config: _run(options, run_config))


def _check(options: argparse.Namespace) -> None:
    """Find what is wrong before the search, which takes a while."""
    from headway.optim.lr_range import RangeOptions

    problems = []
    names = ("start_lr", "end_lr", "num_iterations", "smoothing_factor", "divergence_threshold")
    try:
        RangeOptions(**{name: getattr(options, name) for name in names})
    except ConfigError as error:
        for problem in error.problems:
            name, _, rest = problem.partition(":")
            problems.append(f"--{name.replace('_', '-')}:{rest}")
    if options.seeds < 1:
        problems.append(f"--seeds: {options.seeds} given; allowed: 1 and up")
    if options.output is not None:
        from headway.optim.lr_plot import check_ending, check_package

        try:
            if check_ending(options.output, "--output", ".json") != ".json":
                check_package(options.output, "--output")
        except ConfigError as error:
            problems += error.problems
        if Path(options.output).is_dir():
            problems.append(f"--output: {options.output} is a folder; name a file")
    if problems:
        raise ConfigError(problems)


def _run(options: argparse.Namespace, run_config: RunConfig) -> int:
    from headway.trainers.from_config import build_trainer

    trainer = build_trainer(run_config)
    try:
        result = trainer.lr_find(
            start_lr=options.start_lr,
            end_lr=options.end_lr,
            num_iterations=options.num_iterations,
            smoothing_factor=options.smoothing_factor,
            divergence_threshold=options.divergence_threshold,
            num_seeds=options.seeds,
        )
    except ConfigError as error:
        raise type(error)([in_run_file_terms(problem) for problem in error.problems]) from error
    if trainer.state.is_world_process_zero:
        _report(options, run_config, result)
    return 1 if result.suggested_lr is None else 0


def in_run_file_terms(problem: str) -> str:
    """A trainer's words for a problem, with its data named as a run file has it."""
    name = "train_dataset: "
    return f"data.train: {problem.removeprefix(name)}" if problem.startswith(name) else problem


def _report(options: argparse.Namespace, run_config: RunConfig, result: LRFinderResult) -> None:
    from headway.cli.messages import print_json, write_line

    if options.output is not None:
        _write(result, Path(options.output))
    if not options.json:
        _print(result, run_config)
    applied: dict[str, float] = {}
    if options.apply and result.suggested_lr is not None:
        from headway.cli.run_file_edit import set_options

        applied = spread_rate(result.suggested_lr, find_keys(run_config))
        set_options(options.config, applied)
    if options.json:
        first = next(iter(applied), None)
        print_json({**result.to_dict(), "applied": first, "applied_values": applied})
        return
    if options.output is not None:
        write_line(f"written: {options.output}")
    for key, rate in applied.items():
        print(f"applied: {key} = {rate:.2e} in {options.config}")
        if any(_sets(word, key) for word in options.overrides):
            write_line(f"note: --{key} on the command line still goes before the run file")


def _sets(override: str, key: str) -> bool:
    """Whether a word of the command line sets a key, or what it is in."""
    name = override.partition("=")[0].removeprefix("--")
    return f"{key}.".startswith(f"{name}.")


def spread_rate(rate: float, keys: dict[str, float]) -> dict[str, float]:
    """The value of every key: the rate times the part that belongs to it."""
    return {key: float(f"{rate * part:.2e}") for key, part in keys.items()}


def _write(result: LRFinderResult, path: Path) -> None:
    if path.suffix.lower() != ".json":
        result.plot(path)
        return
    import json

    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")


def _print(result: LRFinderResult, run_config: RunConfig) -> None:
    from headway.cli.messages import print_table

    rows = []
    for name, rate in result.suggestions.items():
        spread = ""
        if len(result.runs) > 1:
            # Noise of single seeds may hide what their mean shows.
            spread = f"  (by the mean of {len(result.runs)} seeds; none of them shows it alone)"
            if name in result.spread:
                low, high = result.spread[name]
                spread = f"  ({low:.2e} to {high:.2e} over {len(result.runs)} seeds)"
        rows.append((name, f"{rate:.2e}{spread}"))
    if result.suggested_lr is None:
        rows.append(("suggestion", f"none: {result.reason}"))
    else:
        rows.append(("suggestion", f"{result.suggested_lr:.2e}"))
        for key, rate in spread_rate(result.suggested_lr, _other_rates(run_config)).items():
            rows.append(("with it", f"{rate:.2e} ({key}, in the proportion that it has now)"))
    if result.lrs:
        tried = f"{result.lrs[0]:.2e} to {result.lrs[-1]:.2e}"
        early = sorted({run.stopped for run in result.runs if run.stopped is not None})
        words = {"diverged": "the loss ran away", "nonfinite": "the loss was no number"}
        rows.append(("tried", tried + "".join(f"; {words[reason]} there" for reason in early)))
    rows += _configured(run_config)
    if result.suggested_lr is not None and result.suggested_lr < 2 * result.lrs[0]:
        rows.append(("note", "the loss falls from the lowest rate on: try a lower --start-lr"))
    print_table(rows)


def _configured(run_config: RunConfig) -> list[tuple[str, str]]:
    """The rate that the run has now, where a key of it tells."""
    if run_config.optimizer is None:
        return [("configured", f"{run_config.args.learning_rate:.2e} (args.learning_rate)")]
    rate = run_config.optimizer.init_args.get("lr")
    return [] if rate is None else [("configured", f"{rate:.2e} (optimizer.init_args.lr)")]


def find_keys(run_config: RunConfig) -> dict[str, float]:
    """The keys of a run that hold the rate which a search finds, and what part of it each has.

    The first has it whole. `ConfigError` where there are rates that no such key holds.
    """
    own = [
        f"optimizer_groups.{name}"
        for name, entry in (run_config.optimizer_groups or {}).items()
        if entry and ("lr" in (entry.get("config") or {}) or entry.get("factory"))
    ]
    if own:
        raise ConfigError(
            f"--apply: {', '.join(own)} has a rate of its own, so that no single key holds the "
            "rate; leave --apply out and scale all rates by the same factor"
        )
    if run_config.optimizer is None:
        return {"args.learning_rate": 1.0, **_other_rates(run_config)}
    if "lr" in run_config.optimizer.init_args:
        return {"optimizer.init_args.lr": 1.0}
    raise ConfigError(
        f"--apply: the run's optimizer is {run_config.optimizer.class_path}, which takes no rate "
        "from args.learning_rate; give it optimizer.init_args.lr"
    )


def _other_rates(run_config: RunConfig) -> dict[str, float]:
    """Rates beside args.learning_rate, as parts of it: that of the AdamW beside Muon."""
    args = run_config.args
    rate = (args.optim_args or {}).get("adamw_lr")
    if run_config.optimizer is not None or args.optim != "muon" or rate is None:
        return {}
    return {"args.optim_args.adamw_lr": rate / args.learning_rate if args.learning_rate else 1.0}
