"""A note of the process that runs a run, which goes when the run ends in whatever orderly way.

Owns: `run/process.json` in the run's folder. Does not own: what is made of it (examination, the
dashboard, `headway jobs`). Needs no torch.

A note whose process is gone is that of a run that died without a word: nobody was left to write a
post-mortem.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headway.config.snapshot import write_json
from headway.dist.processes import ProcessIdentity, State, identify, look_at

FOLDER_NAME, NOTE_NAME = "run", "process.json"
_MOST_BYTES = 1 << 20


def write_note(
    folder: str | Path, *, command: Sequence[str] | None, resumes: bool, **facts: Any
) -> None:
    """`command`: what started the run; `resumes`: it goes on by itself when given once more."""
    place = Path(folder, FOLDER_NAME)
    place.mkdir(parents=True, exist_ok=True)
    words = None if command is None else list(command)
    began = {**asdict(identify()), "time": time.time()}
    note = {**began, "command": words, "resumes": resumes, **facts}
    write_json(place / NOTE_NAME, note)


def read_note(folder: str | Path) -> dict[str, Any] | None:
    """The note in a run's folder, if there is one."""
    try:
        with Path(folder, FOLDER_NAME, NOTE_NAME).open("rb") as file:
            note = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return note if isinstance(note, dict) else None


def remove_note(folder: str | Path) -> None:
    """The run has ended, and the rest of its files say how."""
    with contextlib.suppress(OSError):
        Path(folder, FOLDER_NAME, NOTE_NAME).unlink()


def put_back_note(folder: str | Path, note: Mapping[str, Any]) -> None:
    """The note that was there before, as it was read."""
    with contextlib.suppress(OSError):
        write_json(Path(folder, FOLDER_NAME, NOTE_NAME), note)


def look_at_process(note: Mapping[str, Any] | None) -> State | None:
    """What the process of a note does; None where nobody can tell from here."""
    if note is None:
        return None
    number, words = note.get("pid"), [note.get(key) for key in ("host", "place", "started")]
    if not isinstance(number, int) or not 0 < number < 2**31:
        return None
    if not all(isinstance(word, str) for word in words):
        return None
    return look_at(ProcessIdentity.from_json(dict(note)))
