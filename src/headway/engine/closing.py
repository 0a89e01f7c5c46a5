"""The time that callbacks may take for what is still on its way when a run ends.

Owns: one deadline for all of them. Does not own: what they wait for, nor `on_close` (events).

Each callback closes first and none waits; then all are waited for, and the time that one of them
needs passes for the others as well. So the end of a run takes as long as the most patient callback
allows, however many there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Wait = Callable[[float], Any]


class ClosingTime:
    """Waits that are put off until every callback has closed."""

    def __init__(self) -> None:
        self._waits: list[tuple[str, Wait, float]] = []
        self._began_s: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether callbacks are closing now, so that a wait can be put off."""
        return self._began_s is not None

    def begin(self) -> None:
        self._waits, self._began_s = [], time.monotonic()

    def put_off(self, name: str, wait: Wait, timeout_s: float) -> None:
        """Have `wait(seconds)` called later, with what is left of its time then."""
        self._waits.append((name, wait, timeout_s))

    def end(self) -> list[tuple[str, Callable[[], Any]]]:
        """The waits by the name of their callback; to be called in this order."""
        began_s, self._began_s = self._began_s or time.monotonic(), None

        def within(wait: Wait, timeout_s: float) -> Callable[[], Any]:
            return lambda: wait(max(0.0, timeout_s - (time.monotonic() - began_s)))

        return [(name, within(wait, timeout_s)) for name, wait, timeout_s in self._waits]
