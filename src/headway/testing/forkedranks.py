"""Ranks as forked children, so that a job of several real processes starts within a second.

Owns: the fork server of the ranks, the store at which the ranks of a job meet, when and how each of
them ends. Does not own: what a rank does (a function by name), how it meets the others (dist/).

The store lives here, as it lives in a launcher: it outlives a rank that dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from headway.testing.forkserver import ForkServer

_TURN_S = 0.05


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: its exit code (negative: a signal), and when (`time.monotonic`)."""

    code: int
    at: float


@dataclass
class ForkedJob:
    """The ranks of one job. All of them are over when `ForkedRanks.job` returns."""

    server: ForkServer
    pids: list[int]
    began: float
    ends: dict[int, RankEnd] = field(default_factory=dict)

    def wait(
        self,
        limit_s: float,
        ranks: Sequence[int] | None = None,
        *,
        until: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait for these ranks (default: all), or until something else has happened."""
        wanted = set(range(len(self.pids)) if ranks is None else ranks)
        deadline = time.monotonic() + limit_s
        while not wanted <= self.ends.keys():
            left_s = deadline - time.monotonic()
            if left_s <= 0 or until():
                return wanted <= self.ends.keys()
            for pid in self.server.wait_any(_TURN_S):
                code = self.server.wait(pid)
                self.ends[self.pids.index(pid)] = RankEnd(code, time.monotonic())
        return True

    def send(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """A signal to these ranks (default: all) that have not ended."""
        for rank in range(len(self.pids)) if ranks is None else ranks:
            if rank not in self.ends:
                self.server.kill(self.pids[rank], number)

    @property
    def codes(self) -> list[int | None]:
        """The exit code of every rank; None: it still runs."""
        return [self.ends[r].code if r in self.ends else None for r in range(len(self.pids))]


class ForkedRanks:
    """Starts jobs of any number of ranks, one job at a time; `preload` names what is imported."""

    def __init__(self, preload: Sequence[str], log: str | Path = os.devnull) -> None:
        self._server = ForkServer(preload=preload, log=log)

    @staticmethod
    def make_store() -> Any:
        """A store for a job, or for several attempts at one, as a launcher would keep it."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    @contextlib.contextmanager
    def job(
        self,
        function: str,
        num_ranks: int,
        *,
        store: Any,
        environ: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> Iterator[ForkedJob]:
        """Call `function(environ=..., **arguments)` on every rank; none is left at the end.

        The function sets the variables of `environ`, which are those that torchrun would set.
        """
        common = {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            **(environ or {}),
        }
        job = ForkedJob(self._server, [], time.monotonic())
        try:
            for rank in range(num_ranks):
                own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                job.pids.append(self._server.start(function, environ=own, **arguments))
            yield job
        finally:
            job.send(signal.SIGKILL)
            while not job.wait(60.0):
                pass

    def close(self) -> None:
        """End the server."""
        self._server.close()

    def __enter__(self) -> ForkedRanks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
