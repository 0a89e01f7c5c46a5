"""The most memory each rank has used.

Owns: the figures per rank at log steps and at the end, on TensorBoard and in the log. Does not
own: the peaks in log records (the loop), the record of allocations (profile/memory_history.py).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from headway.callbacks.log.chosen_writer import ChosenWriter
from headway.callbacks.profile.memory_history import MemoryHistory
from headway.callbacks.watch.host_memory import GIB, peak_rss_bytes
from headway.callbacks.watch.ranges import require_file_name, require_flag
from headway.callbacks.watch.sharing import on_all_ranks
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)


class PeakMemory(TrainerCallback):
    """Tells peak memory per rank: to `summary_writer`, and with `do_log` as a line per record.

    `summary_writer` is a folder for TensorBoard or a writer; a resumed run goes on in that folder.

    On CUDA that is the most that was allocated between two records. Without CUDA it is the most
    host memory (RSS) that the process ever had, which log records then have as `peak_mem_host`.
    `show_details` adds all counters of the CUDA allocator. `enable_memory_snapshot` records
    allocations and writes `{file_prefix}_rank{rank}.pickle` into the run's folder when the run
    ends, also by an error; it costs host memory.
    """

    priority = 10  # `peak_mem_host` is in the record when the sinks read it
    failure_policy = "disable"

    def __init__(
        self,
        summary_writer: Any = None,
        show_details: bool = False,
        do_log: bool = False,
        enable_memory_snapshot: bool = False,
        file_prefix: str = "memory_snapshot",
    ) -> None:
        for option, given in (
            ("show_details", show_details),
            ("do_log", do_log),
            ("enable_memory_snapshot", enable_memory_snapshot),
        ):
            require_flag(option, given)
        require_file_name("file_prefix", file_prefix)
        self._tensorboard = ChosenWriter(summary_writer, "add_scalar")
        self.summary_writer = self._tensorboard.given
        self.show_details = show_details
        self.do_log = do_log
        self.enable_memory_snapshot = enable_memory_snapshot
        self.file_prefix = file_prefix
        self.rank, self.world_size = 0, 1
        self.max_allocated = 0
        """Bytes, on this rank, so far."""
        self._device: Any = None
        self._history = MemoryHistory()
        self._snapshot = Path()

    @property
    def enabled(self) -> bool:
        """Whether the figures are those of a CUDA device, not of the host."""
        return self._device is not None

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        self.rank, self.world_size = args.process_index, args.world_size
        self.max_allocated = 0
        self._tensorboard.begin(args, state, trainer)
        device = trainer.strategy.device
        self._device = device if device.type == "cuda" else None
        self._snapshot = Path(args.output_dir) / f"{self.file_prefix}_rank{self.rank}.pickle"
        if not self.enable_memory_snapshot:
            return
        if self.enabled:
            self._history.start()
        elif self.rank == 0:
            logger.warning("enable_memory_snapshot: there is no CUDA device, so no snapshot")

    def on_load(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._tensorboard.rewind(state.global_step)

    def on_log_step(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any]
    ) -> None:
        if not self.enabled:
            logs["peak_mem_host"] = on_all_ranks(peak_rss_bytes)

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any]
    ) -> None:
        peaks = logs.get("peak_mem_allocated" if self.enabled else "peak_mem_host")
        if not isinstance(peaks, list) or self.rank >= len(peaks):
            return  # an evaluation's record, or the summary
        self.max_allocated = max(self.max_allocated, peaks[self.rank])
        if not state.is_world_process_zero:
            return
        if self.summary_writer is not None:
            for rank, peak in enumerate(peaks):
                self.summary_writer.add_scalar(f"peak_memory_rank{rank}", peak, state.global_step)
            if self.show_details:
                self._write_details(state.global_step)
            self.summary_writer.flush()
        if self.do_log:
            told = ", ".join(f"rank {rank}: {peak / GIB:.3f}" for rank, peak in enumerate(peaks))
            logger.info("peak %s memory in GiB: %s", self._kind, told)
            if self.show_details and self.summary_writer is None:
                logger.info("%s", self._details())

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self.max_allocated = max(self.max_allocated, self._own_peak_bytes())
        peaks = on_all_ranks(lambda: self.max_allocated)
        self._end_snapshot()
        if not state.is_world_process_zero:
            return
        told = ", ".join(f"rank {rank}: {peak / GIB:.3f}" for rank, peak in enumerate(peaks))
        logger.info("most %s memory of the run in GiB: %s", self._kind, told)
        if self.show_details and not self.do_log:
            if self.summary_writer is not None:
                self._write_details(state.global_step)
            logger.info("%s", self._details())

    def on_close(self) -> None:
        self._tensorboard.close()
        self._end_snapshot()

    def state_dict(self) -> dict[str, Any]:
        return {"version": 1, "tensorboard": self._tensorboard.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tensorboard.load_state_dict(state.get("tensorboard"))

    @property
    def _kind(self) -> str:
        return "CUDA" if self.enabled else "host"

    def _own_peak_bytes(self) -> int:
        if not self.enabled:
            return peak_rss_bytes()
        import torch

        return torch.cuda.max_memory_allocated(self._device)

    def _end_snapshot(self) -> None:
        if not self._history.is_on:
            return
        try:
            self._history.write(self._snapshot)
        finally:
            self._history.stop()

    def _details(self) -> str:
        if not self.enabled:
            return f"the process had at most {peak_rss_bytes() / GIB:.3f} GiB of host memory"
        import torch

        stats = torch.cuda.memory_stats(self._device)
        return "\n".join(f"{name}: {value}" for name, value in sorted(stats.items()))

    def _write_details(self, step: int) -> None:
        self.summary_writer.add_text("peak_memory_details", self._details(), step)
