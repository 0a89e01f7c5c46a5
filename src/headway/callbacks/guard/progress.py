"""Whether a run moves on, as another thread of the process sees it.

Owns: what a run is doing, since when nothing has come of it, and how long that may take. Does not
own: what follows when it takes longer (hang_watchdog.py).

The main thread only counts. All clocks are read by the thread that looks, so that a process which
was suspended as a whole is not taken for one that hangs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

TRAINING, EVALUATING, STARTING, PAUSED = "training", "evaluating", "the first step", "a pause"
_NUM_STEPS = 64


@dataclass(frozen=True)
class Limits:
    """How long nothing may come of what a run does."""

    step_s: float
    factor: float
    first_step_s: float
    other_s: float


@dataclass(frozen=True)
class Status:
    """What a rank does, for how long, and how long it may."""

    what: str
    silent_s: float
    allowed_s: float
    step: int
    tell_after_s: float
    """From when on it is worth telling, though it may go on; never more than `allowed_s`."""

    @property
    def is_late(self) -> bool:
        return self.silent_s > self.allowed_s

    @property
    def is_suspect(self) -> bool:
        return self.silent_s > self.tell_after_s

    @property
    def is_excused(self) -> bool:
        """Whether others should wait for it: it is at something else that may take its time."""
        if self.what == TRAINING:
            return self.silent_s < self.allowed_s / 2
        return not self.is_suspect


class Progress:
    """Counts of the main thread, and another thread's look at them."""

    def __init__(self, limits: Limits, timing: Any, bus: Any, own_name: str) -> None:
        self._limits, self._timing, self._bus, self._own_name = limits, timing, bus, own_name
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._began_s = time.monotonic()
        self.num_signs = self.num_steps = self.num_batches = self.step = 0
        self._signs_before = timing.num_signs
        self._seen: tuple[Any, ...] = ()
        self._since_s = self._looked_s = time.monotonic()

    # The main thread

    def begin_step(self) -> None:
        self.num_signs += 1
        self._began_s = time.monotonic()

    def end_step(self, step: int) -> None:
        self._steps_s.append(time.monotonic() - self._began_s + self._timing.fetch_s)
        self.num_signs += 1
        self.num_steps += 1
        self.step, self.num_batches = step, 0

    def end_batch(self) -> None:
        """A batch of an evaluation is done."""
        self.num_signs += 1
        self.num_batches += 1

    # The thread that looks

    def look(self, longest_gap_s: float, still_s: float = 0.0) -> Status:
        """What goes on; call it often, at least every `longest_gap_s`.

        `still_s`: how long the main thread has been at one point of the code.
        """
        now, what, others = time.monotonic(), self._name_what(), self._timing.num_signs
        stood_still = now - self._looked_s > longest_gap_s
        self._looked_s = now
        if not self._seen or what != self._seen[0]:
            self._signs_before = others
        if (what, self.num_signs, others) != self._seen or stood_still:
            self._seen, self._since_s = (what, self.num_signs, others), now
        silent_s, allowed_s = now - self._since_s, self._allowed_s(what)
        tell_s = allowed_s
        in_handler = self._callback is not None and not self._begins(what)
        if in_handler and (what == EVALUATING or still_s >= self._step_limit_s):
            tell_s = min(allowed_s, self._step_limit_s)
        return Status(what, silent_s, allowed_s, self.step, tell_s)

    @property
    def num_moves(self) -> int:
        """Grows with whatever comes of the run."""
        return self.num_signs + int(self._timing.num_signs)

    @property
    def _callback(self) -> str | None:
        """The other callback whose handler runs."""
        name: str | None = self._bus.busy_with
        return None if name == self._own_name else name

    def _name_what(self) -> str:
        doing = self._timing.doing
        if doing == "evaluate":
            return EVALUATING
        if doing == "pause":
            return PAUSED
        if doing is not None:
            return f"{doing} (by the loop)"
        callback = self._callback
        if callback is not None:
            return f"the callback {callback}"
        if self._timing.is_aside:
            return "work beside training"
        return TRAINING if self.num_steps else STARTING

    def _allowed_s(self, what: str) -> float:
        limits = self._limits
        if what == PAUSED:
            return math.inf
        if self._begins(what):
            return limits.first_step_s
        # What a handler does in an evaluation need not be a batch.
        if what == TRAINING or (what == EVALUATING and self._callback is None):
            return self._step_limit_s
        return limits.other_s

    def _begins(self, what: str) -> bool:
        """The first batch of an evaluation may compile as the first step does."""
        moved = self.num_batches or self._timing.num_signs > self._signs_before
        return what == STARTING or (what == EVALUATING and not moved)

    @property
    def _step_limit_s(self) -> float:
        steps_s = list(self._steps_s)
        usual_s = statistics.median(steps_s) if steps_s else 0.0
        return max(self._limits.step_s, self._limits.factor * usual_s)
