"""The DiLoCo server: one model, many workers far apart, an outer step for each round.

Owns: the routes, the thread that applies rounds, life and end. Does not own: the thread that
answers and the guard (control/guarded.py), rounds and state (core.py), the protocol's fields
(request_fields.py). The protocol is told byte for byte in docs/diloco-protocol.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.errors import CheckpointError
from headway.control.guarded import GuardedServer, answer_json, read_json
from headway.control.prometheus import CONTENT_TYPE as METRICS_TYPE
from headway.control.schema import BadRequest
from headway.control.security import Guard, is_loopback
from headway.diloco import page, report
from headway.diloco.compression import DTYPE_OF
from headway.diloco.core import Core, Model
from headway.diloco.credentials import Tokens, WorkerGuard, choose_tokens, keep_token, make_tls
from headway.diloco.delivery import Deliveries
from headway.diloco.intake import Places, Spool, drain, read_body
from headway.diloco.refusals import HANDLED, explain
from headway.diloco.registration import MOST_LAYOUT_BYTES, read_layout_json
from headway.diloco.request_fields import (
    MOST_STEPS,
    Query,
    check_payload,
    check_version,
    parse_departure,
    parse_heartbeat,
    parse_registration,
)
from headway.diloco.rounds import Refusal, Submission, Worker, receipt_of
from headway.diloco.server_options import make_options
from headway.diloco.wire import CONTENT_TYPE, Header, Message, Reader, WireError
from headway.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)

VERSION_HEADER = "Headway-Diloco"
PREFIX = "/diloco/v1"
MOST_WAIT_S = 25.0
_MOST_BODY_BYTES = 1 << 44
"""What the head of a request may announce; the header of the body is held to the model's size."""
_TICK_S = 0.25
_RETRY_S = 1.0


