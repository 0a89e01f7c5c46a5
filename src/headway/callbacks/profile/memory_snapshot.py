"""Snapshots of CUDA memory at chosen steps and when it runs out.

Owns: when a snapshot is written and how it is called. Does not own: the record of allocations
(memory_history.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.callbacks.profile.memory_history import DEFAULT_ENTRIES, MemoryHistory
from headway.callbacks.profile.rank_choice import Ranks, is_chosen, require_ranks
from headway.callbacks.watch.ranges import (
    require_count,
    require_file_name,
    require_flag,
    require_path,
)
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

logger = logging.getLogger(__name__)


class MemorySnapshotCallback(TrainerCallback):
    """Records allocations and writes them at the end of each of `steps`, and on running out.

    Files are `{file_prefix}_step{step}_rank{rank}.pickle`, with `_oom` for memory that ran out, in
    `output_dir` (in the run's folder if relative). They hold the newest `max_entries` events with
    their call stacks. Recording ends with the last of the steps unless `on_oom` is set. By default
    all ranks write.
    """

    priority = -10
    failure_policy = "disable"

    def __init__(
        self,
        steps: int | Sequence[int] | None = None,
        on_oom: bool = True,
        max_entries: int = DEFAULT_ENTRIES,
        output_dir: str = "memory_snapshots",
        file_prefix: str = "memory_snapshot",
        ranks: Ranks = "all",
        enabled: bool = True,
    ) -> None:
        given: Any = () if steps is None else steps
        listed = list(given) if isinstance(given, list | tuple | set) else [given]
        for step in listed:
            require_count("steps", step, least=1)
        require_flag("on_oom", on_oom)
        require_count("max_entries", max_entries, least=1)
        require_path("output_dir", output_dir)
        require_file_name("file_prefix", file_prefix)
        require_ranks(ranks)
        require_flag("enabled", enabled)
        if not listed and not on_oom:
            raise ConfigError(
                "MemorySnapshotCallback: neither steps nor on_oom is given, so there is nothing to "
                "write; give steps=[...] or on_oom=True"
            )
        self.steps = frozenset(listed)
        self.on_oom, self.enabled, self.ranks = on_oom, enabled, ranks
        self.output_dir, self.file_prefix = output_dir, file_prefix
        self.max_entries = max_entries
        self._history = MemoryHistory(max_entries)
        self._folder = Path()
        self._rank = self._step = 0

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        if not self.enabled:
            return
        self._rank, self._step = args.process_index, state.global_step
        self._folder = Path(args.output_dir) / self.output_dir
        chosen = is_chosen(self.ranks, args, trainer.strategy)
        device = trainer.strategy.device
        if device.type != "cuda":
            if state.is_world_process_zero:
                logger.warning(
                    "MemorySnapshotCallback writes nothing: the run is on %r and snapshots are of "
                    "CUDA memory; MallocTraceCallback looks at the host's",
                    device.type,
                )
            return
        past = sorted(step for step in self.steps if 0 < state.max_steps < step)
        if past and state.is_world_process_zero:
            logger.warning("steps: %s lie past the end of training (%d)", past, state.max_steps)
        if chosen:
            self._history.start()

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        if not self._history.is_on:
            return
        self._step = state.global_step
        if self._step in self.steps:
            with trainer.timing.aside():
                self._history.write(self._path("step"))
        if not self.on_oom and self._step >= max(self.steps):
            self._history.stop()

    def on_error(self, exception: BaseException) -> None:
        from torch import OutOfMemoryError

        if self._history.is_on and self.on_oom and isinstance(exception, OutOfMemoryError):
            self._history.write(self._path("oom_step"))
        self._history.stop()

    def on_train_end(self) -> None:
        self._history.stop()

    def on_close(self) -> None:
        self._history.stop()

    def _path(self, what: str) -> Path:
        return self._folder / f"{self.file_prefix}_{what}{self._step}_rank{self._rank}.pickle"
