"""The HTTP server of a running job: a thread of its own that only reads a board and fills an inbox.

Owns: the routes of a job and their answers. Does not own: the thread and the check of requests
(guarded.py, security.py), sockets (listener.py), what commands do (callbacks). It touches nothing
of the training itself, so that it can neither slow it down nor break it.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from headway.control import prometheus
from headway.control.discovery import list_jobs
from headway.control.guarded import GuardedServer, answer_json, read_json
from headway.control.inbox import Inbox
from headway.control.listener import PATIENCE_S
from headway.control.openapi import describe
from headway.control.schema import BadRequest, parse_command
from headway.control.security import ANSWER_HEADERS, prove
from headway.control.status import StatusBoard

if TYPE_CHECKING:
    from aiohttp import web

_MOST_STREAMS = 16
_STREAM_LOOK_S = 0.2
_STREAM_KEEP_ALIVE_S = 15.0


class ControlServer(GuardedServer):
    """Serves one job. `start` returns when it listens; `stop` when its thread has ended."""

    thread_name = "headway-control"
    # It shares its interpreter with training: at half a millisecond each, these are 1 % of it.
    requests_per_s, request_burst = 20.0, 300

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
        super().__init__(
            tokens=tokens,
            host=host,
            port=port,
            unix_socket=unix_socket,
            extra_hosts=extra_hosts,
            tls=tls,
        )
        self.board, self.inbox = board, inbox
        self._nonce, self._version = nonce, version
        self._more_routes = add_routes
        self._num_streams = 0

    # -- routes -------------------------------------------------------------------------------

    def _add_own_routes(self) -> None:
        job = f"/jobs/{self.board.job_id}"
        self.add_route("GET", "/healthz", self._answer_health, "public")
        self.add_route("GET", "/metrics", self._answer_metrics, "read")
        self.add_route("GET", "/openapi.json", self._answer_description, "read")
        self.add_route("GET", "/jobs", self._answer_jobs, "read")
        self.add_route("GET", f"{job}/status", self._answer_status, "read")
        self.add_route("GET", f"{job}/events", self._stream_events, "read")
        self.add_route("GET", job + "/commands/{command_id}", self._answer_receipt, "read")
        self.add_route("POST", f"{job}/control", self._take_command, "control")
        if self._more_routes is not None:
            self._more_routes(self)

    def _before_stop(self) -> None:
        self.board.close()  # ends the streams

    def find_valid(self, path: str) -> dict[str, Any]:
        """The job that is served here, to those who ask for another."""
        return {"valid_jobs": [self.board.job_id]} if path.startswith("/jobs/") else {}

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
        hidden = ("nonce", "process_started_at", "place")
        shown = [
            {
                **{k: v for k, v in job.endpoint.to_dict().items() if k not in hidden},
                "alive": job.alive,
                "elsewhere": job.elsewhere,
            }
            for job in jobs
        ]
        return answer_json({"jobs": shown})

    async def _answer_status(self, request: web.Request) -> web.StreamResponse:
        return answer_json(dict(self.board.status))

    async def _answer_receipt(self, request: web.Request) -> web.StreamResponse:
        receipt = self.inbox.receipt(request.match_info["command_id"])
        if receipt is None:
            raise BadRequest(404, "no command with that id is known")
        return answer_json(receipt.to_dict())

    async def _take_command(self, request: web.Request) -> web.StreamResponse:
        return answer_json(take_command(self.inbox, await read_json(request)))

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


def take_command(inbox: Inbox, said: Any) -> dict[str, Any]:
    """Hand what a request asks for to the run; the answer to the request."""
    receipt = inbox.submit(parse_command(said))
    return {
        "status": "acknowledged",
        "timestamp": receipt.accepted_at,
        **receipt.to_dict(),
        "message": receipt.message or "it takes effect at the end of the step under way",
    }


async def _send_event(answer: web.StreamResponse, number: int | None, event: Any) -> None:
    head = "" if number is None else f"id: {number}\n"
    text = json.dumps(event, allow_nan=False)
    await _write(answer, f"{head}event: {event['event']}\ndata: {text}\n\n".encode())


async def _write(answer: web.StreamResponse, data: bytes) -> None:
    """A reader that does not read is let go."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await answer.write(data)
    except TimeoutError:
        raise ConnectionAbortedError("the reader does not read") from None
