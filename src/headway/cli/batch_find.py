"""`headway batch-find CONFIG`: the largest batch per device that trains, and what it is worth.

Owns: the verb. Does not own: the search (trainers/batch_find.py), the process of a trial
(batch_trial.py), writing into a run file (run_file_edit.py).
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.batch_trial import (
    NoRoomError,
    TrialError,
    TrialPlan,
    add_trial_arguments,
    parse_bytes,
    run_here,
)
from headway.cli.launch import Ranks, add_launch_arguments, launch, refuse_without_nproc
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.config.schema import RunConfig
    from headway.trainers.batch_find import Trial

TAKES_OVERRIDES = True
_DEFAULT_MOST = 1024
_LEAST_LIMIT_BYTES = 64 * 2**20
# Of the memory that is free, what trials on a CPU may take together.
_PART_OF_FREE = 0.8

logger = logging.getLogger("headway.cli")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.usage = (
        "headway batch-find CONFIG [--max-batch N] [--memory-limit SIZE] [--steps N] [--apply] "
        "[--json] [--nproc N] [--any.key=value ...]"
    )
    parser.epilog = (
        "Each size is tried in a process of its own: a few optimizer steps with the longest "
        "samples, under the run's strategy. The accumulation is chosen so that the samples of an "
        "optimizer step stay as many as they are. The run's output_dir is not touched."
    )
    parser.add_argument("config", metavar="CONFIG", help="a run file (YAML)")
    parser.add_argument(
        "--max-batch",
        type=int,
        default=_DEFAULT_MOST,
        metavar="N",
        help=f"largest size to try; default: {_DEFAULT_MOST}",
    )
    parser.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="memory of each rank, such as 2GiB; default: all of a GPU, on the CPU 80%% of what "
        "is free",
    )
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="optimizer steps of a trial; default: 3"
    )
    parser.add_argument("--apply", action="store_true", help="write the result into the run file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trial_arguments(parser)
    add_launch_arguments(parser, restarts=False)


def run(options: argparse.Namespace) -> int:
    """Search and print; 1 where not even the smallest batch trains, or none can be applied."""
    if options.trial is not None:
        return run_here(options) if options.nproc is None else launch(options)
    limit_bytes = _check(options)
    from headway.config.load import load_run

    run_config = load_run(options.config, options.overrides)
    num_ranks = options.nproc or 1
    if run_config.trainer == "single" and num_ranks > 1:
        raise ConfigError(
            f"--nproc: {num_ranks} given, but trainer is 'single', which runs on one; set trainer "
            "to ddp, fsdp2, pipeline or accelerate"
        )
    if limit_bytes is None:
        limit_bytes = _default_limit(run_config, num_ranks)
    try:
        facts = find(options, run_config, num_ranks, limit_bytes)
    except (NoRoomError, TrialError) as error:
        from headway.cli.messages import say_error

        if isinstance(error, TrialError):
            print(error.output, file=sys.stderr)
        say_error([str(error)])
        return 1
    return _report(options, run_config, facts)


def _check(options: argparse.Namespace) -> int | None:
    """Everything that is wrong with the command line; the limit in bytes."""
    problems, limit_bytes = [], None
    for name, least in (("max_batch", 1), ("steps", 2)):
        value = getattr(options, name)
        if value < least:
            option = name.replace("_", "-")
            problems.append(f"--{option}: {value} given; allowed: {least} and up")
    if options.memory_limit is not None:
        try:
            limit_bytes = parse_bytes(options.memory_limit)
        except ConfigError as error:
            problems += error.problems
        else:
            if limit_bytes < _LEAST_LIMIT_BYTES:
                problems.append(
                    f"--memory-limit: {options.memory_limit!r} given ({limit_bytes:,} bytes); "
                    "allowed: 64MiB and up"
                )
    if options.nnodes != "1":
        problems.append(f"--nnodes: {options.nnodes!r} given; batch-find runs on one machine")
    if problems:
        raise ConfigError(problems)
    if options.nproc is None:
        refuse_without_nproc(options)
    else:
        Ranks.from_options(options)
    return limit_bytes


def _default_limit(run_config: RunConfig, num_ranks: int) -> int | None:
    """A GPU says itself when it is full; on the CPU only a limit keeps the machine usable."""
    from headway.dist.env import detect_env

    device = detect_env(use_cpu=run_config.args.use_cpu, device=run_config.args.device).device
    free = _free_bytes() if device == "cpu" else None
    if free is None:
        return None
    from headway.cli.messages import spell_bytes

    limit = int(free * _PART_OF_FREE / num_ranks)
    logger.info(
        "a rank may take %s (80%% of the free memory); see --memory-limit", spell_bytes(limit)
    )
    return limit


def _free_bytes() -> int | None:
    """Memory that processes can still get on this machine; None where it is not told."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for most, used in (("memory.max", "memory.current"),):
        try:
            texts = [
                Path("/sys/fs/cgroup", name).read_text(encoding="ascii") for name in (most, used)
            ]
            found.append(int(texts[0]) - int(texts[1]))
        except (OSError, ValueError):  # no such group, or no limit ("max")
            pass
    return min(found, default=None)


