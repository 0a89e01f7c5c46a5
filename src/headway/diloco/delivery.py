"""Large bodies on their way out.

Owns: the pace of sending, and the end of those who do not read. Does not own: what is sent
(core.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from headway.control.security import ANSWER_HEADERS
from headway.diloco.wire import CONTENT_TYPE, Message

if TYPE_CHECKING:
    from aiohttp import web

SILENCE_S = 30.0
"""How long a receiver may take for one piece."""


async def send_body(
    request: web.Request, message: Message, on_piece: Callable[[], None]
) -> tuple[web.StreamResponse, bool]:
    """Answer with a body, piece by piece; returns the answer, and whether all of it was taken."""
    from aiohttp import web

    answer = web.StreamResponse(headers={**ANSWER_HEADERS, "Content-Type": CONTENT_TYPE})
    answer.content_length = message.num_bytes
    try:
        await answer.prepare(request)
        for chunk in message.chunks():
            async with asyncio.timeout(SILENCE_S):
                await answer.write(chunk)
            on_piece()
        await answer.write_eof()
    except (ConnectionError, TimeoutError):
        if request.transport is not None:
            request.transport.abort()
        return answer, False
    return answer, True
