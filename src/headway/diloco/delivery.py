"""Large bodies on their way out.

Owns: the pace of sending, how many are on their way, and the end of those who do not read. Does not
own: what is sent (core.py).

A body holds the memory of its parameters for as long as it is on its way, also when rounds have
long replaced them. So a worker has one on its way, for a limited time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Coroutine
from typing import TYPE_CHECKING, Any

from headway.control.security import ANSWER_HEADERS
from headway.diloco.wire import CONTENT_TYPE, Message

if TYPE_CHECKING:
    from aiohttp import web

SILENCE_S = 30.0
"""How long a receiver may take for one piece."""
PATIENCE_S = 60.0
LEAST_BYTES_PER_S = 64 << 10
"""How long it may take for all of it: `PATIENCE_S`, and what its bytes take at this rate."""


class Deliveries:
    """The bodies on their way, one for each worker."""

    def __init__(self) -> None:
        self.under_way: dict[str, asyncio.Timeout] = {}

    async def send(
        self,
        request: web.Request,
        worker_id: str,
        known: Container[str],
        making: Coroutine[Any, Any, Message],
        on_piece: Callable[[], None],
    ) -> tuple[web.StreamResponse, int]:
        """Answer with a body, piece by piece; returns the answer, and its bytes if all were taken.

        What is on its way to the same worker ends: who asks again does not read that any more. So
        does what is on its way to workers that are not `known` any more.
        """
        from aiohttp import web

        answer = web.StreamResponse(headers={**ANSWER_HEADERS, "Content-Type": CONTENT_TYPE})
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:
                self._make_room(worker_id, known, loop.time())
                self.under_way[worker_id] = limit
                try:
                    message = await making
                    if self.under_way.get(worker_id) is not limit:
                        raise TimeoutError  # ended, and to be told so in a moment
                    num_bytes = message.num_bytes
                    limit.reschedule(loop.time() + PATIENCE_S + num_bytes / LEAST_BYTES_PER_S)
                    await _send(request, answer, message, on_piece)
                finally:
                    if self.under_way.get(worker_id) is limit:
                        del self.under_way[worker_id]
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
            return answer, 0
        return answer, num_bytes

    def _make_room(self, worker_id: str, known: Container[str], now: float) -> None:
        for other in [w for w in self.under_way if w == worker_id or w not in known]:
            limit = self.under_way.pop(other)
            if not limit.expired():
                limit.reschedule(now)


async def _send(
    request: web.Request,
    answer: web.StreamResponse,
    message: Message,
    on_piece: Callable[[], None],
) -> None:
    answer.content_length = message.num_bytes
    await answer.prepare(request)
    for chunk in message.chunks():
        async with asyncio.timeout(SILENCE_S):
            await answer.write(chunk)
        on_piece()
    await answer.write_eof()
