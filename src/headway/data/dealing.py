"""How the samples of one window are dealt to ranks and micro-batches.

Owns: pure arithmetic on counts. Does not own: which samples they are (order), nor fetching them.

A window takes the next world_size * accumulation * batch_size samples of the global order; each
rank gets one contiguous part of it. So the samples of a step do not depend on the world size as
long as the global batch stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Deal:
    """The fixed numbers behind every window."""

    batch_size: int
    accumulation: int = 1
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False

    @property
    def rank_samples(self) -> int:
        """Samples of a full window on one rank."""
        return self.batch_size * self.accumulation

    @property
    def window_samples(self) -> int:
        """Samples of a full window on all ranks."""
        return self.rank_samples * self.world_size

    def usable(self, num_samples: int) -> int:
        """How many of the remaining samples are handed out."""
        if not self.drop_last:
            return num_samples
        step = self.batch_size * self.world_size
        return num_samples // step * step

    def num_windows(self, num_samples: int) -> int:
        return -(-self.usable(num_samples) // self.window_samples)

    def num_batches(self, num_samples: int) -> int:
        """Micro-batches on this rank."""
        full, rest = divmod(self.usable(num_samples), self.window_samples)
        return full * self.accumulation + len(self.split(rest)[1])

    def split(self, num_samples: int) -> tuple[int, list[int]]:
        """This rank's part of a window of `num_samples`: its offset, and its micro-batch sizes.

        All ranks get the same number of micro-batches unless there are too few samples for that.
        """
        base, extra = divmod(num_samples, self.world_size)
        share = base + (self.rank < extra)
        offset = self.rank * base + min(self.rank, extra)
        largest = base + (extra > 0)
        num_batches = -(-largest // self.batch_size)
        if share > (num_batches - 1) * self.batch_size:
            sizes = [self.batch_size] * (num_batches - 1)
            sizes.append(share - sum(sizes))
            return offset, sizes if share else []
        # Exactly full where another rank has one sample more: split evenly to keep in step.
        each, more = divmod(share, num_batches)
        sizes = [each + (number < more) for number in range(num_batches)]
        return offset, [size for size in sizes if size]