class DiLoCoServer(GuardedServer):
    """Serves one model. `start` returns when it listens; `stop` when its threads have ended.

    `model` is a module or named tensors with the first parameters; a `Specification` or None lets
    the first worker bring them. What `output_dir` holds of an earlier server comes first. Other
    options are those of `ServerOptions`.
    """

    thread_name = "headway-diloco"
    requests_per_s, request_burst = 2000.0, 4000

    def __init__(
        self,
        model: Model = None,
        *,
        output_dir: str | Path,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        token_file: str | Path | None = None,
        disable_auth: bool = False,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        **options: Any,
    ) -> None:
        self.options = make_options(options)
        self.most_connections = max(128, 4 * self.options.num_workers + 64)
        self._disable_auth = disable_auth
        self._given = choose_tokens(token, token_file, disable_auth)
        if type(port) is not int or not 0 <= port < 65536:
            raise ConfigError(f"port={port!r}: allowed is 0 (any that is free) to 65535")
        tls = make_tls(tls_cert, tls_key)
        super().__init__(
            tokens={} if disable_auth else {"control": "known by the guard"},
            host=host,
            port=port,
            tls=tls,
        )
        if tls is None and not is_loopback(host):
            logger.warning(
                "%s can be reached from other machines without TLS: weights and tokens travel "
                "in the clear; give tls_cert and tls_key, or use a tunnel",
                host,
            )
        self.is_secure = tls is not None
        self.core = Core(model, output_dir, self.options, time.monotonic())
        self.tokens = Tokens()
        self._own_guard: WorkerGuard | None = None
        self._intake: ThreadPoolExecutor | None = None
        self._heavy: ThreadPoolExecutor | None = None
        self._stopping = False
        self._places = Places(self.options.max_uploads)
        self._deliveries = Deliveries()
        self._changed: asyncio.Event | None = None
        self._wake: asyncio.Event | None = None
        self._rounds: asyncio.Task[None] | None = None
        self._applying: asyncio.Task[None] | None = None
        self.started_at = time.monotonic()
        self.add_beginning(self._begin)
        self.add_ending(self._end)

    # -- life -----------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """`host:port`, once it listens."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def token(self) -> str | None:
        """The token of all workers, if there is one."""
        return self.tokens.join

    @property
    def state_hash(self) -> str | None:
        return self.core.state.hash if self.core.state else None

    def start(self) -> None:
        """Go on where the folder's last round ended, listen, and answer in a thread."""
        self.core.open(time.monotonic())
        try:
            if not self._disable_auth:
                self.tokens = self._given or Tokens(
                    join=keep_token(self.core.ledger.folder / "token")
                )
            self._intake = ThreadPoolExecutor(4, "headway-diloco-intake")
            self._heavy = ThreadPoolExecutor(1, "headway-diloco-rounds")
            super().start()
        except BaseException:
            self._close()
            raise

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Finish the round that is being applied, and end."""
        stopped = super().stop(timeout_s)
        self._close()
        return stopped

    def _close(self) -> None:
        for pool in (self._intake, self._heavy):
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
        self.core.close()

    def _before_stop(self) -> None:
        self._stopping = True
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._tell)

    async def _begin(self) -> None:
        self._changed, self._wake = asyncio.Event(), asyncio.Event()
        self._rounds = asyncio.create_task(self._run_rounds())

    async def _end(self) -> None:
        if self._rounds is not None:
            self._rounds.cancel()
        tasks = [task for task in (self._rounds, self._applying) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _make_guard(self) -> Guard:
        loopback = is_loopback(self.host)
        guard = WorkerGuard({}, self.port, self._extra_hosts, loopback, known=self.tokens)
        self._own_guard = guard
        return guard

    # -- rounds ---------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Those who wait for a change look again."""
        if self._changed is not None:
            self._changed.set()
            self._changed = asyncio.Event()

    async def _run_rounds(self) -> None:
        """Apply what is complete, let those go who are gone, and look again after a moment."""
        assert self._wake is not None
        while True:
            try:
                for worker_id in self.core.book.evict(time.monotonic()):
                    logger.warning("worker %s was not heard of any more and is let go", worker_id)
                while due := self.core.book.due(time.monotonic()):
                    self._applying = asyncio.create_task(self._apply(due[0]))
                    await asyncio.shield(self._applying)  # also by an end: it waits for it
            except Exception:
                logger.exception("the rounds of the DiLoCo server failed; they are tried again")
                await asyncio.sleep(_RETRY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._wake.wait()
            self._wake.clear()

    async def _apply(self, fragment: int) -> None:
        core, began, job = self.core, time.monotonic(), self.core.start_round(fragment)
        try:
            done = await self._in(self._heavy, core.carry_out, job)
        except Exception as error:  # a round that stayed closed would hold all workers for ever
            known = isinstance(error, OSError | CheckpointError)
            words = "round %s cannot be committed, it is tried again: %s"
            logger.error(words, job.round_id, error, exc_info=None if known else error)
            for worker in core.retry_round(job, time.monotonic() + _RETRY_S):
                logger.error("what %s has sent is gone from the disk; it sends it again", worker)
            self._tell()
            return
        if done is None:
            logger.error("round %s would leave no numbers; it begins anew", job.round_id)
            core.give_up_round(job)
        else:
            core.finish_round(job, done, time.monotonic(), time.monotonic() - began)
        self._tell()

    async def _in(self, pool: ThreadPoolExecutor | None, work: Callable[..., Any], *a: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *a)

    # -- routes ---------------------------------------------------------------------------------

    def _add_own_routes(self) -> None:
        for path, file in page.FILES.items():
            self.add_route("GET", path, page.make_handler(file), "public")
        self.add_route("GET", "/healthz", self._answer_health, "public")
        self.add_route("GET", "/metrics", self._answer_metrics, "read")
        self.add_route("GET", f"{PREFIX}/status", self._answer_status, "read")
        for method, name, handler, most_bytes in (
            ("POST", "register", self._register, MOST_LAYOUT_BYTES),
            ("POST", "heartbeat", self._heartbeat, None),
            ("POST", "deregister", self._deregister, None),
            ("GET", "parameters", self._send_parameters, None),
            ("POST", "parameters", self._take_parameters, _MOST_BODY_BYTES),
            ("GET", "round", self._answer_round, None),
            ("POST", "submit", self._submit, _MOST_BODY_BYTES),
        ):
            path, guarded = f"{PREFIX}/{name}", self._make_handler(handler)
            self.add_route(method, path, guarded, "control", most_body_bytes=most_bytes)

    def _make_handler(self, handler: Handler) -> Handler:
        """The protocol's version first; every refusal counted, and told with its reason."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                check_version(request.headers.get(VERSION_HEADER))
                return await handler(request)
            except HANDLED as error:
                found = explain(error)
                if found is None:
                    raise
            counts = self.core.book.num_refused
            counts[found.reason] = counts.get(found.reason, 0) + 1
            await drain(request)
            raise BadRequest(found.status, found.words, reason=found.reason, **found.more)

        return answer

    def _check_worker(self, request: web.Request, worker_id: str) -> None:
        assert self._own_guard is not None
        self._own_guard.check_worker(request.headers.get("Authorization"), worker_id)

    def _find(self, request: web.Request, query: Query) -> Worker:
        worker_id = query.worker()
        self._check_worker(request, worker_id)
        return self.core.book.find(worker_id, query.text("session"), time.monotonic())

    async def _answer_health(self, request: web.Request) -> web.StreamResponse:
        return answer_json({"status": "ok"})

    async def _answer_status(self, request: web.Request) -> web.StreamResponse:
        return answer_json(report.describe(self.core, self.started_at, time.monotonic()))

    async def _answer_metrics(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        status = report.describe(self.core, self.started_at, time.monotonic())
        body = report.render(status).encode()
        return web.Response(body=body, headers={"Content-Type": METRICS_TYPE})

    async def _register(self, request: web.Request) -> web.StreamResponse:
        said = parse_registration(await read_layout_json(request, self._intake))
        self._check_worker(request, said["worker_id"])
        await self._let_rounds_end(said["worker_id"])
        answer = self.core.register(said, time.monotonic())
        logger.info("worker %s takes part (%s)", said["worker_id"], said["group"]["strategy"])
        return answer_json(answer)

    async def _let_rounds_end(self, worker_id: str) -> None:
        """What an earlier session has sent is being applied, and cannot be taken back: to go on in
        that round would bring it a second time. So the next one is what a worker is told of."""
        until = time.monotonic() + MOST_WAIT_S
        while self.core.book.is_applying(worker_id):
            if time.monotonic() > until:
                words = "what this worker has sent before is being applied; come again"
                raise Refusal(503, "busy", words)
            await asyncio.sleep(_TICK_S / 5)

    async def _heartbeat(self, request: web.Request) -> web.StreamResponse:
        worker_id, session, step, speed = parse_heartbeat(await read_json(request))
        self._check_worker(request, worker_id)
        book = self.core.book
        worker = book.find(worker_id, session, time.monotonic())
        book.heartbeat(worker, step, speed)
        answer = {
            "ok": True,
            "sync_every": book.recommend(worker),
            "round_id": [place.id for place in book.rounds],
        }
        return answer_json(answer)

    async def _deregister(self, request: web.Request) -> web.StreamResponse:
        worker_id, session = parse_departure(await read_json(request))
        self._check_worker(request, worker_id)
        self.core.book.deregister(self.core.book.find(worker_id, session, time.monotonic()))
        self._wake_rounds()
        return answer_json({"ok": True})

    def _wake_rounds(self) -> None:
        assert self._wake is not None
        self._wake.set()

    async def _answer_round(self, request: web.Request) -> web.StreamResponse:
        query = Query.of(request.query, ("round", "fragment", "wait", "worker", "session"))
        worker = self._find(request, query)
        book, fragment = self.core.book, query.fragment() or 0
        until, had = time.monotonic() + query.seconds("wait", MOST_WAIT_S), False
        while True:
            changed = self._changed
            found = book.describe_round(query.text("round"), fragment, worker)
            left_s = until - time.monotonic()
            is_news = found["state"] != "open" or (had and not found["submitted"])
            if is_news or left_s <= 0 or self._stopping or changed is None:
                break
            had = found["submitted"]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await changed.wait()
            book.find(worker.id, worker.session, time.monotonic())
        deadline_at = found.pop("deadline_at")
        left = None if deadline_at is None else max(0.0, deadline_at - time.monotonic())
        return answer_json({**found, "deadline_in_s": left})

    # -- tensors --------------------------------------------------------------------------------

    async def _send_parameters(self, request: web.Request) -> web.StreamResponse:
        query = Query.of(request.query, ("fragment", "dtype", "worker", "session"))
        worker = self._find(request, query)

        def note() -> None:
            worker.seen_at = time.monotonic()  # a long download is a sign of life

        answer, num_bytes = await self._deliveries.send(
            request, worker.id, self.core.book.workers, self._make_message(query), note
        )
        worker.num_sent_bytes += num_bytes
        self.core.totals.num_sent_bytes += num_bytes
        return answer

    async def _make_message(self, query: Query) -> Message:
        """The parameters that are asked for; while they are sent, nothing holds all the state."""
        state, fragment = self.core.require_state(), query.fragment()
        self.core.names_of(state, fragment)
        round_id = None if fragment is None else self.core.book.rounds[fragment].id
        comm = query.words.get("dtype", "float32")
        if comm not in ("float32", "bf16"):
            raise Refusal(400, "bad_request", "dtype must be float32 or bf16")
        make = self.core.make_message
        message: Message = await self._in(self._intake, make, state, fragment, round_id, comm)
        return message

    async def _take_parameters(self, request: web.Request) -> web.StreamResponse:
        query = Query.of(request.query, ("worker", "session", "digest"))
        worker = self._find(request, query)
        _check_type(request)
        core, digest = self.core, query.words.get("digest")
        with self._places.take("", -1):
            if core.state is not None:
                raise Refusal(409, "not_first", "there are parameters already; fetch them")
            assert core.specification is not None
            # Into a file: what a worker says of its model takes no memory before it has come.
            with Spool(core.ledger.incoming) as spool:
                shapes = core.specification.shapes
                check = functools.partial(_check_digest, digest)
                reader = Reader(shapes, dtypes=("float32",), on_header=check, sink=spool.write)
                await self._read(request, worker, reader.feed)
                reader.finish()
                if core.state is not None:
                    raise Refusal(409, "not_first", "another was faster; fetch its parameters")
                await self._in(self._heavy, core.begin_from, core.specification, spool.path)
        return answer_json({"state": "accepted", "round_id": [r.id for r in core.book.rounds]}, 202)

    async def _submit(self, request: web.Request) -> web.StreamResponse:
        query = Query.of(
            request.query, ("worker", "session", "round", "fragment", "local_steps", "digest")
        )
        worker = self._find(request, query)
        self.core.require_state()
        book, round_id, digest = self.core.book, query.text("round"), query.text("digest")
        fragment, local_steps = query.fragment() or 0, query.whole("local_steps", 1, MOST_STEPS)
        _check_type(request)
        state = book.check(worker, round_id, fragment, digest)
        if state is None:
            with self._places.take(worker.id, fragment):
                try:
                    await self._accept(request, worker, round_id, fragment, local_steps, digest)
                except (WireError, Refusal) as error:
                    # Being late, or a second time, is no fault of the body.
                    if error.status not in (409, 410):
                        book.count_attempt(worker, round_id)
                    raise
            state = "accepted"
            self._wake_rounds()
        else:
            await drain(request)
        receipt = receipt_of(round_id, fragment, worker.id, digest)
        return answer_json({"state": state, "receipt": receipt}, 202)

    async def _accept(
        self,
        request: web.Request,
        worker: Worker,
        round_id: str,
        fragment: int,
        local_steps: int,
        digest: str,
    ) -> None:
        """Receive a body, look at all of it, and write it into the book."""
        core, state = self.core, self.core.require_state()
        number = core.book.number_of(round_id, fragment)
        assert number is not None

        def check_header(header: Header) -> None:
            _check_digest(digest, header)
            check_payload(header, worker.comm, core.options.mode, round_id)

        shapes = state.specification.select(state.fragments[fragment])
        with Spool(core.ledger.incoming) as spool:
            reader = Reader(
                shapes,
                dtypes=(DTYPE_OF[worker.comm],),
                on_header=check_header,
                sink=spool.write,
            )
            num_bytes = await self._read(request, worker, reader.feed)
            header = reader.finish()
            is_local = header.meta.get("payload") == "local"
            norm = await self._in(self._intake, core.measure, spool.path, state, fragment, is_local)
            core.book.check_norm(fragment, norm)
            now = time.monotonic()
            steps = core.book.count_steps(local_steps)
            submission = Submission(
                worker.id, worker.session, round_id, number, fragment, digest, steps,
                worker.comm, is_local, norm, num_bytes, spool.path,
            )  # fmt: skip
            known = core.book.find(worker.id, worker.session, now)
            core.book.accept(known, submission, now)
            spool.keep()

    async def _read(
        self, request: web.Request, worker: Worker, feed: Callable[[bytes], None]
    ) -> int:
        assert self._intake is not None

        def take(data: bytes) -> None:
            feed(data)
            worker.seen_at = time.monotonic()  # a long upload is a sign of life

        limit_s = self.options.upload_timeout_s
        num_bytes = await read_body(request, take, self._intake, limit_s)
        self.core.totals.num_received_bytes += num_bytes
        return num_bytes


def _check_type(request: web.Request) -> None:
    if request.content_type != CONTENT_TYPE:
        raise Refusal(415, "bad_request", f"tensors are sent as {CONTENT_TYPE}")


def _check_digest(announced: str | None, header: Header) -> None:
    if announced not in (None, header.digest):
        raise WireError(400, "the body is not the one that the request announces")
