"""A client against a small HTTP server that does as it is told, and through a bad network."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from headway.diloco.backoff import Backoff
from headway.diloco.client import DiLoCoClient, as_registration_fault, parse_address
from headway.diloco.compression import decode, encode
from headway.diloco.faults import (
    IdTaken,
    ModelMismatch,
    NotAllowed,
    Refused,
    RoundOver,
    UnknownSession,
    Unreachable,
    VersionMismatch,
)
from headway.diloco.flight import Flight
from headway.diloco.session import Session
from headway.diloco.wire import Message, compose
from headway.errors import ConfigError
from headway.testing.proxy import Fault, Proxy

SHAPES = {"kite": (3, 50), "tail": (7,)}


def make_message(seed: int = 0) -> Message:
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}
    return compose({"round_id": "r-3-00", "version": 3}, encode(tensors, "float32").payloads)


class Told(ThreadingHTTPServer):
    """Answers every request as `answer` says: status, body, and whether the body is read first."""

    daemon_threads = True

    def __init__(self, answer: Callable[[Any], tuple[int, bytes, bool]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.address = f"127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Told

    def do_GET(self) -> None:
        status, body, reads = self.server.answer(self)
        length = int(self.headers.get("Content-Length", 0))
        data = self.rfile.read(length) if reads else b""
        self.server.seen.append((self.command, self.path, dict(self.headers), data))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        if not reads:
            self.connection.shutdown(socket.SHUT_WR)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def told() -> Iterator[Callable[..., Told]]:
    servers: list[Told] = []

    def make(status: int = 200, body: Any = None, reads: bool = True) -> Told:
        text = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        servers.append(Told(lambda _: (status, text, reads)))
        return servers[-1]

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


# Addresses


@pytest.mark.parametrize(
    ("text", "host", "port", "secure"),
    [
        ("kite.example:7650", "kite.example", 7650, False),
        ("http://10.0.0.5:1/", "10.0.0.5", 1, False),
        ("https://kite:65535", "kite", 65535, True),
        ("[::1]:7650", "::1", 7650, False),
    ],
)
def test_addresses_are_read(text: str, host: str, port: int, secure: bool) -> None:
    address = parse_address(text)
    assert (address.host, address.port, address.secure) == (host, port, secure)


@pytest.mark.parametrize(
    "text", ["", "kite", "kite:", "kite:0", "kite:70000", "a b:1", "ftp://k:1"]
)
def test_what_is_no_address_is_a_mistake(text: str) -> None:
    with pytest.raises(ConfigError, match=r"server_addr: .*HOST:PORT"):
        parse_address(text)


# What goes out


def test_a_submission_goes_out_whole_and_again_the_same(told: Any) -> None:
    server, message = told(202, {"state": "accepted"}), make_message()
    client = DiLoCoClient(server.address, "secret")
    for _ in range(2):
        client.submit(message, worker="a", session="s", round="r-1-00", fragment=0, local_steps=5)
    (_, path, headers, body), (*_, again) = server.seen
    assert body == again == b"".join(message.chunks())
    assert f"digest={message.digest}" in path and "local_steps=5" in path
    assert headers["Authorization"] == "Bearer secret" and headers["Headway-Diloco"] == "1"
    assert client.sent_bytes == 2 * message.num_bytes


def test_a_refusal_while_the_body_is_sent_is_understood(told: Any) -> None:
    server = told(422, {"error": "its norm is too large", "reason": "norm"}, reads=False)
    large = compose({}, encode({"w": torch.zeros(4 << 20)}, "float32").payloads)
    with pytest.raises(Refused, match="its norm is too large") as caught:
        DiLoCoClient(server.address).submit(large, worker="a")
    assert caught.value.status == 422 and caught.value.answer["reason"] == "norm"


# What comes back


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, NotAllowed),
        (403, NotAllowed),
        (404, UnknownSession),
        (410, RoundOver),
        (426, VersionMismatch),
        (422, Refused),
        (429, Unreachable),
        (503, Unreachable),
    ],
)
def test_refusals_are_told_apart(told: Any, status: int, kind: type) -> None:
    server = told(status, {"error": "because", "reason": "why", "round_id": "r-9-00"})
    with pytest.raises(kind, match=f"because \\({status}\\)") as caught:
        DiLoCoClient(server.address).status()
    assert type(caught.value) is kind
    if isinstance(caught.value, Refused):
        assert caught.value.answer["round_id"] == "r-9-00"


def test_what_a_refused_registration_means() -> None:
    assert isinstance(as_registration_fault(Refused(409, "taken")), IdTaken)
    assert isinstance(as_registration_fault(Refused(422, "other shapes")), ModelMismatch)
    assert "no DiLoCo server" in str(as_registration_fault(UnknownSession(404, "not found")))


def test_parameters_come_back_bit_for_bit(told: Any) -> None:
    message = make_message()
    client = DiLoCoClient(told(200, b"".join(message.chunks())).address)
    header, payloads = client.fetch(0, SHAPES)
    assert header.meta["round_id"] == "r-3-00"
    again = encode({n: decode(p) for n, p in payloads.items()}, "float32").payloads
    assert [bytes(p.data) for p in again.values()] == [bytes(p.data) for p in message.payloads]
    assert client.received_bytes == message.num_bytes


def test_an_answer_that_is_no_object_is_no_answer(told: Any) -> None:
    for body in (b"[1]", b"<html>", b""):
        with pytest.raises(Unreachable, match="no JSON object"):
            DiLoCoClient(told(200, body).address).status()


# A bad network


def test_nobody_there_is_told_by_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(Unreachable, match=f"127.0.0.1:{port} .*nothing listens"):
        DiLoCoClient(f"127.0.0.1:{port}").status()
    with pytest.raises(Unreachable, match=r"'kite.invalid' is no known host"):
        DiLoCoClient("kite.invalid:7650").status()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("refuse"),
        Fault("reset", "request", 10),
        Fault("reset", "reply", 300),
        Fault("truncate", "reply", 300),
        Fault("corrupt", "reply", 600),
        Fault("lose_reply"),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.direction}",
)
def test_parameters_on_a_bad_network_are_unreachable_and_never_wrong(
    told: Any, fault: Fault
) -> None:
    server = told(200, b"".join(make_message().chunks()))
    with Proxy(server.address) as proxy:
        proxy.next([fault])
        client = DiLoCoClient(proxy.address)
        with pytest.raises(Unreachable, match=proxy.address):
            client.fetch(0, SHAPES)
        assert client.fetch(0, SHAPES)[0].meta["round_id"] == "r-3-00"
        assert (proxy.num_connections, proxy.num_faulted) == (2, 1)


def test_a_partition_is_noticed_in_time_and_survived(told: Any) -> None:
    with Proxy(told(200, {"ok": True}).address) as proxy:
        client = DiLoCoClient(proxy.address, timeout_s=0.2)
        with proxy.partitioned(), pytest.raises(Unreachable, match="no sign of it in time"):
            client.status()
        assert client.status() == {"ok": True}


def test_a_duplicated_request_arrives_twice_and_is_answered_once(told: Any) -> None:
    server, message = told(202, {"state": "accepted"}), make_message()
    with Proxy(server.address) as proxy:
        proxy.next([Fault("duplicate")])
        assert DiLoCoClient(proxy.address).submit(message, worker="a")["state"] == "accepted"
    assert [body for *_, body in server.seen] == [b"".join(message.chunks())] * 2


class Trickle:
    """Takes and gives a few bytes at a time, for as long as anybody stays.

    `quick` is said at once, then a byte at a time of an answer that does not end; with `reads`,
    what comes is taken in little pieces before that.
    """

    def __init__(self, quick: bytes, *, reads: bool = False) -> None:
        self._quick, self._reads, self._ends = quick, reads, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Trickle:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(1.0)
        if not self._reads:
            connection.recv(1 << 16)
            connection.sendall(self._quick)
        # A client that knows no end is let go: its test fails, and does not hang.
        for _ in range(400):
            if self._ends.wait(0.05):
                return
            if self._reads:
                connection.recv(64)
            else:
                connection.send(b"1")


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"


@pytest.mark.parametrize("what", ["headers", "words", "parameters", "submission"])
def test_a_server_that_trickles_holds_nobody_beyond_the_limit(what: str) -> None:
    """Bytes come all the time, so no silence ends it."""
    quick = {"headers": b"HTTP/1.1 200 OK\r\nSlow: ", "words": OK + b'{"a": "'}.get(what, OK)
    with Trickle(quick, reads=what == "submission") as server:
        client = DiLoCoClient(server.address)
        large = compose({}, encode({"w": torch.zeros(8 << 20)}, "float32").payloads)
        began_s = time.monotonic()
        with pytest.raises(Unreachable, match=r"not all was sent and answered within 0\.5 s"):
            if what == "parameters":
                client.fetch(0, SHAPES, limit_s=0.5)
            elif what == "submission":
                client.submit(large, limit_s=0.5, worker="a")
            else:
                client.heartbeat({}, limit_s=0.5)
        assert 0.4 < time.monotonic() - began_s < 10


def test_no_request_of_a_client_is_longer_than_its_timeout() -> None:
    with Trickle(OK) as server:
        client, began_s = DiLoCoClient(server.address, timeout_s=0.5), time.monotonic()
        for ask in (client.status, lambda: client.fetch(0, SHAPES)):
            with pytest.raises(Unreachable, match="not all was sent and answered within"):
                ask()
        assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("what", ["parameters", "heartbeat"])
def test_one_limit_holds_for_all_of_a_flight(what: str) -> None:
    """A client has its own, longer one; what counts is how long training may stand still."""
    message = None if what == "parameters" else make_message()
    with Trickle(OK) as server:
        session = Session(DiLoCoClient(server.address), "a", {}, heartbeat_s=20.0)
        session.session, session.rounds = "s", ["r-1-00"]
        flight = Flight(
            session, message, fragment=0, round_id="r-1-00", shapes=SHAPES, local_steps=1,
            max_retries=100, timeout_s=1.0,
        )  # fmt: skip
        began_s = time.monotonic()
        flight.begin(beside=False)
        outcome = flight.finish()
        assert outcome.kind == "unsettled" and "not all was sent" in outcome.reason
        assert time.monotonic() - began_s < 10


def test_a_registration_that_another_thread_is_at_is_not_waited_for_beyond_the_limit() -> None:
    session = Session(DiLoCoClient("127.0.0.1:1"), "a", {}, heartbeat_s=20.0)
    session.session = "s"
    session._lock.acquire()
    frees = threading.Timer(3.0, session._lock.release)  # so that one who waits fails, not hangs
    frees.start()
    try:
        with pytest.raises(Unreachable, match=r"no registration within 0\.1 s"):
            session.return_after("s", 0.1)
    finally:
        frees.cancel()


# Pauses


def test_pauses_double_up_to_a_limit_and_differ_between_workers() -> None:
    calm, hasty = Backoff(2, 10, chance=lambda: 0.0), Backoff(2, 10, chance=lambda: 1.0)
    assert [calm.take() for _ in range(4)] == [2, 4, 8, 10]
    assert [hasty.take() for _ in range(4)] == [1.5, 3, 6, 7.5]


def test_a_pause_ends_with_the_run() -> None:
    stop = threading.Event()
    stop.set()
    assert Backoff(60, stop=stop).wait() is False


def test_no_pause_is_longer_than_from_one_sign_of_life_to_the_next() -> None:
    """A server that is back is met again within a heartbeat, however long it was away."""
    session = Session(DiLoCoClient("kite:1"), "a", {}, heartbeat_s=20.0)
    for told, longest_s in (({}, 20.0), ({"heartbeat_s": 3.0}, 3.0), ({"heartbeat_s": 90}, 20.0)):
        session.server = told
        backoff = session.make_backoff()
        pauses_s = [backoff.take() for _ in range(12)]
        assert 0.75 * longest_s <= max(pauses_s) <= longest_s == session.beat_s
