"""Ranks that are threads of one process, for faults that need thousands of saves.

Owns: `ThreadRanks`, which meets where real ranks exchange messages, and `run_thread_ranks`. Does
not own: what real ranks do (checkpoint/distributed.py); tests with processes are in tests/dist.

A rank whose storage dies (`Died`) is gone for the others, who learn of it at the next meeting.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.ranks import Ranks
from headway.testing.faults import Died, FaultyStorage

_LIMIT_S = 60.0


class Table:
    """Where the ranks of one group meet."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=_LIMIT_S)
        self.slots: list[Any] = [None] * num_ranks
        self.mail: dict[tuple[int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)


class ThreadRanks(Ranks):
    """One rank; every meeting counts as a `barrier` of its storage."""

    def __init__(self, rank: int, table: Table, storage: FaultyStorage) -> None:
        self.rank, self.world_size = rank, table.num_ranks
        self.nodes = (0,) * table.num_ranks
        self.groups = {}
        self._table = table
        self._storage = storage

    def _meet(self, value: Any) -> list[Any]:
        try:
            self._storage.barrier()
        except Died:
            self._table.barrier.abort()
            raise
        table = self._table
        try:
            table.slots[self.rank] = value
            table.barrier.wait()
            values = list(table.slots)
            table.barrier.wait()
        except threading.BrokenBarrierError:
            raise CheckpointError("a rank is gone") from None
        return values

    def exchange(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self._meet(json.dumps(value))]

    def gather(self, value: Any) -> list[Any]:
        values = self.exchange(value)
        return values if self.is_main else []

    def share(self, value: Any) -> Any:
        return self.exchange(value)[0]

    def vote(self, error: BaseException | None, what: str) -> None:
        if isinstance(error, Died):
            self._table.barrier.abort()
            raise error
        try:
            told = self.exchange(None if error is None else str(error))
        except CheckpointError:
            if error is not None:
                raise error from None
            raise
        if error is not None:
            raise error
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
        if failed:
            raise CheckpointError(f"{what} failed on {'; '.join(failed)}")

    def swap(self, outgoing: list[tuple[int, Tensor]], incoming: list[tuple[int, Tensor]]) -> None:
        for rank, tensor in outgoing:
            self._table.mail[self.rank, rank].put(tensor.clone())
        self._meet(None)
        for rank, tensor in incoming:
            tensor.copy_(self._table.mail[rank, self.rank].get_nowait())

    def spread(self, tensor: Tensor) -> None:
        tensor.copy_(self._meet(tensor.clone())[0])


def run_thread_ranks(
    act: Callable[[ThreadRanks], object], storages: list[FaultyStorage]
) -> list[BaseException | None]:
    """Call `act` on as many ranks as there are storages; returns what each ended with."""
    table = Table(len(storages))
    ends: list[BaseException | None] = [None] * len(storages)

    def run(rank: int) -> None:
        try:
            act(ThreadRanks(rank, table, storages[rank]))
        except BaseException as error:
            ends[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(storages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends
