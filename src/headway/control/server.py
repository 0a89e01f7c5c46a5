"""The HTTP server of a running job: a thread of its own that only reads a board and fills an inbox.

Owns: routes, answers, the thread and its end. Does not own: checks of requests (security.py),
sockets (listener.py), what commands do (callbacks). It touches nothing of the training itself, so
that it can neither slow it down nor break it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from headway.control import prometheus
from headway.control.discovery import list_jobs
from headway.control.inbox import Inbox
from headway.control.listener import (
    PATIENCE_S,
    Bucket,
    Connections,
    Listener,
    bind_tcp,
    bind_unix,
)
from headway.control.openapi import describe
from headway.control.schema import MOST_BODY_BYTES, BadRequest, parse_command, parse_json
from headway.control.security import ANSWER_HEADERS, Guard, is_loopback, prove
from headway.control.status import StatusBoard
from headway.errors import ConfigError, missing_extra

if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)

REQUESTS_PER_S = 100.0
REQUEST_BURST = 200
_MOST_STREAMS = 16
_STREAM_LOOK_S = 0.2
_STREAM_KEEP_ALIVE_S = 15.0
_MOST_HEADER_BYTES = 8190
_START_LIMIT_S = 10.0


class ControlServer:
    """Serves one job. `start` returns when it listens; `stop` when its thread has ended."""

    def __init__(
        self,
        board: StatusBoard,
        inbox: Inbox,
        *,
        nonce: str,
        tokens: Mapping[str, str],
        version: str,
        host: str = "127.0.0.1",
        port: int = 0,
        unix_socket: str | None = None,
        extra_hosts: frozenset[str] = frozenset(),
        tls: ssl.SSLContext | None = None,
        add_routes: Callable[[ControlServer], None] | None = None,
    ) -> None:
        if not tokens and unix_socket is None and not is_loopback(host):
            raise ConfigError(
                f"host={host!r} can be reached from other machines: that needs a token; leave "
                "disable_auth at False, or listen on 127.0.0.1"
            )
        self.board, self.inbox = board, inbox
        self.host, self.unix_socket = host, unix_socket
        self.port: int | None = None
        """The port in use, once the server has started; None with a Unix socket."""
        self._nonce, self._tokens, self._version = nonce, dict(tokens), version
        self._wanted_port, self._tls, self._extra_hosts = port, tls, extra_hosts
        self._add_routes = add_routes
        self._routes: list[tuple[str, str, Handler, str]] = []
        self._roles: dict[web.AbstractRoute, str] = {}
        self._num_streams = 0
        self._bucket = Bucket(REQUESTS_PER_S, REQUEST_BURST)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def add_route(self, method: str, path: str, handler: Handler, role: str) -> None:
        """One more route and the role it asks for; before `start`."""
        self._routes.append((method, path, handler, role))

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, and answer in a thread of its own."""
        try:
            import aiohttp.web  # noqa: F401
        except ImportError:
            raise missing_extra("aiohttp", "control", "Control over HTTP") from None
        if self.unix_socket is not None:
            listening = bind_unix(self.unix_socket)
        else:
            listening = bind_tcp(self.host, self._wanted_port)
            self.port = listening.getsockname()[1]
        self._own_routes()
        if self._add_routes is not None:
            self._add_routes(self)
        ready = threading.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                asyncio.run(self._serve(Listener(listening, self._tls), ready))
            except BaseException as error:
                failed.append(error)
                listening.close()
                ready.set()

        self._thread = threading.Thread(target=run, name="headway-control", daemon=True)
        self._thread.start()
        if not ready.wait(_START_LIMIT_S):
            raise RuntimeError(f"the control server did not start within {_START_LIMIT_S:g} s")
        if failed:
            raise failed[0]

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End the streams, answer what is under way, and stop; returns whether it has stopped."""
        if self._thread is None:
            return True
        self.board.close()
        loop, over = self._loop, self._over
        if loop is not None and over is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(over.set)
            except RuntimeError:
                pass  # it has ended by itself meanwhile
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

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
            listener.start(runner.server)
            ready.set()
            await self._over.wait()
        finally:
            await listener.stop()
            listener.connections.close()
            await runner.cleanup()

    def _make_check(self, connections: Connections) -> Any:
        """What every request passes first, also one for a route that is not there."""
        from aiohttp import web

        guard = Guard(
            self._tokens,
            self.port,
            self._extra_hosts,
            loopback=self.unix_socket is not None or is_loopback(self.host),
        )

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            connections.begin(request.transport)
            try:
                await asyncio.sleep(self._bucket.take())
                hosts = request.headers.getall("Host", [])
                needs = self._roles.get(request.match_info.route, "read")
                guard.check(request.method, request.headers, needs, hosts)
                answer = await handler(request)
            except BadRequest as error:
                answer = _refuse(error)
            except web.HTTPException as error:
                answer = _refuse(BadRequest(error.status, error.reason))
            except (asyncio.CancelledError, ConnectionError):
                raise
            except Exception:
                logger.exception("the control server failed to answer %s", request.path[:200])
                answer = _refuse(BadRequest(500, "the server failed; its log says how"))
            finally:
                connections.end(request.transport)
            if not answer.prepared:
                answer.headers.update(ANSWER_HEADERS)
            return answer

        return check

    # -- routes -------------------------------------------------------------------------------

    def _own_routes(self) -> None:
        job = f"/jobs/{self.board.job_id}"
        self.add_route("GET", "/healthz", self._answer_health, "public")
        self.add_route("GET", "/metrics", self._answer_metrics, "read")
        self.add_route("GET", "/openapi.json", self._answer_description, "read")
        self.add_route("GET", "/jobs", self._answer_jobs, "read")
        self.add_route("GET", f"{job}/status", self._answer_status, "read")
        self.add_route("GET", f"{job}/events", self._stream_events, "read")
        self.add_route("GET", job + "/commands/{command_id}", self._answer_receipt, "read")
        self.add_route("POST", f"{job}/control", self._take_command, "control")

    async def _answer_health(self, request: web.Request) -> web.StreamResponse:
        """That it is up; and, to a challenge, that it is the job that wrote the endpoint file."""
        answer: dict[str, Any] = {"status": "ok"}
        challenge = request.query.get("challenge")
        if challenge is not None:
            if not 16 <= len(challenge) <= 128:
                raise BadRequest(400, "a challenge has 16 to 128 characters")
            answer["proof"] = prove(self._nonce, challenge)
        return answer_json(answer)

    async def _answer_metrics(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        body = prometheus.render(self.board.status).encode()
        return web.Response(body=body, headers={"Content-Type": prometheus.CONTENT_TYPE})

    async def _answer_description(self, request: web.Request) -> web.StreamResponse:
        return answer_json(describe(self._version))

    async def _answer_jobs(self, request: web.Request) -> web.StreamResponse:
        jobs = await asyncio.to_thread(list_jobs)
        hidden = ("nonce", "process_started_at")
        shown = (
            {k: v for k, v in job.endpoint.to_dict().items() if k not in hidden} for job in jobs
        )
        return answer_json({"jobs": [{**job, "alive": j.alive} for job, j in zip(shown, jobs)]})

    async def _answer_status(self, request: web.Request) -> web.StreamResponse:
        return answer_json(dict(self.board.status))

    async def _answer_receipt(self, request: web.Request) -> web.StreamResponse:
        receipt = self.inbox.receipt(request.match_info["command_id"])
        if receipt is None:
            raise BadRequest(404, "no command with that id is known")
        return answer_json(receipt.to_dict())

    async def _take_command(self, request: web.Request) -> web.StreamResponse:
        try:
            async with asyncio.timeout(PATIENCE_S):
                body = await request.read()
        except TimeoutError:
            raise BadRequest(408, "the body did not come in time") from None
        command = parse_command(parse_json(body))
        receipt = self.inbox.submit(command)
        return answer_json(
            {
                "status": "acknowledged",
                "timestamp": receipt.accepted_at,
                **receipt.to_dict(),
                "message": receipt.message or "it takes effect at the end of the step under way",
            }
        )

    async def _stream_events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events, from the one after `Last-Event-ID` or from now on."""
        from aiohttp import web

        if self._num_streams >= _MOST_STREAMS:
            raise BadRequest(429, f"{_MOST_STREAMS} streams are open already")
        last = request.headers.get("Last-Event-ID", "")
        number = int(last) if last.isascii() and last.isdigit() and len(last) < 16 else None
        seen = self.board.last_number if number is None else number
        answer = web.StreamResponse(
            headers={**ANSWER_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
        )
        self._num_streams += 1
        try:
            await answer.prepare(request)
            quiet_s = _STREAM_KEEP_ALIVE_S
            while not self.board.closed or seen < self.board.last_number:
                lost, events = self.board.events_after(seen)
                if lost:
                    await _send_event(answer, None, {"event": "lost", "count": lost})
                for seen, event in events:
                    await _send_event(answer, seen, event)
                quiet_s = 0.0 if events else quiet_s + _STREAM_LOOK_S
                if quiet_s >= _STREAM_KEEP_ALIVE_S:
                    await _write(answer, b": waiting\n\n")
                    quiet_s = 0.0
                await asyncio.sleep(0 if self.board.closed else _STREAM_LOOK_S)
        finally:
            self._num_streams -= 1
        return answer


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


async def _send_event(answer: web.StreamResponse, number: int | None, event: Any) -> None:
    head = "" if number is None else f"id: {number}\n"
    text = json.dumps(event, allow_nan=False)
    await _write(answer, f"{head}event: {event['event']}\ndata: {text}\n\n".encode())


async def _write(answer: web.StreamResponse, data: bytes) -> None:
    """A reader that does not read is let go."""
    async with asyncio.timeout(PATIENCE_S):
        await answer.write(data)


def _quiet_logger() -> logging.Logger:
    """What clients get wrong is not the run's business."""
    quiet = logging.getLogger(f"{__name__}.requests")
    quiet.propagate = False
    quiet.addHandler(logging.NullHandler())
    return quiet
