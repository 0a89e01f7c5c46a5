"""Who keeps the others waiting, when nothing moves on although every rank lives.

Owns: what a rank says of where it stands, and whom that makes late. Does not own: the signs of life
that carry it (watch.py).

A rank in an endless loop, or in a read that never returns, gives signs of life like any other; the
others wait for it in a collective, where they do not move at all. Two things tell it from them: it
has come to fewer of the agreements that all ranks take part in, or it is not inside torch.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

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


HOLDS_ALL = Standing(0, 0.0, "a call that lets no other thread of its process run")
"""What others say of a rank that computes and cannot say where it stands."""


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
        self._stack: list[_Point] = []
        self._since = time.monotonic()

    def look(self) -> None:
        """Note whether it has moved."""
        stack = _read_main_thread()
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
        stack = _read_main_thread()
        still_s = self.still_s
        waits = still_s >= settled_s and _is_waiting(stack)
        place = _describe(stack) + (f", where it waits for {_awaited}" if _awaited else "")
        return Standing(num_agreements, still_s if waits else 0.0, place)


class _Point(NamedTuple):
    call: int
    instruction: int
    file: str
    line: int | None
    function: str


def _read_main_thread() -> list[_Point]:
    """Where it is, and where it was called from."""
    with _no_collections():
        points = []
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            code = frame.f_code
            names = (code.co_filename, frame.f_lineno, code.co_name)
            points.append(_Point(id(frame), frame.f_lasti, *names))
            frame = frame.f_back
    return points


if sys.version_info >= (3, 12):
    _no_collections = nullcontext
else:
    # Before 3.12 making an object can begin a garbage collection, which can let other threads run:
    # a frame that is just being looked at would end meanwhile. Not by `gc.disable`, with which the
    # training itself decides when to collect.
    _collections = threading.Lock()
    if hasattr(os, "register_at_fork"):
        # A child must not begin with what holds for a moment here.
        os.register_at_fork(
            before=_collections.acquire,
            after_in_parent=_collections.release,
            after_in_child=_collections.release,
        )

    @contextmanager
    def _no_collections() -> Iterator[None]:
        with _collections:
            thresholds = gc.get_threshold()
            gc.set_threshold(0)
            try:
                yield
            finally:
                gc.set_threshold(*thresholds)


def _is_waiting(stack: list[_Point]) -> bool:
    """In torch itself; or in a save, whose own thread is the one that waits."""
    inside_torch = bool(stack) and _is_inside(stack[0], "torch")
    return inside_torch or any(_is_inside(point, "headway/checkpoint") for point in stack)


def _describe(stack: list[_Point]) -> str:
    if not stack:
        return "an unknown place"
    others = (point for point in stack if not (_is_inside(point, "torch") or _is_standard(point)))
    point = next(others, stack[0])
    return f"{point.file}:{point.line} in {point.function}"[-_LONGEST_PLACE:]


def _is_inside(point: _Point, package: str) -> bool:
    return f"/{package}/" in Path(point.file).as_posix()


def _is_standard(point: _Point) -> bool:
    return point.file.startswith("<") or (
        point.file.startswith(_standard_library()) and "site-packages" not in point.file
    )


@cache
def _standard_library() -> str:
    return sysconfig.get_path("stdlib")
