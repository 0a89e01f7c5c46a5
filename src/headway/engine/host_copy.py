"""Numbers on their way from devices to the host: one transfer for all, begun now and read later.

Owns: the stacking, the transfer and the memory on the host that it goes to. Does not own: which
numbers, and what they are for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LEAST_NUMBERS = 256


class HostCopy:
    """Copies lists of scalars, one list at a time; each device's in one go.

    `start` queues the copy behind the device's work and returns; `read` waits for the copy alone,
    not for what was queued after it, and may be called from another thread.
    """

    def __init__(self) -> None:
        self._lines: dict[torch.device, _Line] = {}
        self._parts: list[tuple[_Line, list[int]]] = []

    def start(self, values: list[Tensor]) -> None:
        by_device: dict[torch.device, list[int]] = {}
        for index, value in enumerate(values):
            by_device.setdefault(value.device, []).append(index)
        self._parts = []
        for device, indices in by_device.items():
            line = self._lines.get(device)
            if line is None:
                line = self._lines[device] = _Line(device)
            order = line.start([values[i] for i in indices])
            self._parts.append((line, [indices[i] for i in order]))

    def read(self) -> list[float]:
        """The numbers of the list that was given last, in its order."""
        numbers = [0.0] * sum(len(indices) for _, indices in self._parts)
        for line, indices in self._parts:
            for index, number in zip(indices, line.read(), strict=True):
                numbers[index] = number
        return numbers


class _Line:
    """The way from one device, with its memory on the host, which is used again and again."""

    def __init__(self, device: torch.device) -> None:
        # Double precision, so that integer counters survive.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._on_cuda = device.type == "cuda"
        self._event = torch.cuda.Event() if self._on_cuda else None
        self._used = 0
        self._make_room(_LEAST_NUMBERS)

    def _make_room(self, num_numbers: int) -> None:
        # Pinned: a transfer to other memory would wait for the device.
        self._memory = torch.empty(num_numbers, dtype=self._dtype, pin_memory=self._on_cuda)
        self._numbers: Any = self._memory.numpy()

    def start(self, values: list[Tensor]) -> list[int]:
        """Queue the copy; returns in which order the values will be read."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, value in enumerate(values):
            by_dtype.setdefault(value.dtype, []).append(index)
        if len(values) > len(self._memory):
            self._make_room(2 * len(values))
        with torch.no_grad():
            stacks = [
                torch.stack([values[i].reshape(()) for i in indices]).to(self._dtype)
                for indices in by_dtype.values()
            ]
            joined = stacks[0] if len(stacks) == 1 else torch.cat(stacks)
            self._memory[: len(values)].copy_(joined, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(joined.device))
        self._used = len(values)
        return [index for indices in by_dtype.values() for index in indices]

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._numbers[: self._used].tolist()
        return numbers
