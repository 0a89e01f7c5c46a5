"""Device memory that torch keeps for later, given back when the device is nearly full.

Owns: when that is done (`gc_threshold`). Does not own: Python's garbage (a callback's).

Giving memory back waits for the device and makes the next steps ask for it again, so it is looked
at seldom, from counters on the host, and ever more seldom where it did not last.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

_LEAST_SHARE = 0.1
"""Share of the device's memory that has to lie idle to be worth the wait."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 300.0


class CachedMemory:
    """Watches one device's memory."""

    def __init__(
        self,
        device: torch.device,
        threshold: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device, self._threshold, self._clock = device, threshold, clock
        self._active = device.type == "cuda"
        self._pause_s = _FIRST_PAUSE_S
        self._next_look_s = clock()
        self._reserved_before = 0

    def relieve(self) -> bool:
        """Give idle memory back if too much of the device is in use; whether it was done."""
        if not self._active or self._clock() < self._next_look_s:
            return False
        total, allocated, reserved = self._measure()
        given_back = False
        in_use, idle = allocated / total, (reserved - allocated) / total
        if in_use > self._threshold and idle >= _LEAST_SHARE:
            # What grew back to the same size is what a step needs.
            in_vain = reserved >= self._reserved_before > 0
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S) if in_vain else self._pause_s
            self._reserved_before = reserved
            self._release()
            given_back = True
            logger.debug(
                "gc_threshold: %.0f%% of the device is in use; %.0f%% lay idle and was given back",
                100 * in_use,
                100 * idle,
            )
        self._next_look_s = self._clock() + self._pause_s
        return given_back

    def _measure(self) -> tuple[int, int, int]:
        """Bytes of this device: all, in use, held by torch; no look at the device itself."""
        total = torch.cuda.get_device_properties(self._device).total_memory
        statistics = torch.cuda.memory_stats(self._device)
        return (
            total,
            statistics["allocated_bytes.all.current"],
            statistics["reserved_bytes.all.current"],
        )

    def _release(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()
