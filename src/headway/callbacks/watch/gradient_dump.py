"""Raw gradients as safetensors files, one per parameter.

Owns: the files of one step, and putting a gradient together whose parts are on several ranks. Does
not own: the steps at which this is done (gap_monitor.py).
"""

from __future__ import annotations

import logging
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from headway.callbacks.watch.shards import Shard, Shards
from headway.callbacks.watch.sharing import add_up, on_all_ranks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

KEY = "gradient"


class GradientDump:
    """Writes gradients in the background; one dump at a time."""

    def __init__(self, root: Path, first_n: int | None) -> None:
        self.root, self.first_n = root, first_n
        self._pool: ThreadPoolExecutor | None = None
        self._writes: list[Future[None]] = []

    def folder(self, step: int) -> Path:
        """Where the gradients of a step are."""
        kind = "full_gradients" if self.first_n is None else "sampled_gradients"
        return self.root / f"step{step}" / kind

    def write(self, shards: Shards, step: int, *, leads: bool) -> None:
        """Take the gradients as they are now; all ranks must call it. `leads` on one of them."""
        folder = self.folder(step)

        def clear() -> None:
            self.settle()
            if leads:
                # A run that comes here again after a resume writes the step anew.
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)

        on_all_ranks(clear)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "gradient-dump")
        error: Exception | None = None
        for shard in shards.held:
            if shard.parameter.grad is None:
                continue
            groups = _groups_of(shard.parameter)
            if not groups and not shard.answers:
                continue
            part, raised = self._own_part(shard)
            error = error or raised
            for group in groups:
                part = add_up(part, group)
            if shard.answers and not any(shard.offsets) and error is None:
                self._writes.append(self._pool.submit(_save, folder, shard.name, part.cpu()))

        def fail() -> None:
            if error is not None:
                raise error

        on_all_ranks(fail)

    def _own_part(self, shard: Shard) -> tuple[Tensor, Exception | None]:
        """This rank's elements in a tensor of the size to be written, zero elsewhere."""
        import torch

        shape = tuple(shard.parameter.shape)
        if self.first_n is not None:
            shape = tuple(min(size, self.first_n) for size in shape)
        grad = shard.parameter.grad
        assert grad is not None
        target = torch.zeros(shape, dtype=grad.dtype, device=grad.device)
        try:
            local = shard.dense_gradient
            ends = [min(o + size, end) for o, size, end in zip(shard.offsets, local.shape, shape)]
            sizes = [max(0, end - o) for o, end in zip(shard.offsets, ends)]
            if 0 not in sizes:
                place = tuple(slice(o, o + size) for o, size in zip(shard.offsets, sizes))
                target[place] = local[tuple(slice(size) for size in sizes)]
        except Exception as raised:
            # Other ranks wait for this part: they get zeros, and hear of it afterwards.
            return target, raised
        return target, None

    def settle(self) -> None:
        """Wait for what is being written; raises what it failed with."""
        writes, self._writes = self._writes, []
        for write in writes:
            write.result()

    def close(self) -> None:
        """Wait for what is being written; a failure is told and not raised."""
        try:
            self.settle()
        except Exception:
            logger.exception("gradients could not be written to %s", self.root)
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _save(folder: Path, name: str, gradient: Tensor) -> None:
    from safetensors.torch import save_file

    path = folder / f"{name}.safetensors"
    draft = path.with_suffix(".part")
    save_file({KEY: gradient.contiguous()}, draft)
    os.replace(draft, path)


def _groups_of(parameter: Tensor) -> list[ProcessGroup]:
    """The groups over which a parameter is cut."""
    from headway.checkpoint.sharding import is_spread

    if not is_spread(parameter):
        return []
    return [
        parameter.device_mesh.get_group(axis)
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    ]
