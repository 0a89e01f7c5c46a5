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

    `start` queues the copy and returns: behind the device's work so far, or beside what is queued
    after the event `computed`. `read` waits for the copy alone, not for what was queued after it,
    and may be called from another thread; the values have to be kept until then.
    """

    def __init__(self) -> None:
        self._lines: dict[torch.device, _Line] = {}
        self._parts: list[tuple[_Line, list[int]]] = []

    def start(self, values: list[Tensor], computed: torch.cuda.Event | None = None) -> None:
        by_device: dict[torch.device, list[int]] = {}
        for index, value in enumerate(values):
            by_device.setdefault(value.device, []).append(index)
        self._parts = []
        for device, indices in by_device.items():
            line = self._lines.get(device)
            if line is None:
                line = self._lines[device] = _Line(device)
            order = line.start([values[i] for i in indices], computed)
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
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._event = torch.cuda.Event() if self._on_cuda else None
        self._side_stream: torch.cuda.Stream | None = None
        self._used = 0
        self._make_room(_LEAST_NUMBERS)

    def _make_room(self, num_numbers: int) -> None:
        # Pinned: a transfer to other memory would wait for the device.
        self._memory = torch.empty(num_numbers, dtype=self._dtype, pin_memory=self._on_cuda)
        self._numbers: Any = self._memory.numpy()

    def start(self, values: list[Tensor], computed: torch.cuda.Event | None) -> list[int]:
        """Queue the copy; returns in which order the values will be read."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, value in enumerate(values):
            by_dtype.setdefault(value.dtype, []).append(index)
        if len(values) > len(self._memory):
            self._make_room(2 * len(values))
        stacks = [[values[i].detach().reshape(()) for i in some] for some in by_dtype.values()]
        if self._event is None:
            self._copy(stacks, len(values))
        else:
            stream = self._stream_after(computed)
            with torch.cuda.stream(stream):
                self._copy(stacks, len(values))
                self._event.record(stream)
        self._used = len(values)
        return [index for indices in by_dtype.values() for index in indices]

    def _copy(self, stacks: list[list[Tensor]], number: int) -> None:
        same = [torch.stack(stack).to(self._dtype) for stack in stacks]
        joined = same[0] if len(same) == 1 else torch.cat(same)
        self._memory[:number].copy_(joined, non_blocking=True)

    def _stream_after(self, computed: torch.cuda.Event | None) -> torch.cuda.Stream:
        if computed is None or computed.device != self._device:
            return torch.cuda.current_stream(self._device)
        if self._side_stream is None:
            # Its few small kernels go before those of an update that keeps all of the device busy.
            self._side_stream = torch.cuda.Stream(self._device, priority=-1)
        self._side_stream.wait_event(computed)
        return self._side_stream

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._numbers[: self._used].tolist()
        return numbers
