"""Talking to a DiLoCo server: one request at a time, bodies streamed both ways, without torch.

Owns: addresses, connections, deadlines of one request, and turning every way in which a request can
fail into one of the kinds of faults.py. Does not own: when to ask again (flight.py, session.py),
the format of bodies (wire.py).

Each request has a connection of its own: after a partition nothing is left of an old one.
"""

from __future__ import annotations

import http.client
import io
import json
import math
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

from headway.diloco.faults import (
    Busy,
    DiLoCoError,
    IdTaken,
    ModelMismatch,
    NotAllowed,
    NotThere,
    Refused,
    RoundOver,
    UnknownSession,
    Unreachable,
    VersionMismatch,
)
from headway.diloco.wire import CONTENT_TYPE, Header, Message, Payload, Reader, WireError
from headway.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PROTOCOL = 1
VERSION_HEADER = "Headway-Diloco"
CONNECT_S = 10.0
"""How long a connection may take to come about."""
SILENCE_S = 60.0
"""How long the other end may say nothing while it is due to."""
_PREFIX = "/diloco/v1/"
_MOST_ANSWER_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20
_ADDRESS = re.compile(r"(?:(https?)://)?(\[[0-9a-fA-F:.]+\]|[^:/\s\[\]]+):(\d{1,5})/?")
_BUSY = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int
    secure: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(text: str) -> Address:
    """`host:port`, `[v6]:port`, with or without http:// or https://; else `ConfigError`."""
    match = _ADDRESS.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or not 0 < int(match[3]) < 65536:
        raise ConfigError(
            f"server_addr: {text!r} given; allowed: HOST:PORT with a port from 1 to 65535, such as "
            "10.0.0.5:7650, or https:// before it for TLS"
        )
    return Address(match[2].strip("[]"), int(match[3]), match[1] == "https")


