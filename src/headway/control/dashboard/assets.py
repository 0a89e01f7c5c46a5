"""The page's own files, and the script that draws charts, from installed packages.

Owns: the fixed list of what is served. Does not own: what the page does with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.control.guarded import GuardedServer
from headway.control.listener import Bucket
from headway.control.schema import BadRequest
from headway.control.security import ANSWER_HEADERS

if TYPE_CHECKING:
    from aiohttp import web

FOLDER = Path(__file__).parent / "assets"
PAGE, CHARTS = "index.html", "plotly.min.js"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}
_KEPT = "no-cache"
_BLOCK_BYTES = 1 << 16
_MOST_DOWNLOADS = 8
_DOWNLOADS_PER_S = 1.0
_DOWNLOAD_S = 60.0


@dataclass(frozen=True)
class Asset:
    """One file, as it is sent."""

    kind: str
    tag: str
    body: bytes | None
    path: Path
    """Read from again and again where `body` is None."""


class Assets:
    """What there is to serve, looked up once: no name of a request reaches the file system."""

    def __init__(self) -> None:
        self._found = {
            path.name: _load(path) for path in sorted(FOLDER.glob("*")) if _is_ours(path)
        }
        charts = find_charts_script()
        if charts is not None:
            size, version = charts.stat().st_size, importlib.metadata.version("plotly")
            self._found[CHARTS] = Asset(_KINDS[".js"], f'"plotly-{version}-{size}"', None, charts)
        self._num_downloads = 0
        self._downloads = Bucket(_DOWNLOADS_PER_S, _MOST_DOWNLOADS)

    def add_routes(self, server: GuardedServer) -> None:
        """They hold nothing of any run, so they need no token."""
        server.add_route("GET", "/", self._send_page, "public")
        server.add_route("GET", "/assets/{name}", self._send, "public")

    async def _send_page(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, PAGE)

    async def _send(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, request.match_info["name"])

    async def _answer(self, request: web.Request, name: str) -> web.StreamResponse:
        from aiohttp import web

        asset = self._found.get(name)
        if asset is None:
            raise BadRequest(404, "there is no such file", valid_files=sorted(self._found))
        headers = {"Content-Type": asset.kind, "ETag": asset.tag, "Cache-Control": _KEPT}
        if request.headers.get("If-None-Match") == asset.tag:
            return web.Response(status=304, headers={"ETag": asset.tag, "Cache-Control": _KEPT})
        if asset.body is not None:
            return web.Response(body=asset.body, headers=headers)
        return await self._stream(request, asset, headers)

    async def _stream(
        self, request: web.Request, asset: Asset, headers: dict[str, str]
    ) -> web.StreamResponse:
        """A large file in small parts: a slow reader must not hold all of it in memory."""
        from aiohttp import web

        # Anybody may ask for it, and it is the one answer that costs the process something.
        too_soon = self._downloads.take() > 0
        if too_soon or self._num_downloads >= _MOST_DOWNLOADS:
            self._downloads.give_back()
            raise BadRequest(503, "too many downloads are under way; ask again later")
        answer = web.StreamResponse(headers={**ANSWER_HEADERS, **headers})
        answer.content_length = asset.path.stat().st_size
        self._num_downloads += 1
        try:
            async with asyncio.timeout(_DOWNLOAD_S):
                await answer.prepare(request)
                with open(asset.path, "rb") as file:
                    while block := file.read(_BLOCK_BYTES):
                        await answer.write(block)
                await answer.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.close()
        finally:
            self._num_downloads -= 1
        return answer


def find_charts_script() -> Path | None:
    """The script in the installed package plotly; found without importing it."""
    spec = importlib.util.find_spec("plotly")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(place) / "package_data" / CHARTS
        if path.is_file():
            return path
    return None


def _is_ours(path: Path) -> bool:
    return path.suffix in _KINDS and path.is_file() and not path.is_symlink()


def _load(path: Path) -> Asset:
    body = path.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return Asset(_KINDS[path.suffix], tag, body, path)
