"""How long the loop waited for data, what else than training took its time, and the update on a
device whose metrics come before it.

Owns: these seconds, for whoever works out how fast a run is. Does not own: that working out
(callbacks/watch).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    import torch

clock = time.monotonic

Item = TypeVar("Item")
P = ParamSpec("P")
Result = TypeVar("Result")


class LoopTiming:
    """Seconds of a run on this rank."""

    def __init__(self) -> None:
        self.fetch_s = 0.0
        """How long the newest window of training data was waited for."""
        self.fetches_s = 0.0
        """The same of all windows."""
        self._doing: str | None = None
        self.on_change: Callable[[str | None], None] | None = None
        """Called on the training thread when `doing` becomes another."""
        self.num_signs = 0
        """Of `note_progress`, so far."""
        self._aside_s = 0.0
        self._aside_since_s: float | None = None
        self._update: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def begin_update(self, device: torch.device) -> torch.cuda.Event | None:
        """Loss and gradients of a step are in the device's queue: the event of their end."""
        if device.type != "cuda":
            return None
        import torch

        if self._update is None:
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._update = begun, ended
        self._update[0].record(torch.cuda.current_stream(device))
        return self._update[0]

    def end_update(self) -> None:
        """The update is in the queue as well."""
        if self._update is not None:
            self._update[1].record()

    @property
    def is_updating(self) -> bool:
        """Whether the device still has to finish the newest update."""
        return self._update is not None and not self._update[1].query()

    @property
    def update_s(self) -> float:
        """How long the newest update took the device; without end while it is at it."""
        if self._update is None:
            return 0.0
        if self.is_updating:
            return math.inf
        return float(self._update[0].elapsed_time(self._update[1])) / 1e3

    @property
    def doing(self) -> str | None:
        """What the loop does right now that is no step: `evaluate`, `save`, `rollback`, `pause`,
        `generate`, or `close` once there are no more steps."""
        return self._doing

    @doing.setter
    def doing(self, what: str | None) -> None:
        changes, self._doing = what != self._doing, what
        if changes and self.on_change is not None:
            self.on_change(what)

    @property
    def is_aside(self) -> bool:
        """Whether a callback is at work that is no part of training."""
        return self._aside_since_s is not None

    def tell(self, what: str, act: Callable[P, Result]) -> Callable[P, Result]:
        """The same act, with `doing` saying what goes on while it does."""

        def told(*args: P.args, **kwargs: P.kwargs) -> Result:
            before, self.doing = self.doing, what
            try:
                return act(*args, **kwargs)
            finally:
                self.doing = before

        return told

    @property
    def aside_s(self) -> float:
        """What callbacks have said was not training, so far."""
        since_s = self._aside_since_s
        return self._aside_s + (0.0 if since_s is None else clock() - since_s)

    def note_progress(self) -> None:
        """In a handler that takes long, now and then: it gets on, whoever looks at it."""
        self.num_signs += 1

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
