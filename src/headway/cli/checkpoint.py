"""`headway checkpoint ...`: the commands that look at checkpoints and those that change them.

Owns: their arguments and how a path on the command line is read. What they do is in
checkpoint_looks.py, checkpoint_values.py and checkpoint_changes.py.

Exit codes: 0 all is well (or equal), 1 damaged (or different), 2 a mistake in the command.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, not_there

_LOOKS = {
    "ls": "the checkpoints of a run directory, oldest first",
    "inspect": "what a checkpoint is: kind, sizes, topology, who can read it",
    "components": "the parts of a checkpoint, with their files and sizes",
    "list": "the values of a checkpoint's parts that are not tensors, by the names modify takes",
    "verify": "read every file and compare it with its digest",
    "diff": "how two checkpoints differ: configuration, counters, state, tensors",
}
_CHANGES = {
    "prune": "delete old checkpoints by the rule that training uses",
    "link": "link the newest weights into the run directory, for from_pretrained",
    "pin": "keep a checkpoint whatever the limits say",
    "unpin": "give a pinned checkpoint back to retention",
    "modify": "edit learning rate, weight decay or counters",
    "convert": "import other tools' checkpoints, export to their formats",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    names = [*_LOOKS, *_CHANGES]
    verbs = parser.add_subparsers(dest="action", required=True, metavar=f"{{{','.join(names)}}}")
    made = {name: verbs.add_parser(name, help=text) for name, text in (_LOOKS | _CHANGES).items()}
    made["ls"].add_argument("path", metavar="DIR", help="a run directory")
    for name in ("inspect", "components", "list"):
        made[name].add_argument("path", metavar="PATH", help="a checkpoint, or a run's newest")
    made["inspect"].add_argument(
        "--validate", action="store_true", help="read every file, as verify does; 1 if damaged"
    )
    made["list"].add_argument(
        "--component", metavar="KEY", help="optimizer, trainer, scheduler, ..."
    )
    made["verify"].add_argument(
        "path", nargs="+", metavar="PATH", help="a checkpoint, or a run directory: all of its"
    )
    for name in ("first", "second"):
        made["diff"].add_argument(
            name, metavar=name.upper(), help="a checkpoint, or a run's newest"
        )
    for name in ("pin", "unpin"):
        made[name].add_argument("path", nargs="+", metavar="PATH", help="a checkpoint")
    _add_prune(made["prune"])
    _add_link(made["link"])
    _add_modify(made["modify"])
    _add_convert(made["convert"])
    for command in made.values():
        command.add_argument("--json", action="store_true", help="print JSON")
        # As before the action; not set here unless given here.
        loud = command.add_mutually_exclusive_group()
        for short, name, text in (("-v", "verbose", "say more"), ("-q", "quiet", "say less")):
            loud.add_argument(
                short, f"--{name}", action="store_true", default=argparse.SUPPRESS, help=text
            )


def _add_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="DIR", help="a run directory")
    parser.add_argument("--keep", type=int, required=True, metavar="N", help="the newest to keep")
    parser.add_argument("--keep-best", type=int, default=0, metavar="N", help="the best to keep")
    parser.add_argument(
        "--keep-every", type=int, metavar="N", help="keep the multiples of this many steps"
    )
    parser.add_argument(
        "--greater-is-better", action="store_true", help="how --keep-best ranks the metric"
    )
    act = parser.add_mutually_exclusive_group()
    act.add_argument("--dry-run", action="store_true", help="only say what would go (the default)")
    act.add_argument("--yes", action="store_true", help="delete")


def _add_link(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("path", nargs="?", metavar="DIR", help="a run directory")
    where.add_argument("--output-path", metavar="DIR", help="another spelling of it")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be linked")
    parser.add_argument("-f", "--force", action="store_true", help="replace real files, too")


def _add_modify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or a run's newest")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--scale", action="append", default=[], metavar="KEY=FACTOR")
    parser.add_argument("--component", help="optimizer, trainer, scheduler, ...")
    parser.add_argument("--param-group", type=int, metavar="I", help="only this optimizer group")
    parser.add_argument("--dry-run", action="store_true", help="only say what would change")
    parser.add_argument("--no-backup", action="store_true", help="do not keep the old one")
    parser.add_argument(
        "-f", "--force", action="store_true", help="also where a negative value makes no sense"
    )


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a checkpoint, model folder or weight file")
    parser.add_argument("target", metavar="DST", help="what to make; must not exist")
    parser.add_argument(
        "--to",
        choices=("checkpoint", "hf", "safetensors", "bin"),
        help="a Headway checkpoint, a Hugging Face folder, one safetensors file, a PyTorch file "
        "(or a folder with one)",
    )
    parser.add_argument("--allow-legacy", action="store_true", help="read pickled files")
    parser.add_argument("--no-optimizer", action="store_true", help="leave the optimizer out")
    parser.add_argument("--dtype", help="float32, bfloat16, float16 or float64")


def run(options: argparse.Namespace) -> int:
    """Do what the action says."""
    room = "looks" if options.action in _LOOKS else "changes"
    room = "values" if options.action == "list" else room
    module = importlib.import_module(f"headway.cli.checkpoint_{room}")
    action: Any = getattr(module, f"run_{options.action}")
    try:
        code: int = action(options)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:
            raise
        from headway.checkpoint import CheckpointError

        # A folder of somebody else's, or a disk that is read-only or full.
        raise CheckpointError(str(error)) from error
    return code


def require_folder(given: str) -> None:
    """A path must be a directory; an address is looked at later."""
    path = Path(given)
    if "://" in given:
        return
    if not path.exists():
        raise ConfigError(not_there(given))
    if not path.is_dir():
        raise ConfigError(f"{given} is a file; a directory is needed")


@contextlib.contextmanager
def open_committed(given: str) -> Iterator[Path]:
    """The same as `open_checkpoint`; a folder with no trace of a checkpoint is a mistake."""
    from headway.checkpoint.manifest import MANIFEST_NAME
    from headway.checkpoint.meta import find_weights, is_half_checkpoint

    with open_checkpoint(given) as directory:
        has_manifest = os.path.lexists(directory / MANIFEST_NAME)
        if not (has_manifest or is_half_checkpoint(directory) or find_weights(directory)):
            raise ConfigError(
                f"{given} is not a committed checkpoint and holds none: there is no {MANIFEST_NAME}"
            )
        yield directory


@contextlib.contextmanager
def open_checkpoint(given: str) -> Iterator[Path]:
    """The checkpoint a path or address means: itself, or the newest one of a run directory."""
    from headway.checkpoint.discovery import find_whole_checkpoint
    from headway.checkpoint.remote import local_copy

    require_folder(given)
    try:
        with local_copy(find_whole_checkpoint(given) or given) as directory:
            yield directory
    except FileNotFoundError as error:
        if error.filename is not None:
            raise
        raise ConfigError(str(error)) from error
