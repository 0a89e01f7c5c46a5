"""Python's garbage collector, run at chosen steps instead of whenever it likes.

Owns: when garbage is collected while a run goes on, and that the collector is afterwards as it was
before. Does not own: device memory that torch keeps for later (engine/cached_memory.py).

A collection stops the host for a while. Where each rank collects at its own time, all of them wait
for one after the other in every step; at a step of its own they all stop together, once.
"""

from __future__ import annotations

import gc
import time
from typing import Any

from headway.callbacks.watch.ranges import require_count, require_flag
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerState

COLLECTING = "garbage_collector/duration_s"
_YOUNG, _ALL = 1, 2


class GarbageCollectorCallback(TrainerCallback):
    """Turns automatic collection off; collects young objects every `gc_interval` steps and after
    each save, all objects every `full_every` of these intervals.

    `enabled=False` leaves Python's collector as it is.
    """

    def __init__(
        self, gc_interval: int = 1000, enabled: bool = True, *, full_every: int = 10
    ) -> None:
        kind = type(self).__name__
        require_count(f"{kind}: gc_interval", gc_interval, least=1)
        require_count(f"{kind}: full_every", full_every, least=1)
        require_flag(f"{kind}: enabled", enabled)
        self.gc_interval, self.full_every, self.enabled = gc_interval, full_every, enabled
        self._was_on: bool | None = None
        """Whether the collector was on before the run; None while it is not ours."""

    def on_train_begin(self) -> None:
        if self.enabled and self._was_on is None:
            self._was_on = gc.isenabled()
            gc.disable()

    def on_step_end(self, state: TrainerState, trainer: Any) -> None:
        step = state.global_step
        if self._was_on is None or step % self.gc_interval:
            return
        is_full = step % (self.gc_interval * self.full_every) == 0
        self._collect(_ALL if is_full else _YOUNG, trainer)

    def on_save(self, trainer: Any) -> None:
        # A save is announced at the end of a step that all ranks agreed on, on the main thread.
        if self._was_on is not None:
            self._collect(_YOUNG, trainer)

    def on_close(self) -> None:
        if self._was_on:
            gc.enable()
        self._was_on = None

    def _collect(self, generation: int, trainer: Any) -> None:
        began_s = time.perf_counter()
        gc.collect(generation)
        seconds = time.perf_counter() - began_s
        trainer.record_metric(COLLECTING, seconds, "max", None, "sum")
