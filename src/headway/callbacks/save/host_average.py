"""Averages kept in host memory of tensors that are on a device.

Owns: the way of the values to the host and the arithmetic there, both beside training. Does not
own: what is averaged and how fast (ema.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from headway.callbacks.save.averages import move_towards

if TYPE_CHECKING:
    from torch import Tensor


class HostMover:
    """Moves averages on the host towards tensors of a device, one update at a time, by a thread."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        """Page-locked memory that the values pass through, used again for each update."""
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def move(
        self, averages: Mapping[str, Tensor], parts: Mapping[str, Tensor], weight: float
    ) -> None:
        """Begin an update. The tensors may change once this returns; the averages are not to be
        looked at before `wait`."""
        import torch

        self.wait()
        with torch.no_grad():
            for name, part in parts.items():
                copy = self._copies.get(name)
                if copy is None or (copy.shape, copy.dtype) != (part.shape, part.dtype):
                    pinned = part.is_cuda
                    copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=pinned)
                    self._copies[name] = copy
                # On the stream of the step: the next update cannot come before it.
                copy.copy_(part, non_blocking=part.is_cuda)
        copied = None
        if any(part.is_cuda for part in parts.values()):
            copied = torch.cuda.Event()
            copied.record()
        copies = {name: self._copies[name] for name in parts}

        def update() -> None:
            if copied is not None:
                copied.synchronize()
            move_towards(averages, copies, weight)

        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="headway-average")
        self._pending = self._pool.submit(update)

    def wait(self) -> None:
        """Return when the averages are up to date; what an update failed with is raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Let go of the thread and of the memory."""
        self.wait()
        if self._pool is not None:
            self._pool.shutdown()
        self._pool, self._copies = None, {}
