"""How the samples of one window are dealt to ranks and micro-batches.

Owns: pure arithmetic on counts. Does not own: which samples they are (order), nor fetching them.

A window takes the next world_size * accumulation * batch_size samples of the global order; each
rank gets one contiguous part of it. So the samples of a step do not depend on the world size as
long as the global batch stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway.errors import ConfigError


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

    def resized(self, num_samples: int, largest: int) -> Deal:
        """Windows of another number of samples on all ranks, of micro-batches up to `largest`.

        As few micro-batches as divide a rank's samples evenly.
        """
        own, rest = divmod(num_samples, self.world_size)
        if rest or own < 1:
            below, above = num_samples - rest, num_samples - rest + self.world_size
            choices = f"{below} or {above}" if below else f"{above}"
            raise ConfigError(
                f"{num_samples} samples cannot be dealt evenly to {self.world_size} ranks; "
                f"the nearest that can: {choices}"
            )
        accumulation = -(-own // largest)
        while own % accumulation:
            accumulation += 1
        return replace(self, batch_size=own // accumulation, accumulation=accumulation)

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


def check_numbers(
    batch_size: int,
    accumulation: int,
    num_workers: int,
    rank: int,
    world_size: int,
    epoch_batches: int | None,
) -> None:
    """Refuse numbers that a loader cannot be made with."""
    problems = [
        f"{name} must be at least {least}, got {value}"
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("accumulation", accumulation, 1),
            ("num_workers", num_workers, 0),
            ("world_size", world_size, 1),
            ("epoch_batches", 1 if epoch_batches is None else epoch_batches, 1),
        )
        if value < least
    ]
    if not 0 <= rank < max(world_size, 1):
        problems.append(f"rank must be from 0 to {world_size - 1}, got {rank}")
    if problems:
        raise ConfigError(problems)