def find(
    options: argparse.Namespace, run_config: RunConfig, num_ranks: int, limit_bytes: int | None
) -> dict[str, Any]:
    """Run the search; everything it found by name."""
    from headway.cli.messages import spell_bytes
    from headway.trainers import from_config
    from headway.trainers.batch_find import (
        check_searchable,
        fit_global_batch,
        samples_per_device,
        search,
        why_not_accumulate,
    )

    train, _ = from_config.build_datasets(run_config, from_config.build_tokenizer(run_config))
    check_searchable(train)
    num_shares, unit = num_ranks, 1
    if run_config.trainer == "pipeline":
        size = getattr(run_config.args, "pipeline_size", None) or num_ranks
        num_shares, unit = max(1, num_ranks // size), run_config.args.n_microbatches  # type: ignore[attr-defined]
    configured = run_config.args.per_device_train_batch_size
    samples = samples_per_device(run_config, train, num_shares)
    del train  # the trials need the memory
    not_accumulated = why_not_accumulate(run_config)
    if options.max_batch < unit:
        raise ConfigError(
            f"--max-batch: {options.max_batch} given; allowed: {unit} and up (n_microbatches)"
        )
    plan = TrialPlan(
        options.config,
        options.overrides,
        options.nproc,
        samples,
        options.steps,
        limit_bytes,
        accumulates=not_accumulated is None,
    )
    trials: list[Trial] = []

    def try_size(size: int) -> Trial:
        trial = plan.run(size, must_work=not trials)
        trials.append(trial)
        if trial.fits:
            speed = f"{trial.tokens_per_s:,.0f} tokens/s" if trial.tokens_per_s else "trains"
            logger.info("%5d per device: %s, %s", size, speed, spell_bytes(trial.peak_bytes or 0))
        else:
            logger.info("%5d per device: %s", size, trial.reason)
        return trial

    search(try_size, configured, options.max_batch, unit)
    largest = max((trial.size for trial in trials if trial.fits), default=None)
    fit = None
    if largest is not None:
        fit = fit_global_batch(samples, largest, unit, accumulates=not_accumulated is None)
    return {
        "largest": largest,
        "reached_max": largest is not None and largest + unit > options.max_batch,
        "per_device_train_batch_size": None if fit is None else fit.size,
        "gradient_accumulation_steps": None if fit is None else fit.accumulation,
        "global_batch": samples * num_shares,
        "samples_per_device": samples,
        "not_accumulated": not_accumulated,
        "num_ranks": num_ranks,
        "configured": {
            "per_device_train_batch_size": configured,
            "gradient_accumulation_steps": samples // configured,
        },
        "memory_limit_bytes": limit_bytes,
        "trials": [vars(trial) for trial in sorted(trials, key=lambda trial: trial.size)],
    }


def _report(options: argparse.Namespace, run_config: RunConfig, facts: dict[str, Any]) -> int:
    from headway.cli.messages import print_json, say_error

    facts["applied"] = False
    if options.apply and facts["per_device_train_batch_size"] is not None:
        from headway.cli.run_file_edit import set_options

        set_options(options.config, values_to_apply(run_config, facts))
        facts["applied"] = True
    if options.json:
        print_json(facts)
    else:
        _print(facts)
        if facts["applied"]:
            print(f"applied: {options.config}")
    if facts["largest"] is None:
        say_error([_say_nothing_fits(facts)])
        return 1
    if options.apply and not facts["applied"]:
        step = f"{facts['global_batch']} samples of a step"
        say_error([f"--apply: nothing is written, since no size that fits keeps the {step}"])
        return 1
    return 0


def _say_nothing_fits(facts: dict[str, Any]) -> str:
    from headway.cli.messages import spell_bytes

    smallest, limit = facts["trials"][0], facts["memory_limit_bytes"]
    within = "" if limit is None else f" with {spell_bytes(limit)} a rank (--memory-limit)"
    told = f"sample{'s' * (smallest['size'] > 1)} per device"
    return f"not even {smallest['size']} {told} can train{within}: {smallest['reason']}"


def _say_nothing_keeps_the_step(facts: dict[str, Any]) -> str:
    """Why no size that fits leaves a step as large as it is."""
    largest, step = facts["largest"], facts["global_batch"]
    if facts["not_accumulated"] is None:
        return f"no size up to {largest} keeps the {step} samples of a step"
    return (
        f"only {facts['samples_per_device']} per device keep the {step} samples of a step, and "
        f"{largest} is the most that fits; a smaller size would need accumulation, but "
        f"{facts['not_accumulated']}"
    )


def values_to_apply(run_config: RunConfig, facts: dict[str, Any]) -> dict[str, Any]:
    """What has to stand in the run file."""
    args, size = run_config.args, facts["per_device_train_batch_size"]
    values = {"args.per_device_train_batch_size": size}
    if run_config.trainer == "pipeline":
        values["args.per_device_eval_batch_size"] = size
    if args.global_batch_size is None and args.global_batch_tokens is None:
        values["args.gradient_accumulation_steps"] = facts["gradient_accumulation_steps"]
    return values


def _print(facts: dict[str, Any]) -> None:
    from headway.cli.messages import print_table, spell_bytes

    rows = []
    for trial in facts["trials"]:
        told = str(trial["reason"])
        if trial["fits"]:
            speed = trial["tokens_per_s"]
            told = f"{speed:>12,.0f} tokens/s   " if speed else "trains   "
            told += spell_bytes(trial["peak_bytes"])
        rows.append((f"{trial['size']} per device", told))
    largest, size = facts["largest"], facts["per_device_train_batch_size"]
    if largest is not None:
        rows.append(("largest", f"{largest}{' (--max-batch)' if facts['reached_max'] else ''}"))
    if size is None:
        if largest is not None:
            rows.append(("note", _say_nothing_keeps_the_step(facts)))
        print_table(rows)
        return
    accumulation = facts["gradient_accumulation_steps"]
    step = f"{facts['global_batch']} samples"
    use = f"per_device_train_batch_size={size}, gradient_accumulation_steps={accumulation}"
    rows.append(("use", f"{use} (a step stays at {step})"))
    if largest > size:
        why = "would make a step larger than" if accumulation == 1 else "does not divide"
        rows.append(("note", f"{largest} would fit, but {why} {step}"))
    print_table(rows)
