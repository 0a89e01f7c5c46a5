"""`headway train CONFIG`: trains what a run file describes, and says what to do next."""

from __future__ import annotations

import argparse
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.first_imports import import_compiler, resting_collector
from headway.cli.launch import (
    add_launch_arguments,
    choose_resume,
    launch,
    refuse_without_nproc,
    users_command,
)

if TYPE_CHECKING:
    from headway.checkpoint.errors import MisfitError
    from headway.config.schema import RunConfig

TAKES_OVERRIDES = True
# What the trainer calls its data, and where a run file has it.
_RUN_FILE_KEYS = {"train_dataset": "data.train", "eval_dataset": "data.eval"}
# The keys that decide what a part of a checkpoint has to fit.
_KEYS_OF = {
    "model": ("model.",),
    "optimizer": ("args.optim", "args.no_decay_on", "optimizer", "model."),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.usage = (
        "headway train CONFIG [--resume PATH | --no-resume] [--json] [--nproc N "
        "[--nnodes M --rdzv-endpoint HOST:PORT] [--max-restarts K]] [--any.key=value ...]"
    )
    parser.epilog = (
        "Any key of the run file can be set: --args.max_steps=100 --model.num_layers=4. "
        "A run goes on from its newest checkpoint by itself; Ctrl-C or SIGTERM saves and stops."
    )
    parser.add_argument("config", metavar="CONFIG", help="a run file (YAML)")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--resume", metavar="PATH", help="continue from this checkpoint")
    group.add_argument("--no-resume", action="store_true", help="start afresh")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_launch_arguments(parser)


def run(options: argparse.Namespace, amend: Callable[[RunConfig], None] | None = None) -> int:
    """Train; 0 when done or stopped by `stop_at`, 128 + signal when a signal stopped it.

    `amend` may change what the run file says, on every rank alike.
    """
    if options.nproc is not None:
        return launch(options)
    refuse_without_nproc(options)
    from headway.cli.rank import group_options, run_as_rank
    from headway.config.load import load_run

    def load() -> tuple[RunConfig, dict[str, Any]]:
        run_config = load_run(options.config, options.overrides)
        if amend is not None:
            amend(run_config)
        return run_config, group_options(run_config.args)

    with resting_collector() as wake_collector:
        return run_as_rank(load, lambda run_config: _run(options, run_config, wake_collector))


def _run(
    options: argparse.Namespace, run_config: RunConfig, wake_collector: Callable[[], None]
) -> int:
    from headway.cli.messages import print_json
    from headway.config.load import telling_where
    from headway.engine.signals import ignore_save_requests
    from headway.engine.start_times import StartTimes

    given: bool | str | None = False if options.no_resume else options.resume
    resume = choose_resume(given, run_config.args.checkpoint_place)

    start_times = StartTimes.of_process()
    with ignore_save_requests():
        from headway.trainers.from_config import build_trainer

        import_compiler(run_config.args)
        wake_collector()
        start_times.reach("imports")
        with telling_where(options.config, options.overrides):
            trainer = build_trainer(run_config)
        start_times.reach("data")
        trainer.start_times = start_times
        if options.quiet:
            silence(trainer)
        output = _train(options, trainer, run_config, resume)
    if not trainer.state.is_world_process_zero:
        return exit_code(output)
    if options.json:
        print_json(summarise(trainer, output))
    else:
        report(options, trainer, output)
    return exit_code(output)


def _train(
    options: argparse.Namespace, trainer: Any, run_config: RunConfig, resume: bool | str | None
) -> Any:
    """Train, and tell a user's mistakes in the terms of the run file."""
    from headway.checkpoint.errors import MisfitError
    from headway.config.load import locate_key
    from headway.errors import ConfigError

    try:
        return trainer.train(resume_from_checkpoint=resume)
    except MisfitError as error:
        raise ConfigError(_explain_misfit(error, run_config, trainer.last_read)) from error
    except ConfigError as error:
        told = []
        for problem in error.problems:
            for name, key in _RUN_FILE_KEYS.items():
                if problem.startswith(f"{name}: "):
                    where = locate_key(options.config, options.overrides, key) or options.config
                    problem = f"{where}: {key}{problem.removeprefix(name)}"
            told.append(problem)
        raise ConfigError(told) from error


def _explain_misfit(error: MisfitError, run_config: RunConfig, read: Path | None) -> list[str]:
    from headway.checkpoint.jsonfile import read_json_object
    from headway.config.snapshot import resolved_config
    from headway.trainers.resume import compare_configs

    args = run_config.args
    stored = None if read is None else Path(read, "run", "config.json")
    changed = []
    if stored is not None and stored.is_file():
        saved = read_json_object(stored)
        changed = [
            f"{item.key} was {item.saved!r} and is now {item.current!r}"
            for item in compare_configs(saved, resolved_config(run_config), ())
            if item.key.startswith(_KEYS_OF[error.part])
        ]
    what = "; ".join(changed) or "its class or its code has changed"
    option = "output_dir" if args.checkpoint_address is None else "checkpoint_address"
    return [
        f"{error.part}: not the one of the checkpoint to go on from ({what}); take the change "
        f"back, or choose another args.{option} (now {args.checkpoint_place!r})",
        *str(error).splitlines(),
    ]


def summarise(trainer: Any, output: Any) -> dict[str, Any]:
    """The result by name, for programs."""
    from headway.engine.post_mortem import find_checkpoint, path_to_resume

    args = trainer.args
    checkpoint = path_to_resume(find_checkpoint(args.checkpoint_place))
    times = trainer.start_times if trainer.start_times and trainer.start_times.is_over else None
    return {
        "output_dir": str(args.output_dir),
        "checkpoint": checkpoint,
        "steps": output.global_step,
        "loss": output.training_loss,
        "interrupted_by": output.interrupted_by,
        "metrics": output.metrics,
        "first_step_s": times and times.total_s,
        "start_phases_s": times and times.phases,
    }


def exit_code(output: Any) -> int:
    """0 for a run that went as asked; as shells have it for one that a signal stopped."""
    if output.interrupted_by in (None, "stop_at"):
        return 0
    return 128 + int(signal.Signals[output.interrupted_by])


def silence(trainer: Any) -> None:
    """Take the callbacks that talk on the console out of a trainer."""
    from headway.callbacks import InfoCallback, ProgressCallback

    for callback in (ProgressCallback, InfoCallback):
        trainer.remove_callback(callback)


def report(options: argparse.Namespace, trainer: Any, output: Any) -> None:
    """Where the result is and what can be done with it."""
    from headway.engine.post_mortem import find_checkpoint

    output_dir = trainer.args.output_dir
    found = find_checkpoint(trainer.args.checkpoint_place)
    if output.interrupted_by is not None:
        print(f"stopped at step {output.global_step:,} by {output.interrupted_by}")
    elif trainer.state.outcome == "aborted":
        print(f"aborted at step {output.global_step:,} by command, without a save")
    elif output.metrics["train_samples"] == 0:
        print(f"nothing left to do: {output.global_step:,} steps are done (args.max_steps)")
    else:
        print(f"trained {output.global_step:,} steps, mean loss {output.training_loss:.4f}")
    if found is None:
        if trainer.state.outcome != "aborted":
            print(f"no checkpoint was saved (args.save_strategy={trainer.args.save_strategy!r})")
        return
    if found["step"] is None:
        print(f"checkpoints are in {found['path']}, where nobody could look just now")
    else:
        print(f"checkpoint: {found['path']}")
    if output.interrupted_by is not None:
        command = _continuation(users_command(options.argv), output.interrupted_by)
        print(f"go on with: {shlex.join(command)}")
    elif trainer.args.checkpoint_address is not None:
        print(f"fetch it:   headway finalize {shlex.quote(found['path'])} FOLDER")
    elif trainer.processing_class is not None:
        print(f"try it:     headway generate {shlex.quote(output_dir)} --prompt '...'")
        print(f"measure it: headway eval {shlex.quote(output_dir)} --data FILE")


def _continuation(argv: list[str], interrupted_by: str) -> list[str]:
    """The command that goes on where this one stopped."""
    kept = [word for word in argv if word != "--no-resume"]
    if interrupted_by != "stop_at":
        return kept
    given = [word for word in kept if word.startswith("--args.stop_at=")]
    # Where the run file has it, it must be taken back.
    return [word for word in kept if word not in given] + ([] if given else ["--args.stop_at=null"])
