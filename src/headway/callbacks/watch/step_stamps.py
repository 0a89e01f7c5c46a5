"""Points in time along a run's work, taken without waiting for the device.

Owns: stamps of the host's clock or of a CUDA stream, and the seconds between them.
Does not own: which points matter (speed_monitor.py).

On a CUDA device the host is steps ahead of the work; its clock says when work was asked for. An
event in the stream says when it was done, some steps later, once the device has passed it.
"""

from __future__ import annotations

from typing import Any, Protocol

from headway.callbacks.watch import training_time


class Stamps(Protocol):
    """Makes stamps, and reads them."""

    waits: bool
    """Whether a stamp becomes readable only later."""

    def take(self) -> Any: ...

    def is_over(self, stamp: Any) -> bool: ...

    def seconds(self, first: Any, second: Any) -> float: ...


class HostStamps:
    """For devices whose work is done when the call returns."""

    waits = False

    def take(self) -> float:
        return training_time.clock()

    def is_over(self, stamp: float) -> bool:
        return True

    def seconds(self, first: float, second: float) -> float:
        return second - first


class CudaStamps:
    """Events in the current stream."""

    waits = True

    def take(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_over(self, stamp: Any) -> bool:
        return bool(stamp.query())

    def seconds(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1e3


def stamps_for(device: Any) -> Stamps:
    return CudaStamps() if device.type == "cuda" else HostStamps()
