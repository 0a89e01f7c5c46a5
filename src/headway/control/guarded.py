"""An HTTP server in a thread of its own, of which every request passes the guard first.

Owns: the thread and its end, the check before every handler, the form of answers and refusals.
Does not own: routes (server.py, dashboard/), the rules (security.py), sockets (listener.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from headway.control.listener import (
    MOST_CONNECTIONS,
    PATIENCE_S,
    Bucket,
    Connections,
    Listener,
    bind_tcp,
    bind_unix,
)
from headway.control.schema import MOST_BODY_BYTES, BadRequest, parse_json
from headway.control.security import ANSWER_HEADERS, Guard, is_loopback
from headway.errors import ConfigError, missing_extra

if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)

REQUESTS_PER_S = 100.0
REQUEST_BURST = 200
_MOST_HEADER_BYTES = 8190
_START_LIMIT_S = 10.0
_LAST_ANSWERS_S = 1.0


class GuardedServer:
    """Answers on the routes it is given. `start` returns when it listens; `stop` when its thread
    has ended."""

    thread_name = "headway-http"
    extra, purpose = "control", "Control over HTTP"
    requests_per_s, request_burst = REQUESTS_PER_S, REQUEST_BURST
    most_connections = MOST_CONNECTIONS

    def __init__(
        self,
        *,
        tokens: Mapping[str, str],
        host: str = "127.0.0.1",
        port: int = 0,
        unix_socket: str | None = None,
        extra_hosts: frozenset[str] = frozenset(),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not tokens and unix_socket is None and not is_loopback(host):
            raise ConfigError(
                f"host={host!r} can be reached from other machines: that needs a token; leave "
                "disable_auth at False, or listen on 127.0.0.1"
            )
        self.host, self.unix_socket = host, unix_socket
        self.port: int | None = None
        """The port in use, once the server has started; None with a Unix socket."""
        self._tokens = dict(tokens)
        self._wanted_port, self._tls, self._extra_hosts = port, tls, extra_hosts
        self._routes: list[tuple[str, str, Handler, str]] = []
        self._roles: dict[web.AbstractRoute, str] = {}
        self._bucket = Bucket(self.requests_per_s, self.request_burst)
        self._larger_bodies: dict[str, int] = {}
        self._beginnings: list[Callable[[], Awaitable[None]]] = []
        self._endings: list[Callable[[], Awaitable[None]]] = []
        self._guard: Guard | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def find_valid(self, path: str) -> dict[str, Any]:
        """What would be right in the place of a path that is not there."""
        return {}

    def add_route(
        self,
        method: str,
        path: str,
        handler: Handler,
        role: str,
        *,
        most_body_bytes: int | None = None,
    ) -> None:
        """One more route and the role it asks for; before `start`.

        `most_body_bytes` allows a body of more than the usual 64 KiB, which the handler gets as it
        comes; the path is then a plain one.
        """
        self._routes.append((method, path, handler, role))
        if most_body_bytes is not None:
            self._larger_bodies[path] = most_body_bytes

    @property
    def routes(self) -> tuple[tuple[str, str, Handler, str], ...]:
        """(method, path, handler, role) of every route; all of them once it has started."""
        return tuple(self._routes)

    def add_beginning(self, begin: Callable[[], Awaitable[None]]) -> None:
        """Something to be done in the server's thread before it answers its first request."""
        self._beginnings.append(begin)

    def add_ending(self, end: Callable[[], Awaitable[None]]) -> None:
        """Something to be done in the server's thread when it has answered its last request."""
        self._endings.append(end)

    def role_of(self, request: web.Request) -> str:
        """The most that the sender of a request, which has passed the guard, may do."""
        assert self._guard is not None
        hosts = request.headers.getall("Host", [])
        try:
            self._guard.check("GET", request.headers, "control", hosts)
        except BadRequest:
            return "read"
        return "control"

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, and answer in a thread of its own."""
        try:
            import aiohttp.web  # noqa: F401
        except ImportError:
            raise missing_extra("aiohttp", self.extra, self.purpose) from None
        if self.unix_socket is not None:
            listening = bind_unix(self.unix_socket)
        else:
            listening = bind_tcp(self.host, self._wanted_port)
            self.port = listening.getsockname()[1]
        self._add_own_routes()
        ready = threading.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                listener = Listener(
                    listening, self._tls, self._larger_bodies, self.most_connections
                )
                asyncio.run(self._serve(listener, ready))
            except BaseException as error:
                if ready.is_set():
                    logger.exception("the server has ended by an error")
                failed.append(error)
                listening.close()
                ready.set()

        self._thread = threading.Thread(target=run, name=self.thread_name, daemon=True)
        self._thread.start()
        if not ready.wait(_START_LIMIT_S):
            raise RuntimeError(f"the server did not start within {_START_LIMIT_S:g} s")
        if failed:
            raise failed[0]

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End the streams, answer what is under way, and stop; returns whether it has stopped."""
        if self._thread is None:
            return True
        self._before_stop()
        loop, over = self._loop, self._over
        if loop is not None and over is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(over.set)
            except RuntimeError:
                pass  # it has ended by itself meanwhile
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _add_own_routes(self) -> None:
        """The routes that a kind of server always has."""

    def _make_guard(self) -> Guard:
        """The rules that every request passes; the port is known by now."""
        return Guard(
            self._tokens,
            self.port,
            self._extra_hosts,
            loopback=self.unix_socket is not None or is_loopback(self.host),
            tls=self._tls is not None,
        )

    def _before_stop(self) -> None:
        """What must be told before the server can end."""

    async def _serve(self, listener: Listener, ready: threading.Event) -> None:
        from aiohttp import web

        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(
            client_max_size=MOST_BODY_BYTES, middlewares=[self._make_check(listener.connections)]
        )
        for method, path, handler, role in self._routes:
            self._roles[app.router.add_route(method, path, handler)] = role
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_quiet_logger(),
            keepalive_timeout=PATIENCE_S,
            max_line_size=_MOST_HEADER_BYTES,
            max_field_size=_MOST_HEADER_BYTES,
            lingering_time=0.0,
            auto_decompress=False,
            shutdown_timeout=2.0,
        )
        await runner.setup()
        try:
            assert runner.server is not None
            for begin in self._beginnings:
                await begin()
            listener.start(runner.server)
            ready.set()
            await self._over.wait()
        finally:
            try:
                await listener.stop()
                await listener.connections.drain(_LAST_ANSWERS_S)
                listener.connections.close()
                await runner.cleanup()
            finally:
                for end in self._endings:
                    await end()

    def _make_check(self, connections: Connections) -> Any:
        """What every request passes first, also one for a route that is not there."""
        from aiohttp import web

        guard = self._guard = self._make_guard()

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            connections.begin(request.transport)
            try:
                await asyncio.sleep(self._bucket.take())
                hosts = request.headers.getall("Host", [])
                needs = self._roles.get(request.match_info.route, "read")
                guard.check(request.method, request.headers, needs, hosts)
                if needs != "public":
                    connections.welcome()
                answer = await handler(request)
            except BadRequest as error:
                answer = _refuse(error)
            except web.HTTPException as error:
                valid = self.find_valid(request.path) if error.status == 404 else {}
                answer = _refuse(BadRequest(error.status, error.reason, **valid))
            except (asyncio.CancelledError, ConnectionError):
                raise
            except Exception:
                logger.exception("the server failed to answer %s", request.path[:200])
                answer = _refuse(BadRequest(500, "the server failed; its log says how"))
            finally:
                connections.end(request.transport)
            if not answer.prepared:
                # How long a file of ours may be kept is the one thing that a route may decide.
                kept = answer.headers.get("Cache-Control")
                answer.headers.update(ANSWER_HEADERS)
                if kept is not None:
                    answer.headers["Cache-Control"] = kept
            return answer

        return check


async def read_json(request: web.Request) -> Any:
    """The body of a request, which must come in time and be JSON."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            body = await request.read()
    except TimeoutError:
        raise BadRequest(408, "the body did not come in time") from None
    return parse_json(body)


def answer_json(value: Any, status: int = 200) -> web.Response:
    """An answer in JSON."""
    from aiohttp import web

    body = json.dumps(value, allow_nan=False).encode()
    return web.Response(
        body=body, status=status, headers={"Content-Type": "application/json; charset=utf-8"}
    )


def _refuse(error: BadRequest) -> web.Response:
    answer = answer_json(error.to_dict(), error.status)
    if error.status == 401:
        answer.headers["WWW-Authenticate"] = 'Bearer realm="headway"'
    # Whatever of the request was not read must not be taken for the next one.
    answer.force_close()
    return answer


def _quiet_logger() -> logging.Logger:
    """What clients get wrong is not the run's business."""
    quiet = logging.getLogger(f"{__name__}.requests")
    quiet.propagate = False
    quiet.addHandler(logging.NullHandler())
    return quiet
