"""The body of a registration, which may hold the layout of a large model.

Owns: reading JSON of that size within limits. Does not own: its fields (request_fields.py).
"""

from __future__ import annotations

import json
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from headway.diloco.intake import read_body
from headway.diloco.rounds import Refusal
from headway.diloco.specification import MOST_TENSORS

if TYPE_CHECKING:
    from aiohttp import web

MOST_LAYOUT_BYTES = 8 << 20
_READ_S = 60.0


async def read_layout_json(request: web.Request, pool: Executor | None) -> Any:
    """The JSON value of a body of up to 8 MiB."""
    assert pool is not None
    parts = bytearray()

    def take(data: bytes) -> None:
        parts.extend(data)
        if len(parts) > MOST_LAYOUT_BYTES:
            raise Refusal(413, "too_large", f"at most {MOST_LAYOUT_BYTES} bytes are taken")

    await read_body(request, take, pool, _READ_S)
    if parts.count(b"[") + parts.count(b"{") > 2 * MOST_TENSORS + 64:
        raise Refusal(400, "bad_request", "the body holds too many lists and objects")
    try:
        return json.loads(bytes(parts).decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise Refusal(400, "bad_request", "the body is not JSON") from None


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
