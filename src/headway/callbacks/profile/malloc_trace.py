"""Where the host's memory grows, by line of Python.

Owns: tracing allocations of Python between steps and the report of what grew. Does not own:
memory of CUDA (memory_snapshot.py); memory that libraries take without Python is not seen, only its
sum in the peak of the process.
"""

from __future__ import annotations

import logging
import sys
import tracemalloc
from pathlib import Path
from typing import Any

from headway.callbacks.profile.rank_choice import Ranks, is_chosen, require_ranks
from headway.callbacks.watch.host_memory import peak_rss_bytes
from headway.callbacks.watch.ranges import require_count, require_flag
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)

_MIB = 1024**2
_OURS = (tracemalloc.__file__, __file__)

# In Pythons before these, `tracemalloc.stop` crashes the process when a thread of torch (one that
# lets go of a tensor after a collective) is about to be traced at that moment: gh-128679.
_CAN_STOP = sys.version_info >= (3, 13, 2) or (3, 12, 9) <= sys.version_info < (3, 13)

_began_tracing = False  # whether tracing was begun here, by any callback of this process

# Bytes and blocks that are held, by the line (and its callers) that took them.
Held = dict[tracemalloc.Traceback, tuple[int, int]]


class MallocTraceCallback(TrainerCallback):
    """Reports, every `interval` steps, the `top` lines of Python whose memory has grown most.

    Tracing begins when `start_step` steps are done, so that what a run takes once is not in it,
    and ends after `num_steps` (None: with the run). Growth is told since the last report and since
    tracing began: a leak grows in both. Reports are logged on rank 0; every chosen rank (by default
    rank 0) appends them to `malloc_trace_rank{rank}.txt` in the run's folder. `frames` is how many
    callers of a line are told apart and shown.

    Tracing slows Python down, two- to fourfold where it allocates much; before and after it costs
    nothing. Python before 3.12.9, and 3.13 before 3.13.2, cannot end it safely beside torch's
    threads: there it goes on, with its cost, until the process ends.
    """

    priority = -10
    failure_policy = "disable"

    def __init__(
        self,
        start_step: int = 10,
        interval: int = 10,
        num_steps: int | None = None,
        top: int = 10,
        frames: int = 1,
        ranks: Ranks = None,
        enabled: bool = True,
    ) -> None:
        require_count("start_step", start_step)
        require_count("interval", interval, least=1)
        require_count("num_steps", num_steps, least=1, optional=True)
        require_count("top", top, least=1)
        require_count("frames", frames, least=1)
        require_ranks(ranks)
        require_flag("enabled", enabled)
        self.start_step, self.interval, self.num_steps = start_step, interval, num_steps
        self.top, self.frames, self.ranks, self.enabled = top, frames, ranks, enabled
        self._is_chosen = self._is_on = False
        self._first: Held = {}
        self._last: Held = {}
        self._began = self._reported = 0
        self._path = Path()

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        self._is_chosen = self.enabled and is_chosen(self.ranks, args, trainer.strategy)
        self._path = Path(args.output_dir) / f"malloc_trace_rank{args.process_index}.txt"
        self._began = max(self.start_step, state.global_step)
        if self._is_chosen and 0 < state.max_steps <= self._began:
            logger.warning(
                "MallocTraceCallback: start_step=%d lies past the end of training (%d)",
                self.start_step,
                state.max_steps,
            )
        if self._began == state.global_step:
            self._begin()

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        step = state.global_step
        if not self._is_on:
            if self._is_chosen and step == self._began:
                self._begin()
            return
        last = self.num_steps is not None and step >= self._began + self.num_steps
        if last or (step - self._began) % self.interval == 0:
            with trainer.timing.aside():
                self._report(step, state.is_world_process_zero)
        if last:
            self._end()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if self._is_on and self._reported != state.global_step:
            self._report(state.global_step, state.is_world_process_zero)
        self._end()

    def on_close(self) -> None:
        self._end()

    def _begin(self) -> None:
        if not self._is_chosen:
            return
        global _began_tracing
        if not tracemalloc.is_tracing():
            tracemalloc.start(self.frames)
            _began_tracing = True
        elif tracemalloc.get_traceback_limit() < self.frames:
            logger.warning(
                "MallocTraceCallback: frames=%d, but tracing was begun before with %d",
                self.frames,
                tracemalloc.get_traceback_limit(),
            )
        self._is_on, self._reported = True, self._began
        self._first = self._last = self._take()

    def _end(self) -> None:
        global _began_tracing
        # Tracing that somebody else has begun goes on after ours.
        if self._is_on and _began_tracing:
            if _CAN_STOP:
                tracemalloc.stop()
                _began_tracing = False
            else:
                tracemalloc.clear_traces()
        self._is_chosen = self._is_on = False
        self._first = self._last = {}

    def _report(self, step: int, speaks: bool) -> None:
        now = self._take()
        traced = sum(size for size, _ in now.values())
        parts = [
            f"host memory at step {step}: {traced / _MIB:.1f} MiB held by Python since step "
            f"{self._began}, {peak_rss_bytes() / _MIB:.0f} MiB the most of the process",
            f"grown since step {self._reported}:",
            *self._lines(now, self._last),
        ]
        if self._reported != self._began:  # in the first report that is the same
            parts += [f"grown since step {self._began}:", *self._lines(now, self._first)]
        text = "\n".join(parts)
        self._last, self._reported = now, step
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text + "\n\n")
        if speaks:
            logger.info("%s", text)

    def _take(self) -> Held:
        """What is held now. All blocks are gone through once, and only sums are kept."""
        kind = "lineno" if self.frames == 1 else "traceback"
        return {
            held.traceback: (held.size, held.count)
            for held in tracemalloc.take_snapshot().statistics(kind)
            if held.traceback[-1].filename not in _OURS
        }

    def _lines(self, now: Held, before: Held) -> list[str]:
        grown = []
        for where, (size, count) in now.items():
            size_before, count_before = before.get(where, (0, 0))
            if size > size_before:
                grown.append((size - size_before, count - count_before, where))
        grown.sort(key=lambda change: -change[0])
        lines = [
            f"  {size / 1024:+10.1f} KiB in {count:+d} blocks  "
            + " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(where))
            for size, count, where in grown[: self.top]
        ]
        return lines or ["  nothing"]
