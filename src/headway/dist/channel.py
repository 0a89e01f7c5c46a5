"""A way for all ranks to talk beside training: a gloo group that one thread has to itself.

Owns: the group, joining of small vectors on it, and who has not come to a round. Does not own: what
is said, nor the thread that speaks.

All ranks use a channel in the same order. What runs on another group meanwhile, in another thread,
cannot get mixed up with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

from headway.dist.agreement import exchange
from headway.dist.limits import collective_limit, collective_limit_s

_numbers = itertools.count()


class RankChannel:
    """All ranks of the default process group; made by every rank at the same time."""

    def __init__(self) -> None:
        from torch import distributed
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.distributed_c10d import _get_default_store

        self.timeout_s = collective_limit_s()
        self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        self._group: Any = distributed.new_group(backend="gloo", timeout=collective_limit())
        self._store = PrefixStore(f"headway/channel/{next(_numbers)}", _get_default_store())

    def reduce(self, values: Sequence[float], operation: Literal["sum", "max"]) -> list[float]:
        """Join a vector, as long on every rank, number by number; in double precision."""
        import torch
        from torch import distributed

        joined = torch.tensor(values, dtype=torch.float64)
        kinds = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}
        distributed.all_reduce(joined, kinds[operation], group=self._group)
        return [float(number) for number in joined.numpy()]

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value (anything JSON has), in rank order."""
        return exchange(value, self._group)

    def post_arrival(self, number: int) -> None:
        """Note, where the others can read it at any time, that this rank waits in a round."""
        self._store.set(str(self.rank), str(number))

    def find_absent(self, number: int) -> list[int]:
        """The ranks that have noted no arrival in this round; waits for nobody."""
        return [rank for rank in range(self.world_size) if self._last_round(rank) < number]

    def _last_round(self, rank: int) -> int:
        return int(self._store.get(str(rank))) if self._store.check([str(rank)]) else -1
