"""The record of a CUDA device's allocations, and files with what it holds.

Owns: starting, writing and ending the record; all calls to torch's private functions for it.
Does not own: when (memory_snapshot.py, watch/peak_memory.py).

The files open in the viewer at docs.pytorch.org/memory_viz. They are pickles that torch writes:
read only your own.
"""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)

DEFAULT_ENTRIES = 100_000
"""About 1 GB of host memory with the call stacks of each entry."""


class MemoryHistory:
    """Allocations of this process from `start` on, the newest `max_entries` of them."""

    def __init__(self, max_entries: int = DEFAULT_ENTRIES) -> None:
        self.max_entries = max_entries
        self.is_on = False

    def start(self) -> None:
        import torch

        torch.cuda.memory._record_memory_history(enabled="all", max_entries=self.max_entries)
        self.is_on = True

    def write(self, path: Path) -> bool:
        """Write what there is so far; a failure is logged with its cause. Returns whether."""
        import torch

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        except Exception:
            logger.exception("the memory snapshot %s could not be written", path)
            return False
        logger.info("memory snapshot: %s (viewer: docs.pytorch.org/memory_viz)", path)
        return True

    def stop(self) -> None:
        if not self.is_on:
            return
        import torch

        self.is_on = False
        torch.cuda.memory._record_memory_history(enabled=None)
