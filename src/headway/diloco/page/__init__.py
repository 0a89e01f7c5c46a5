"""The server's page for people: a table of workers and rounds that renews itself.

Owns: which files there are, and how they are sent. Does not own: what they show (report.py).
The files hold nothing of a run; the page asks for the status with the token of its address.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

FILES = {"/": "index.html", "/page/page.js": "page.js", "/page/page.css": "page.css"}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


def make_handler(name: str) -> Handler:
    """Answers with one of the files."""
    path = Path(__file__).parent / name
    kind = f"{_TYPES[path.suffix]}; charset=utf-8"

    async def answer(request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        return web.Response(body=path.read_bytes(), headers={"Content-Type": kind})

    return answer