class DiLoCoClient:
    """A server, by its address.

    `token` is this worker's, or the one that all share. `tls_ca` is a file of certificates to trust
    in place of the system's, and asks for TLS; so does an https:// address. `bf16_fetch` asks for
    parameters rounded to bfloat16, which are half as many bytes.

    No request takes longer than its `limit_s`, from the connection to the last byte of the answer,
    nor than `timeout_s`; one without a large body ends sooner.
    """

    def __init__(
        self,
        address: str,
        token: str | None = None,
        *,
        tls_ca: str | None = None,
        timeout_s: float = 600.0,
        connect_s: float = CONNECT_S,
        bf16_fetch: bool = False,
    ) -> None:
        self.address = parse_address(address)
        self.timeout_s = timeout_s
        self._token, self._bf16_fetch = token, bf16_fetch
        self._connect_s = min(connect_s, timeout_s)
        self._silence_s = min(SILENCE_S, timeout_s)
        self._tls: ssl.SSLContext | None = None
        if self.address.secure or tls_ca:
            try:
                self._tls = ssl.create_default_context(cafile=tls_ca)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"tls_ca: {tls_ca!r} cannot be read as a file of certificates: {error}"
                ) from None
        self.sent_bytes = self.received_bytes = 0
        """Of bodies, over all requests."""

    # -- the protocol -----------------------------------------------------------------------

    def register(self, facts: Mapping[str, Any], *, limit_s: float = math.inf) -> dict[str, Any]:
        """Take part; what the server says about itself and the current rounds."""
        body = {"protocol": PROTOCOL, **facts}
        return self._ask("POST", "register", body=body, limit_s=limit_s)

    def heartbeat(self, facts: Mapping[str, Any], *, limit_s: float = math.inf) -> dict[str, Any]:
        """Say that this worker is alive."""
        return self._ask("POST", "heartbeat", body=facts, limit_s=limit_s)

    def deregister(self, facts: Mapping[str, Any], *, limit_s: float = 5.0) -> None:
        """Leave."""
        self._ask("POST", "deregister", body=facts, limit_s=limit_s)

    def status(self) -> dict[str, Any]:
        """What the server does now."""
        return self._ask("GET", "status")

    def ask_round(
        self,
        round_id: str,
        fragment: int,
        worker: str,
        session: str,
        *,
        wait_s: float = 0.0,
        limit_s: float = math.inf,
    ) -> dict[str, Any]:
        """What became of a round; waits up to `wait_s` for its end."""
        query = {
            "round": round_id,
            "fragment": fragment,
            "worker": worker,
            "session": session,
            "wait": f"{wait_s:g}",
        }
        silence_s = wait_s + self._connect_s
        return self._ask("GET", "round", query, silence_s=silence_s, limit_s=limit_s)

    def submit(
        self, message: Message, *, limit_s: float = math.inf, **query: Any
    ) -> dict[str, Any]:
        """Hand a body in; the same one may be handed in again."""
        query["digest"] = message.digest
        return self._ask("POST", "submit", query, message=message, limit_s=limit_s)

    def upload(
        self, message: Message, *, limit_s: float = math.inf, **query: Any
    ) -> dict[str, Any]:
        """Give a server that has no parameters yet its first ones."""
        return self._ask("POST", "parameters", query, message=message, limit_s=limit_s)

    def fetch(
        self,
        fragment: int,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        limit_s: float = math.inf,
        **query: Any,
    ) -> tuple[Header, dict[str, Payload]]:
        """The current parameters of a fragment."""
        reader = Reader(shapes, dtypes=("float32", "bfloat16"))
        words = {"fragment": fragment, **({"dtype": "bf16"} if self._bf16_fetch else {}), **query}

        def take(answer: http.client.HTTPResponse) -> Header:
            while chunk := answer.read(_PIECE_BYTES):
                self.received_bytes += len(chunk)
                reader.feed(chunk)
            return reader.finish()

        try:
            limit_s = min(self.timeout_s, limit_s)
            header = self._exchange("GET", "parameters", words, take=take, limit_s=limit_s)
        except WireError as error:  # bytes were lost or changed on the way
            raise Unreachable(f"{self.address}: parameters came damaged: {error}") from error
        return header, reader.payloads

    # -- one request ------------------------------------------------------------------------

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        *,
        body: Mapping[str, Any] | None = None,
        message: Message | None = None,
        silence_s: float | None = None,
        limit_s: float = math.inf,
    ) -> dict[str, Any]:
        # A few words either way have no more time than a server may be silent.
        few_s = self._connect_s + (silence_s or self._silence_s)
        most_s = self.timeout_s if message is not None else few_s

        def take(answer: http.client.HTTPResponse) -> dict[str, Any]:
            found = _read_json(answer)
            if found is None:
                raise Unreachable(f"{self.address}: its answer to {path} is no JSON object")
            return found

        answer: dict[str, Any] = self._exchange(
            method,
            path,
            query,
            take=take,
            limit_s=min(most_s, limit_s),
            body=body,
            message=message,
            silence_s=silence_s,
        )
        return answer

    def _exchange(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        *,
        take: Any,
        limit_s: float,
        body: Mapping[str, Any] | None = None,
        message: Message | None = None,
        silence_s: float | None = None,
    ) -> Any:
        target = _PREFIX + path + (f"?{urlencode(query)}" if query else "")
        headers = {VERSION_HEADER: str(PROTOCOL), "Connection": "close"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data: bytes | Iterable[Any] | None = None
        if message is not None:
            data = self._count_sent(message)
            headers |= {"Content-Type": CONTENT_TYPE, "Content-Length": str(message.num_bytes)}
        elif body is not None:
            data = json.dumps(body, allow_nan=False).encode()
            headers["Content-Type"] = "application/json"
        try:
            with closing(self._open(silence_s or self._silence_s, limit_s)) as connection:
                answer = self._send(connection, method, target, data, headers)
                if answer.status >= 400:
                    raise _refusal(self.address, answer.status, _read_json(answer) or {})
                return take(answer)
        except ssl.SSLCertVerificationError as error:
            raise NotAllowed(
                0, f"{self.address}: its certificate is not trusted: {error.verify_message}"
            ) from None
        except socket.gaierror as error:
            raise NotThere(
                f"{self.address}: {self.address.host!r} is no known host ({error.strerror})"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            kind = NotThere if isinstance(error, ConnectionRefusedError) else Unreachable
            raise kind(f"{self.address} does not answer: {_describe(error)}") from None

    def _open(self, silence_s: float, limit_s: float) -> http.client.HTTPConnection:
        host, port = self.address.host, self.address.port
        began_s, connect_s = time.monotonic(), min(self._connect_s, limit_s)
        if limit_s <= 0:
            raise _Overdue(limit_s)
        connection = (
            http.client.HTTPConnection(host, port, timeout=connect_s)
            if self._tls is None
            else http.client.HTTPSConnection(host, port, timeout=connect_s, context=self._tls)
        )
        connection.connect()
        timed = _TimedSocket(connection.sock, silence_s, limit_s, began_s)
        connection.sock = cast(socket.socket, timed)
        return connection

    @staticmethod
    def _send(
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        data: bytes | Iterable[Any] | None,
        headers: dict[str, str],
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, target, body=data, headers=headers)
        except (BrokenPipeError, ConnectionResetError):
            # One that refuses a body early closes before all is sent; it may have said why.
            try:
                return connection.getresponse()
            except (OSError, http.client.HTTPException):
                pass
            raise
        return connection.getresponse()

    def _count_sent(self, message: Message) -> Iterable[bytes | memoryview]:
        for chunk in message.chunks():
            yield chunk
            self.sent_bytes += len(chunk)


class _Overdue(TimeoutError):
    """A request has used up all of its time."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"not all was sent and answered within {max(0.0, limit_s):.3g} s")


class _TimedSocket:
    """A connected socket as far as `http.client` uses one, with an end to its time.

    A socket's own timeout begins anew with every piece, so a few bytes a minute would hold a
    request for ever. Here no piece may take longer than `silence_s`, nor all of them than `limit_s`
    since `began_s`.
    """

    def __init__(
        self, sock: socket.socket, silence_s: float, limit_s: float, began_s: float
    ) -> None:
        self._sock, self._silence_s = sock, silence_s
        self._limit_s, self._deadline = limit_s, began_s + limit_s

    def sendall(self, data: Any) -> None:
        left = memoryview(data).cast("B")
        while left:
            left = left[self._timed(self._sock.send, left[:_PIECE_BYTES]) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        raw = self._sock.makefile(mode, buffering=0)  # type: ignore[call-overload]
        return io.BufferedReader(_TimedReader(raw, self._timed))

    def close(self) -> None:
        self._sock.close()

    def _timed(self, act: Callable[[Any], int], data: Any) -> int:
        left_s = self._deadline - time.monotonic()
        try:
            if left_s > 0:
                self._sock.settimeout(min(self._silence_s, left_s))
                return act(data)
        except TimeoutError:
            if left_s > self._silence_s:
                raise
        raise _Overdue(self._limit_s)


class _TimedReader(io.RawIOBase):
    def __init__(self, raw: Any, timed: Callable[[Callable[[Any], int], Any], int]) -> None:
        self._raw, self._timed = raw, timed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        return self._timed(self._raw.readinto, buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _read_json(answer: http.client.HTTPResponse) -> dict[str, Any] | None:
    text = answer.read(_MOST_ANSWER_BYTES)
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _refusal(address: Address, status: int, answer: Mapping[str, Any]) -> DiLoCoError:
    said = answer.get("error") or answer.get("reason")
    reason = f"{address}: {said or http.client.responses.get(status, 'refused')} ({status})"
    if status == 429 and "retry_after_s" in answer:
        return Busy(reason)
    if status in _BUSY:
        return Unreachable(reason)
    if status == 401:
        reason += "; there is no token, or it is not one that this server knows"
    if status in (401, 403):
        return NotAllowed(status, reason, answer)
    kinds: dict[int, type[Refused]] = {
        404: UnknownSession,
        410: RoundOver,
        426: VersionMismatch,
    }
    return kinds.get(status, Refused)(status, reason, answer)


def as_registration_fault(error: Refused) -> Refused:
    """What a refusal means where a worker asked to take part."""
    if isinstance(error, UnknownSession):
        return Refused(error.status, f"{error.reason}: this is no DiLoCo server", error.answer)
    kinds: dict[int, type[Refused]] = {409: IdTaken, 422: ModelMismatch}
    return kinds.get(error.status, type(error))(error.status, error.reason, error.answer)


def _describe(error: BaseException) -> str:
    if isinstance(error, _Overdue):
        return str(error)
    if isinstance(error, TimeoutError):
        return "no sign of it in time"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, http.client.IncompleteRead):
        return "its answer ends too early"
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS (no https:// and no tls_ca for it, then)"
    if isinstance(error, http.client.RemoteDisconnected | http.client.BadStatusLine):
        return "no HTTP comes back (if it speaks TLS, its address begins with https://)"
    return f"{type(error).__name__}: {error}"
