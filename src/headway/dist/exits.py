"""What a rank leaves for `headway train --nproc`: its process number, and how it ended.

Owns: the small files of the launcher's private folder. Does not own: the launcher (cli/launch.py).

torchrun reports every failure as exit code 1, restarts what ends with any other code than 0, and
does not say which process is which rank; the folder carries what it does not.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER_VARIABLE = "HEADWAY_LAUNCH_DIR"


@dataclass(frozen=True)
class RankEnd:
    """How one rank of one attempt ended."""

    rank: int
    attempt: int
    code: int
    victim: bool = False
    """Whether it ended because another rank did."""


def is_launched() -> bool:
    """Whether `headway train --nproc` started this process."""
    return bool(os.environ.get(FOLDER_VARIABLE))


def note_start() -> None:
    """Say that this rank is up and takes signals. Does nothing without a launcher."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        _write(Path(folder, f"{_name()}.pid"), str(os.getpid()))


def note_exit(code: int, *, victim: bool = False) -> None:
    """Say how this rank ends; the first word counts. Does nothing without a launcher."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    path = Path(folder, f"{_name()}.end")
    if not path.exists():
        end = RankEnd(int(os.environ.get("RANK", "0")), attempt(), code, victim)
        _write(path, json.dumps(asdict(end)))


def read_pids(folder: Path) -> dict[int, int]:
    """Process numbers of the ranks of this machine's newest attempt that have not ended."""
    newest: dict[int, tuple[int, int]] = {}
    for path in folder.glob("*.pid"):
        try:
            number, rank = map(int, path.stem.split("-"))
            if not path.with_suffix(".end").exists() and number >= newest.get(rank, (-1, 0))[0]:
                newest[rank] = (number, int(path.read_text()))
        except (OSError, ValueError):  # half-written or just removed
            continue
    return {rank: pid for rank, (_, pid) in newest.items()}


def read_ends(folder: Path) -> list[RankEnd]:
    """How the ranks of the newest attempt ended, as far as they said, in rank order."""
    ends = []
    for path in folder.glob("*.end"):
        try:
            ends.append(RankEnd(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            continue
    last = max((end.attempt for end in ends), default=0)
    return sorted((end for end in ends if end.attempt == last), key=lambda end: end.rank)


def attempt() -> int:
    """How often the launcher has restarted this run."""
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(text) if text.isdigit() else 0


def _name() -> str:
    return f"{attempt()}-{os.environ.get('RANK', '0')}"


def _write(path: Path, text: str) -> None:
    # Whole or not at all: the launcher may read at any moment.
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError:
        pass  # the launcher is gone, and its folder with it
