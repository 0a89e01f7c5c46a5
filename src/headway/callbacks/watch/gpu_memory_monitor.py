"""Memory of the GPU at every step.

Owns: the `gpu_memory/...` metrics and warnings about an allocator in trouble. Does not own: the
peaks in log records (the loop), snapshots (profile/memory_snapshot.py).
"""

from __future__ import annotations

import logging
from typing import Any

from headway.callbacks.watch.host_memory import GIB
from headway.callbacks.watch.ranges import require_count, require_flag
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

logger = logging.getLogger(__name__)


class GPUMemoryMonitorCallback(TrainerCallback):
    """Records the peaks of active and reserved memory, the largest over ranks.

    A peak is that since the last log record: the loop resets the counters there, and a reset at
    every step would take the peaks of log records away. `device_id` is the card to look at; None:
    the one that this rank trains on. Reading the counters does not wait for the device. Without
    CUDA nothing is recorded.
    """

    priority = -1
    failure_policy = "disable"

    def __init__(self, device_id: int | None = None, enabled: bool = True) -> None:
        require_count("device_id", device_id, optional=True)
        require_flag("enabled", enabled)
        self.device_id = device_id
        self.enabled = enabled
        self._device: Any = None
        self._capacity_bytes = 0
        self._num_alloc_retries = self._num_ooms = 0

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        import torch

        self._device = None
        if not self.enabled:
            return
        device = trainer.strategy.device
        if device.type != "cuda":
            if state.is_world_process_zero:
                logger.warning(
                    "GPUMemoryMonitorCallback records nothing: the run is on %r, not on CUDA; "
                    "PeakMemory tells the host's memory",
                    device.type,
                )
            return
        if self.device_id is not None:
            num_devices = torch.cuda.device_count()
            if self.device_id >= num_devices:
                raise ConfigError(
                    f"device_id: {self.device_id} given; allowed: 0 to {num_devices - 1}, the "
                    "CUDA devices of this machine"
                )
            device = torch.device("cuda", self.device_id)
        self._device = device
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        self._capacity_bytes = torch.cuda.get_device_properties(device).total_memory
        stats = torch.cuda.memory_stats(device)
        self._num_alloc_retries = stats.get("num_alloc_retries", 0)
        self._num_ooms = stats.get("num_ooms", 0)
        if state.is_world_process_zero:
            logger.info("%s has %.2f GiB of memory", device, self._capacity_bytes / GIB)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        if self._device is None:
            return
        import torch

        stats = torch.cuda.memory_stats(self._device)
        for kind, key in (("active", "active_bytes"), ("reserved", "reserved_bytes")):
            peak = stats.get(f"{key}.all.peak", 0)
            name, share = f"gpu_memory/GPU {kind} mem", 100 * peak / self._capacity_bytes
            trainer.record_metric(f"{name} (GiB)", peak / GIB, "max")
            trainer.record_metric(f"{name} (%)", share, "max")
        self._warn(stats, state.global_step)

    def _warn(self, stats: dict[str, Any], step: int) -> None:
        """Tell of what has happened since the last look, once."""
        retries, ooms = stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0)
        if retries > self._num_alloc_retries:
            logger.warning(
                "%d allocation(s) on %s succeeded only after cached memory was given back, by step "
                "%d: memory is nearly full, steps become slow",
                retries - self._num_alloc_retries,
                self._device,
                step,
            )
        if ooms > self._num_ooms:
            logger.warning(
                "%s ran out of memory %d time(s) by step %d",
                self._device,
                ooms - self._num_ooms,
                step,
            )
        self._num_alloc_retries, self._num_ooms = retries, ooms
