"""A file of norms by parameter: what the loggers of gradients and of parameters have in common.

Owns: the file on rank 0, the model's shards, and that a failure of one rank, also in writing, is
one of all. Does not own: what is measured, and when (the callbacks).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headway.callbacks.log.json_lines import JsonLogWriter, log_folder
from headway.callbacks.watch.shards import Shards, find_shards
from headway.callbacks.watch.sharing import join_numbers, on_all_ranks
from headway.engine.state import TrainerState

if TYPE_CHECKING:
    from torch import Tensor, nn


class NormLog:
    """Numbers of all ranks in one file."""

    def __init__(self, filename: str) -> None:
        self.writer = JsonLogWriter(filename)
        self.shards: Shards | None = None
        self._start_step = 0

    def begin(
        self, model: nn.Module, patterns: Sequence[str] | None, state: TrainerState, observer: str
    ) -> Shards | None:
        """Find out who holds what; all ranks must call it. None: there is nothing to measure."""
        self._start_step = state.global_step
        self.shards = find_shards(model, patterns, observer=observer)
        return self.shards

    def takes_part(self, state: TrainerState) -> bool:
        """Whether this rank has something to measure."""
        if self.shards is None:
            return False
        return state.is_world_process_zero or not self.shards.is_replicated

    def join(
        self, compute: Callable[[], tuple[Tensor, Tensor]], num_sums: int, num_maxima: int = 0
    ) -> tuple[list[float], list[float]]:
        """The numbers of all ranks that take part; see `join_numbers`."""
        assert self.shards is not None
        return join_numbers(compute, num_sums, num_maxima, alone=self.shards.is_replicated)

    def write(self, args: Any, state: TrainerState, data: Mapping[str, Any]) -> None:
        """Append a record of the step just done; all ranks that take part must call it."""
        assert self.shards is not None

        def append() -> None:
            if not state.is_world_process_zero:
                return
            if not self.writer.is_open:
                self.writer.open(log_folder(args), self._start_step)
            self.writer.write_record(state.global_step, state.epoch, data, type="norms")

        if self.shards.is_replicated:
            append()
        else:
            on_all_ranks(append)

    def rewind(self, state: TrainerState) -> None:
        """What came after a checkpoint that was just loaded did not happen."""
        self._start_step = state.global_step
        self.writer.rewind(state.global_step)

    def close(self) -> None:
        self.shards = None
        self.writer.close()
