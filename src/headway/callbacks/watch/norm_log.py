"""A file of norms by parameter: what the loggers of gradients and of parameters have in common.

Owns: the file on rank 0, the model's shards, when a record is asked for, and that a failure of one
rank, also in writing, is one of all. Does not own: what is measured (the callbacks), at which steps
(cadence.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from headway.callbacks.log.json_lines import FORMS, JsonLogWriter, log_folder
from headway.callbacks.watch.cadence import Cadence
from headway.callbacks.watch.shards import Shards, check_patterns, find_shards
from headway.callbacks.watch.sharing import join_numbers, on_all_ranks
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError, unknown

if TYPE_CHECKING:
    from torch import Tensor, nn


class NormLogger(TrainerCallback, ABC):
    """Base of the norm loggers: numbers of all ranks in one file.

    The file is `LOG_FILENAME` with a record a line, or, with `format="array"`, one JSON array in a
    file of that name that ends in `.json`.
    """

    failure_policy = "disable"
    LOG_FILENAME: ClassVar[str]

    def __init__(
        self, log_steps: int | None, include: Sequence[str] | str | None, format: str
    ) -> None:
        kind = type(self).__name__
        if format not in FORMS:
            raise ConfigError(f"{kind}: " + unknown("format", format, FORMS))
        self.cadence = Cadence(kind, log_steps)
        self.include = check_patterns(f"{kind}.include", include)
        filename = Path(self.LOG_FILENAME)
        self.writer = JsonLogWriter(
            str(filename if format == "lines" else filename.with_suffix(".json")), format
        )
        self.shards: Shards | None = None
        self._start_step = 0

    @abstractmethod
    def write_norms(self, args: Any, state: TrainerState) -> None:
        """Measure and write a record of the step just done."""

    # The run

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._write_if_due("on_step_end", args, state)

    def on_log_step(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._write_if_due("on_log_step", args, state)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._write_if_due("on_evaluate", args, state)

    def on_load(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        # What came after a checkpoint that was just loaded did not happen.
        self._start_step = state.global_step
        self.writer.rewind(state.global_step)

    def on_close(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self.shards = None
        self.writer.close()

    def state_dict(self) -> dict[str, Any]:
        return {"version": 1, "writer": self.writer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.writer.load_state_dict(state.get("writer") or {})

    def _write_if_due(self, event: str, args: Any, state: TrainerState) -> None:
        if self.takes_part(state) and self.cadence.is_due(event, state):
            self.write_norms(args, state)

    # For the loggers

    def begin(self, args: Any, model: nn.Module, state: TrainerState) -> Shards | None:
        """Find out who holds what; all ranks must call it. None: there is nothing to measure."""
        self.cadence.start(args)
        self._start_step = state.global_step
        self.shards = find_shards(model, self.include, observer=type(self).__name__)
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
