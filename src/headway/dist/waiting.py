"""Who keeps the others waiting, when nothing moves on although every rank lives.

Owns: what a rank says of where it stands, and whom that makes late. Does not own: the signs of life
that carry it (watch.py).

A rank in an endless loop, or in a read that never returns, gives signs of life like any other; the
others wait for it in a collective, where they do not move at all. Two things tell it from them: it
has come to fewer of the agreements that all ranks take part in, or it is not inside torch.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import FrameType

WAITING_AFTER_S = 60.0
"""How long nothing may move before it is said who is late; HEADWAY_WAITING_AFTER_S, 0 = never."""
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
        self._point: list[tuple[int, int]] = []
        self._since = time.monotonic()

    def look(self) -> None:
        """Note whether it has moved."""
        point, frame = [], _main_frame()
        while frame is not None:
            point.append((id(frame), frame.f_lasti))
            frame = frame.f_back
        if point != self._point:
            self._point, self._since = point, time.monotonic()

    @property
    def still_s(self) -> float:
        """How long it has been seen at one and the same point."""
        return time.monotonic() - self._since

    def stand(self, num_agreements: int, settled_s: float) -> Standing:
        """Where it is; what has not moved for less than `settled_s` does not count as waiting."""
        frame = _main_frame()
        still_s = time.monotonic() - self._since
        waits = still_s >= settled_s and _is_waiting(frame)
        place = _describe(frame) + (f", where it waits for {_awaited}" if _awaited else "")
        return Standing(num_agreements, still_s if waits else 0.0, place)


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def waiting_limit_s() -> float:
    """How long nothing may move before it is said who is late; 0 means for ever."""
    text = os.environ.get("HEADWAY_WAITING_AFTER_S", "").strip()
    try:
        return max(0.0, float(text)) if text else WAITING_AFTER_S
    except ValueError:
        from headway.errors import ConfigError

        raise ConfigError(
            f"HEADWAY_WAITING_AFTER_S: {text!r} is not a number of seconds; allowed: 0 (never) "
            "and up"
        ) from None


def _is_waiting(frame: FrameType | None) -> bool:
    """In torch itself; or in a save, whose own thread is the one that waits."""
    if frame is None or _is_inside(frame, "torch"):
        return True
    while frame is not None:
        if _is_inside(frame, "headway/checkpoint"):
            return True
        frame = frame.f_back
    return False


def _describe(frame: FrameType | None) -> str:
    inner = frame
    while frame is not None and (_is_inside(frame, "torch") or _is_standard(frame)):
        frame = frame.f_back
    frame = frame or inner
    if frame is None:
        return "an unknown place"
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"[-_LONGEST_PLACE:]


def _is_inside(frame: FrameType, package: str) -> bool:
    return f"/{package}/" in Path(frame.f_code.co_filename).as_posix()


def _is_standard(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith("<") or (
        name.startswith(_standard_library()) and "site-packages" not in name
    )


@cache
def _standard_library() -> str:
    return sysconfig.get_path("stdlib")
