"""Large bodies on their way in: from the socket into a file or memory, with limits on patience.

Owns: the pace of reading and its limits, files of bodies that are not accepted yet, how many come
at one time. Does not own: the format (wire.py), what becomes of a body (core.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING

from headway.diloco.rounds import Refusal
from headway.diloco.wire import CHUNK_BYTES

if TYPE_CHECKING:
    from aiohttp import web

SILENCE_S = 30.0
"""How long a sender may say nothing."""
_MOST_DRAINED_BYTES = 64 << 20
_DRAIN_S = 5.0


async def read_body(
    request: web.Request,
    feed: Callable[[bytes], None],
    pool: Executor,
    limit_s: float,
) -> int:
    """Hand a body on, in large pieces and in a thread; returns its length."""
    from aiohttp import ClientError

    loop = asyncio.get_running_loop()
    waiting, num_bytes = bytearray(), 0
    try:
        async with asyncio.timeout(limit_s):
            while True:
                async with asyncio.timeout(SILENCE_S):
                    chunk = await request.content.readany()
                waiting += chunk
                num_bytes += len(chunk)
                if waiting and (not chunk or len(waiting) >= CHUNK_BYTES):
                    await loop.run_in_executor(pool, feed, bytes(waiting))
                    waiting.clear()
                if not chunk:
                    return num_bytes
    except TimeoutError:
        raise Refusal(408, "bad_request", "the body did not come in time") from None
    except ClientError as error:
        raise ConnectionResetError(str(error)) from None


async def drain(request: web.Request) -> None:
    """Read what a refused sender still sends: it listens for the reason only after that."""
    num_bytes = 0
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_DRAIN_S):
            while num_bytes < _MOST_DRAINED_BYTES and (chunk := await request.content.readany()):
                num_bytes += len(chunk)


class Places:
    """The few places for bodies on their way in, one for each worker and fragment."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken: set[tuple[str, int]] = set()

    @contextlib.contextmanager
    def take(self, worker_id: str, fragment: int) -> Iterator[None]:
        key = (worker_id, fragment)
        if key in self.taken or len(self.taken) >= self._most:
            raise Refusal(429, "quota", "too many bodies are on their way", retry_after_s=1)
        self.taken.add(key)
        try:
            yield
        finally:
            self.taken.discard(key)


class Spool:
    """A file for a body; it is gone at the end of the block unless it was kept."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / f"{secrets.token_hex(8)}.hwdl")
        self._kept = False

    def __enter__(self) -> Spool:
        Path(self.path).parent.mkdir(exist_ok=True)  # somebody may have tidied up
        self._file = open(self.path, "xb", buffering=0)
        return self

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view.nbytes:
            view = view[self._file.write(view) :]

    def keep(self) -> None:
        self._kept = True

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if not self._kept:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
