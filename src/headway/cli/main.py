"""The command `headway`: finds the verb, runs it, turns what goes wrong into an exit code.

Owns: the table of verbs, what is common to all of them, the wording of a failure.
Does not own: what a verb does (its own module, imported only when it is chosen).

Exit codes: 0 done, 1 failed, 2 a user's mistake, 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from headway import __version__
from headway.cli.messages import logging_to_stderr, say_error
from headway.errors import ConfigError, nearest, problems_of, unknown

VERBS = {
    "demo": "train a small model on the standard library's source, in about two minutes",
    "train": "train what a run file describes",
    "check": "look a run file over without training: steps, sizes, memory, first sample",
    "plot-lr": "show the learning-rate schedule of a run file",
    "lr-find": "try learning rates on a run's model and data, and suggest one",
    "batch-find": "find the largest batch per device that trains",
    "bench": "how fast this machine trains, beside other trainers and a bare loop",
    "plot": "draw the curves of runs, in the terminal or in a file",
    "compare": "what differs between two runs, and which got further",
    "report": "everything about a run in one HTML page",
    "dashboard": "runs and running jobs in a browser: curves, comparison, commands",
    "jobs": "the runs of this machine that can be steered",
    "job": "ask something of a running job: status, save, stop, pause, set-lr and others",
    "generate": "continue a prompt with a trained model",
    "eval": "loss, perplexity and bits per byte of a model on data",
    "diloco": "train one model with several runs that may be far apart",
    "checkpoint": "list, inspect, verify, compare, prune, convert and edit checkpoints",
    "finalize": "make a clean model folder of a checkpoint",
    "data": "make token files from text, and look into them",
    "explain": "type, default, meaning and rules of an option",
    "schema": "the JSON Schema of a run file",
    "doctor": "what this machine has, and what to do about what it lacks",
}

logger = logging.getLogger("headway.cli")


class UsageError(ConfigError):
    """A command line that cannot be read."""


class Parser(argparse.ArgumentParser):
    """Raises what argparse would print and exit with, so that all errors look alike."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        told = unknown("value" if action.option_strings else "command", value, action.choices)
        name = f"{action.option_strings[0]}: " if action.option_strings else ""
        self.error(f"{name}{told}")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as some services start programs
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    with logging_to_stderr(_verbosity(words)):
        try:
            code = _run(words)
            sys.stdout.flush()
            return code
        except SystemExit as stop:  # --help and --version
            return stop.code if isinstance(stop.code, int) else 1
        except BrokenPipeError:
            # The reader is gone; Python would complain once more when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (KeyboardInterrupt, Exception) as error:
            problems, code = explain(error)
            if problems is None:
                traceback.print_exc()
            else:
                logger.debug("the error in full", exc_info=error)
                say_error(problems)
            return code


def explain(error: BaseException) -> tuple[list[str] | None, int]:
    """What to say of an error, line by line, and the exit code; None stands for a traceback."""
    if isinstance(error, KeyboardInterrupt):
        return ["interrupted"], 130
    problems = problems_of(error)
    if problems is not None:
        return problems, 2
    if _is_checkpoint_error(error):
        return str(error).splitlines(), 1
    return None, 1


def _run(words: list[str]) -> int:
    head, verb, rest = _split(words)
    top = _top_parser()
    top.parse_args(head)
    if verb is None:
        top.print_help()
        return 0
    if verb not in VERBS:
        raise UsageError(unknown("verb", verb, VERBS))
    module = importlib.import_module(f"headway.cli.{verb.replace('-', '_')}")
    parser = Parser(prog=f"headway {verb}", description=_capitalised(VERBS[verb]))
    module.add_arguments(parser)
    _add_common(parser)
    options, extra = parser.parse_known_args(rest)
    options.quiet = options.quiet or "-q" in head or "--quiet" in head
    if getattr(module, "TAKES_OVERRIDES", False):
        options.overrides = _overrides(parser, extra)
    elif extra:
        raise UsageError([_unknown_word(parser, word) for word in extra])
    options.argv = ["headway", *words]
    _let_import_from_here()
    code: int = module.run(options)
    return code


def _split(words: list[str]) -> tuple[list[str], str | None, list[str]]:
    """What stands before the verb, the verb, and what follows it."""
    for number, word in enumerate(words):
        if not word.startswith("-"):
            return words[:number], word, words[number + 1 :]
    return words, None, []


def _top_parser() -> Parser:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {text}" for name, text in VERBS.items())
    parser = Parser(
        prog="headway",
        usage="headway [-h] [--version] [-v | -q] VERB ...",
        description="Trains PyTorch language models.",
        epilog=f"verbs:\n{verbs}\n\nheadway VERB --help tells more about a verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"headway {__version__}")
    _add_common(parser)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("-v", "--verbose", action="store_true", help="say more on stderr")
    group.add_argument("-q", "--quiet", action="store_true", help="say only what went wrong")


def _verbosity(words: Sequence[str]) -> int:
    if "-v" in words or "--verbose" in words:
        return logging.DEBUG
    return logging.WARNING if "-q" in words or "--quiet" in words else logging.INFO


def _overrides(parser: argparse.ArgumentParser, extra: list[str]) -> list[str]:
    problems = [
        _unknown_word(parser, word)
        for word in extra
        if not word.startswith("--") or "=" not in word
    ]
    if problems:
        raise UsageError(problems)
    return extra


def _unknown_word(parser: argparse.ArgumentParser, word: str) -> str:
    name = word.partition("=")[0]
    known = [option for action in parser._actions for option in action.option_strings]
    if name in known:
        return f"{word!r} stands in the wrong place; it goes right after '{parser.prog}'"
    hint = nearest(name, known) if name.startswith("-") else None
    did_you_mean = f"; did you mean {hint}?" if hint else ""
    form = " An override of a run file is written --args.max_steps=100." if "." in name else ""
    return f"unknown argument {word!r}{did_you_mean}{form} (see: {parser.prog} --help)"


def _capitalised(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _let_import_from_here() -> None:
    # A class_path may name a module beside the run file's user. Last, so that it shadows nothing.
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def _is_checkpoint_error(error: BaseException) -> bool:
    from headway.checkpoint.errors import CheckpointError

    return isinstance(error, CheckpointError)
