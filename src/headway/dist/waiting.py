"""Who keeps the others waiting, when nothing moves on although every rank lives.

Owns: what a rank says of where it stands, and whom that makes late. Does not own: the signs of life
that carry it (watch.py).

A rank in an endless loop, or in a read that never returns, gives signs of life like any other; the
others wait for it in a collective, where they do not move at all. Two things tell it from them: it
has come to fewer of the agreements that all ranks take part in, or it is not inside torch.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

_LONGEST_PLACE = 120
_awaited = ""


@dataclass(frozen=True)
class Standing:
    """Where a rank that does not move on stands."""

    num_agreements: int
    waited_s: float
    """How long it has been at one point inside torch, as in a collective that nobody joins."""
    place: str
    """The line of code, without torch's own and Python's, and what is waited for there if that is
    known."""

    def encode(self) -> str:
        return json.dumps(asdict(self))


def decode(text: str) -> Standing:
    return Standing(**json.loads(text))


def find_late(standings: Sequence[Standing], limit_s: float) -> list[int]:
    """The ranks for which others have waited so long; none where that cannot be told."""
    if max(standing.waited_s for standing in standings) < limit_s:
        return []
    most = max(standing.num_agreements for standing in standings)
    late = [rank for rank, one in enumerate(standings) if one.num_agreements < most]
    return late or [rank for rank, one in enumerate(standings) if not one.waited_s]


@contextmanager
def awaiting(what: str) -> Iterator[None]:
    """In here the main thread waits for something that is no rank's: whoever it keeps waiting
    meanwhile is told of it. In other threads it has no meaning."""
    global _awaited
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, _awaited = _awaited, what
    try:
        yield
    finally:
        _awaited = before


class MainThread:
    """Looks at the main thread of this process, from another one, again and again."""

    def __init__(self) -> None:
        self._dump = _open_scratch()
        self._stack: list[_Line] = []
        self._since = time.monotonic()

    def look(self) -> None:
        """Note whether it has moved; takes about a millisecond of every thread."""
        stack = self._read()
        if stack != self._stack:
            self._stack, self._since = stack, time.monotonic()

    def note_move(self) -> None:
        """It has moved, as is known without a look."""
        self._stack, self._since = [], time.monotonic()

    @property
    def still_s(self) -> float:
        """How long it has been seen at one and the same point."""
        return time.monotonic() - self._since

    def stand(self, num_agreements: int, settled_s: float) -> Standing:
        """Where it is; what has not moved for less than `settled_s` does not count as waiting."""
        stack = self._read()
        still_s = self.still_s
        waits = still_s >= settled_s and _is_waiting(stack)
        place = _describe(stack) + (f", where it waits for {_awaited}" if _awaited else "")
        return Standing(num_agreements, still_s if waits else 0.0, place)

    def _read(self) -> list[_Line]:
        """Its lines of code, the innermost first.

        Not by way of frame objects: to make those of a thread that runs is a race in Python 3.11,
        where a garbage collection in between lets it run on, and a crash of the process.
        """
        self._dump.seek(0)
        self._dump.truncate()
        faulthandler.dump_traceback(self._dump, all_threads=True)
        self._dump.seek(0)
        return _parse(self._dump.read().decode(), threading.main_thread().ident or 0)


class _Line(NamedTuple):
    file: str
    number: str
    function: str


_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_LINE = re.compile(r'  File "(.*)", line (\S+) in (.*)')


def _parse(dump: str, thread_id: int) -> list[_Line]:
    """The lines of one thread, out of what faulthandler writes of all."""
    lines, is_asked = [], False
    for text in dump.splitlines():
        if header := _THREAD.match(text):
            is_asked = int(header[1], 16) == thread_id
        elif is_asked and (line := _LINE.fullmatch(text)):
            lines.append(_Line(*line.groups()))
    return lines


def _open_scratch() -> BinaryIO:
    """A file that needs no disk, where the system has such."""
    if sys.platform == "linux":
        return open(os.memfd_create("headway-stacks"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _is_waiting(stack: list[_Line]) -> bool:
    """In torch itself; or in a save, whose own thread is the one that waits."""
    return (
        not stack
        or _is_inside(stack[0], "torch")
        or any(_is_inside(line, "headway/checkpoint") for line in stack)
    )


def _describe(stack: list[_Line]) -> str:
    if not stack:
        return "an unknown place"
    others = (line for line in stack if not (_is_inside(line, "torch") or _is_standard(line)))
    line = next(others, stack[0])
    return f"{line.file}:{line.number} in {line.function}"[-_LONGEST_PLACE:]


def _is_inside(line: _Line, package: str) -> bool:
    return f"/{package}/" in Path(line.file).as_posix()


def _is_standard(line: _Line) -> bool:
    return line.file.startswith("<") or (
        line.file.startswith(_standard_library()) and "site-packages" not in line.file
    )


@cache
def _standard_library() -> str:
    return sysconfig.get_path("stdlib")
