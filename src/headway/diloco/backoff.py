"""How long to wait before asking again.

Owns: the pauses between attempts: 2 s, doubling, up to a limit, each shortened by chance so that
workers that lost one server do not all come back at once. Does not own: what is worth a repetition.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

FIRST_S = 2.0
MOST_S = 60.0
_SPREAD = 0.25


class Backoff:
    """The pauses of one undertaking. `wait` ends early, and says so, once `stop` is set."""

    def __init__(
        self,
        first_s: float = FIRST_S,
        most_s: float = MOST_S,
        *,
        stop: threading.Event | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._next_s, self._most_s = min(first_s, most_s), most_s
        self._stop = stop or threading.Event()
        self._chance = chance

    def take(self) -> float:
        """The next pause in seconds."""
        pause_s = self._next_s * (1 - _SPREAD * self._chance())
        self._next_s = min(self._most_s, 2 * self._next_s)
        return pause_s

    def wait(self) -> bool:
        """Pause; False if it was cut short."""
        return not self._stop.wait(self.take())
