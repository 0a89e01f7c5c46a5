"""`headway train CONFIG`: trains what a run file describes, and says what to do next."""

from __future__ import annotations

import argparse
import shlex
import signal
from typing import Any

TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.usage = "headway train CONFIG [--resume PATH | --no-resume] [--any.key=value ...]"
    parser.epilog = (
        "Any key of the run file can be set: --args.max_steps=100 --model.num_layers=4. "
        "A run goes on from its newest checkpoint by itself; Ctrl-C or SIGTERM saves and stops."
    )
    parser.add_argument("config", metavar="CONFIG", help="a run file (YAML)")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--resume", metavar="PATH", help="continue from this checkpoint")
    group.add_argument("--no-resume", action="store_true", help="start afresh")


def run(options: argparse.Namespace) -> int:
    """Train; 0 when done or stopped by `stop_at`, 128 + signal when a signal stopped it."""
    from headway.config.load import load_run

    run_config = load_run(options.config, options.overrides)
    resume: bool | str | None = False if options.no_resume else options.resume

    from headway.trainers.from_config import build_trainer

    trainer = build_trainer(run_config)
    if options.quiet:
        silence(trainer)
    output = trainer.train(resume_from_checkpoint=resume)
    report(options, trainer, output)
    return exit_code(output)


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
    from headway.checkpoint import find_latest_checkpoint

    output_dir = trainer.args.output_dir
    checkpoint = find_latest_checkpoint(output_dir, kind="training")
    if output.interrupted_by is not None:
        print(f"stopped at step {output.global_step:,} by {output.interrupted_by}")
    elif output.metrics["train_samples"] == 0:
        print(f"nothing left to do: {output.global_step:,} steps are done (args.max_steps)")
    else:
        print(f"trained {output.global_step:,} steps, mean loss {output.training_loss:.4f}")
    if checkpoint is None:
        print(f"no checkpoint was saved (args.save_strategy={trainer.args.save_strategy!r})")
        return
    print(f"checkpoint: {checkpoint}")
    if output.interrupted_by is not None:
        print(f"go on with: {shlex.join(_continuation(options.argv, output.interrupted_by))}")
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
