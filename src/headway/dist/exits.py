"""What a rank leaves for `headway train --nproc`: its process number, and how it ended.

Owns: the small files of the launcher's private folder, also those that it leaves for the ranks.
Does not own: the launcher (cli/launch.py).

torchrun reports every failure as exit code 1, restarts what ends with any other code than 0, and
does not say which process is which rank; the folder carries what it does not.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from headway.dist.processes import ProcessIdentity, identify

FOLDER_VARIABLE = "HEADWAY_LAUNCH_DIR"
COMMAND_NAME, DEATHS_NAME = "command.json", "deaths.json"
_FINAL_CODES = (0, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class RankEnd:
    """How one rank of one attempt ended."""

    rank: int
    attempt: int
    code: int
    reason: str = ""
    """What went wrong, in one line."""
    victim: bool = False
    """Whether it ended because another rank did."""
    is_answer: bool = False
    """Whether the code is what the rank's work came to, and no failure."""


@dataclass(frozen=True)
class Death:
    """A process of a rank that ended badly, as torchrun saw it."""

    rank: int
    pid: int
    code: int
    """The exit code; of one that a signal ended, the signal's number below zero."""

    @property
    def signal_name(self) -> str | None:
        try:
            return signal.Signals(-self.code).name if self.code < 0 else None
        except ValueError:
            return f"signal {-self.code}"


def is_launched() -> bool:
    """Whether `headway train --nproc` started this process."""
    return bool(os.environ.get(FOLDER_VARIABLE))


def note_start() -> None:
    """Say that this rank is up and takes signals. Does nothing without a launcher."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        # A machine that joined or left makes ranks start again without a restart being counted.
        Path(folder, f"{_name()}.end").unlink(missing_ok=True)
        _write(Path(folder, f"{_name()}.pid"), json.dumps(asdict(identify())))


def note_exit(
    code: int, reason: str = "", *, victim: bool = False, is_answer: bool = False
) -> None:
    """Say how this rank ends; the first word counts. Does nothing without a launcher."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    path = Path(folder, f"{_name()}.end")
    if not path.exists():
        rank = int(os.environ.get("RANK", "0"))
        end = RankEnd(rank, attempt(), code, reason, victim, is_answer)
        _write(path, json.dumps(asdict(end)))


def code_for_torchrun(code: int, *, is_answer: bool = False) -> int:
    """The exit code of a rank: 0 where a restart must not follow, and the launcher knows better.

    A stop on request, a mistake of the user's and an answer, whatever it is, are not cured by
    starting again.
    """
    return 0 if is_launched() and (is_answer or code in _FINAL_CODES) else code


def read_running(folder: Path) -> dict[tuple[int, int], ProcessIdentity]:
    """The ranks of this machine that did not say that they ended, by attempt and rank."""
    running = {}
    for path in folder.glob("*.pid"):
        if path.with_suffix(".end").exists():
            continue
        try:
            attempt_number, rank = map(int, path.stem.split("-"))
            process = ProcessIdentity.from_json(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError):
            continue  # just removed
        running[attempt_number, rank] = process
    return running


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


def read_command() -> list[str] | None:
    """The command line that the launcher was started with; None without one."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return None
    try:
        found: list[str] = json.loads(Path(folder, COMMAND_NAME).read_text())
    except (OSError, ValueError):
        return None
    return found


def note_deaths(deaths: list[Death]) -> None:
    """Say which processes ended badly, the first one first. Does nothing without a launcher."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        _write(Path(folder, DEATHS_NAME), json.dumps([asdict(death) for death in deaths]))


def read_deaths(folder: Path) -> list[Death]:
    """What `note_deaths` said."""
    try:
        return [Death(**said) for said in json.loads((folder / DEATHS_NAME).read_text())]
    except (OSError, ValueError, TypeError):
        return []


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
