"""How long the loop waited for data, and what else than training took its time.

Owns: these seconds, for whoever works out how fast a run is. Does not own: that working out
(callbacks/watch).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

clock = time.monotonic

Item = TypeVar("Item")


class LoopTiming:
    """Seconds of a run on this rank."""

    def __init__(self) -> None:
        self.fetch_s = 0.0
        """How long the newest window of training data was waited for."""
        self.fetches_s = 0.0
        """The same of all windows."""
        self._aside_s = 0.0
        self._aside_since_s: float | None = None

    @property
    def aside_s(self) -> float:
        """What callbacks have said was not training, so far."""
        since_s = self._aside_since_s
        return self._aside_s + (0.0 if since_s is None else clock() - since_s)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around work in a handler that is no part of training, such as writing a large file."""
        if self._aside_since_s is not None:  # counted already
            yield
            return
        self._aside_since_s = clock()
        try:
            yield
        finally:
            self._aside_s, self._aside_since_s = self.aside_s, None

    def time_fetches(self, windows: Iterable[Item]) -> Iterator[Item]:
        """The same windows, the wait for each one timed."""
        source = iter(windows)
        try:
            while True:
                began_s = clock()
                try:
                    window = next(source)
                except StopIteration:
                    return
                self.fetch_s = clock() - began_s
                self.fetches_s += self.fetch_s
                yield window
        finally:
            close = getattr(source, "close", None)
            if close is not None:
                close()
