"""The end of a process that cannot wait for its main thread.

Owns: ending at once, what is done before that, and the line on stderr that tells why.
Does not own: when (watch.py, the hang watchdog, cli/rank.py), and what launchers read (exits.py).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headway.dist.exits import code_for_torchrun, note_exit

_LAST_ACTS_S = 2.5
_last_acts: list[Callable[[str], None]] = []


def say(text: str, kind: str = "error") -> None:
    """One line on stderr, past Python's buffers: another thread may hold them for ever."""
    try:
        os.write(2, f"{kind}: {text}\n".encode())
    except OSError:
        pass


@contextmanager
def at_forced_end(act: Callable[[str], None]) -> Iterator[None]:
    """Inside: have `act` called with the reason should the watch end the process.

    It runs in a thread, has little time, and cannot count on the main thread or on other ranks.
    """
    _last_acts.append(act)
    try:
        yield
    finally:
        _last_acts.remove(act)


def _act_at_last(reason: str) -> None:
    for act in tuple(_last_acts):
        try:
            act(reason)
        except Exception as error:
            say(f"at the end of the process: {type(error).__name__}: {error}", "warning")


def end_process(code: int, reason: str, *, victim: bool = True) -> None:
    """End at once, leaving word where the launcher looks for it."""
    note_exit(code, reason, victim=victim)
    if _last_acts:
        acts = threading.Thread(target=_act_at_last, args=(reason,), daemon=True)
        acts.start()
        acts.join(_LAST_ACTS_S)
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(0.5)
    os._exit(code_for_torchrun(code))


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
