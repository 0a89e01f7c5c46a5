"""The command that started this run, and the one that goes on with it.

Owns: reading the former from this process and from what started it. Does not own: what the words
mean (cli/), nor hiding secrets in them (config/snapshot).
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from headway.dist.exits import read_command


def find_command() -> list[str] | None:
    """The command line that the user gave; None where there was none, as in a notebook."""
    launched = read_command()
    if launched is not None:
        return launched
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        above = _command_of(os.getppid())
        if any("torchrun" in word or word == "torch.distributed.run" for word in above):
            return [Path(above[0]).name, *above[1:]]
    if Path(sys.argv[0]).name == "headway":
        return ["headway", *sys.argv[1:]]
    words = sys.orig_argv
    if len(words) < 2 or words[1] in ("-c", "-") or any("ipykernel" in word for word in words):
        return None
    return [Path(words[0]).name, *words[1:]]


def continue_command(
    command: Sequence[str], checkpoint: str | None, *, by_itself: bool
) -> list[str]:
    """The command that goes on from the newest checkpoint.

    `by_itself`: the run looks for it without being told. A script of the user's own is left as it
    is: which of its words mean a checkpoint is its own business.
    """
    if not _trains(command):
        return list(command)
    kept, skip = [], False
    for word in command:
        if skip or word == "--no-resume" or word.startswith("--resume="):
            skip = False
        elif word == "--resume":
            skip = True
        else:
            kept.append(word)
    if checkpoint is not None and not by_itself:
        kept += ["--resume", checkpoint]
    return kept


def _trains(command: Sequence[str]) -> bool:
    pairs = itertools.pairwise(command)
    return any(Path(one).name == "headway" and other == "train" for one, other in pairs)


def _command_of(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return text.decode(errors="replace").rstrip("\0").split("\0")
