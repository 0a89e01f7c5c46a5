"""The copy from a CUDA device to the host that runs beside forward and backward.

Owns: the side stream, what the optimizer step has to wait for, and which tensors are cloned on the
device so that it need not wait for them. Does not own: what is copied, and where to (staging.py).

A large state takes as long to cross the bus as a step takes. What will not be through when the
update is due is cloned on the device first, at the speed of its memory, and copied from there:
the update waits only for tensors that are read where they are. How much that is, is known from the
save before. Where the device has no memory left for clones, the update waits as long as it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headway.checkpoint.packed import cut_up, packed_bytes
from headway.checkpoint.tensors import num_bytes

# Of what was through in time in the save before; steps are not all of one length.
_CAUTION = 0.9
# Before the first save nothing is known: half.
_FIRST_SHARE = 0.5
# Of the device's memory, to be left free by clones; and of what is free they take half at most.
_LEFT_FREE = 0.05
# What torch copies many of at once.
_FAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def num_copied_in_place(sizes: Sequence[int], share: float, room: int) -> int:
    """How many tensors, from the front, are copied where they are; the rest are cloned.

    These are as many as fit into `share` of the bytes, and as many more as clones have no room.
    """
    total, number, bytes_in_place = sum(sizes), 0, 0
    for size in sizes:
        left = total - bytes_in_place
        if bytes_in_place + size > share * total and left <= room:
            break
        bytes_in_place += size
        number += 1
    return number


class SideCopy:
    """Copies of one process, one at a time."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._read: torch.cuda.Event | None = None
        self._last: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._due: torch.cuda.Event | None = None
        self._share = _FIRST_SHARE
        self._had_step = False
        self._stretch_bytes = self._reserved_bytes = 0

    def finish(self) -> None:
        """Wait until the last copy is through, as before its host memory is used again."""
        if self._last is not None:
            self._last[1].synchronize()

    def start(self, pairs: list[tuple[Tensor, Tensor]], host: object) -> Callable[[], None]:
        """Copy from the second of each pair to the first; what is returned waits for the end.

        `host` owns the memory of the first ones, and is kept until then.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._learn()
        sizes = [num_bytes(source) for _, source in pairs]
        # Before the first step nobody knows what it will take: nothing is cloned.
        share = self._share if self._had_step else 1.0
        in_place = num_copied_in_place(sizes, share, self._room())
        late = [source for _, source in pairs[in_place:]]
        try:
            clones = _clone(late, self._stream)
        except torch.OutOfMemoryError:  # what is free may be in pieces
            in_place, clones, late = len(pairs), [], []
        if late:
            self._stretch_bytes = packed_bytes(late)
            self._reserved_bytes = torch.cuda.memory_reserved()
        begun, read, copied = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        # Also orders this stream's events after the copies made on the current one.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            begun.record(self._stream)
            for copy, source in pairs[:in_place]:
                copy.copy_(source, non_blocking=True)
            read.record(self._stream)
            for (copy, _), clone in zip(pairs[in_place:], clones):
                copy.copy_(clone, non_blocking=True)
            copied.record(self._stream)
        self._read, self._due, self._last = read, None, (begun, copied)
        # Must outlive the copy: freed memory could be given to another tensor.
        held: list[object] = [*pairs, host]

        def wait() -> None:
            copied.synchronize()
            held.clear()

        return wait

    def wait_before_update(self) -> None:
        """Make the current CUDA stream wait until the live tensors are read, if a copy runs."""
        self._had_step = True
        read, self._read = self._read, None
        if read is None:
            return
        self._due = torch.cuda.Event(enable_timing=True)
        self._due.record()
        torch.cuda.current_stream().wait_event(read)

    def _learn(self) -> None:
        """From the last copy: which share of it was through when the update was due."""
        if self._last is None or self._due is None:
            return
        begun, copied = self._last
        if not (copied.query() and self._due.query()):
            return
        took_ms, until_due_ms = begun.elapsed_time(copied), begun.elapsed_time(self._due)
        if took_ms > 0:
            self._share = max(0.0, min(1.0, _CAUTION * until_due_ms / took_ms))

    def _room(self) -> int:
        """Bytes that clones may take: of what no allocator holds, so that steps keep theirs."""
        free, total = torch.cuda.mem_get_info()
        room = int(max(0.0, min(free / 2, free - _LEFT_FREE * total)))
        # What the last ones took is torch's since, unless it gave memory back.
        is_kept = torch.cuda.memory_reserved() >= self._reserved_bytes
        return room + (self._stretch_bytes if is_kept else 0)


def _clone(tensors: list[Tensor], reader: torch.cuda.Stream) -> list[Tensor]:
    """Copies in one stretch of memory: asking the driver for many takes longer than copying.

    The memory can be let go at once: it is not used again before `reader` is done with it.
    """
    if not tensors:
        return []
    memory = torch.empty(packed_bytes(tensors), dtype=torch.uint8, device=tensors[0].device)
    if memory.is_cuda:
        memory.record_stream(reader)
    clones = cut_up(memory, tensors)
    alike: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for clone, tensor in zip(clones, tensors):
        if tensor.dtype in _FAST_DTYPES and tensor.is_contiguous():
            to, sources = alike.setdefault(tensor.dtype, ([], []))
            to.append(clone)
            sources.append(tensor)
        else:
            clone.copy_(tensor)
    for to, sources in alike.values():
        torch._foreach_copy_(to, sources)
    return clones
