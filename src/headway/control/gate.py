"""What stands between a socket and the HTTP library: one whole, plain request on each connection.

Owns: the framing of requests (where one ends, what a head may look like), the refusal of all that
is malformed, and how much of a connection is read how often. Does not own: who may ask for what
(security.py), the limit on connections (listener.py), answers (guarded.py).

The library sees a request only when all of it is there and nobody could read it in two ways. So
slow and broken senders cost a few bytes of memory each, nothing can hide behind a request, and
none of this depends on the version of the library. The one exception are bodies that are larger
than memory should hold: where a server allows them by path, they are handed on as they come.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Protocol, cast

from headway.control.schema import MOST_BODY_BYTES, BadRequest
from headway.control.security import ANSWER_HEADERS

MOST_HEAD_BYTES = 16 * 1024
MOST_LINE_BYTES = 8190
MOST_HEADERS = 64
_FIRST_PAUSE_S = 0.002
_MOST_PAUSE_S = 1.0
_LINGER_S = 0.5
"""How long a refused sender is listened to, so that it gets to read why."""
_MOST_LINGER_BYTES = 4 << 20
_REQUEST_LINE = re.compile(rb"([A-Z][A-Z_-]{0,31}) (/[!-~]*) (HTTP/1\.[01])")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
_VALUE = re.compile(rb"[\t -~\x80-\xff]*")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_REPEATABLE = frozenset(
    {"accept", "accept-encoding", "accept-language", "cache-control", "connection", "cookie"}
    | {"forwarded", "pragma", "te", "via", "x-forwarded-for"}
)
"""Of every other header there may be one: of two, somebody else would believe the other."""
_DECIDING = frozenset(
    {"authorization", "content-encoding", "content-length", "content-type", "host", "origin"}
    | {"sec-fetch-site", "transfer-encoding"}
)
"""What an answer may name; anything else may be a secret in the wrong place."""
_DROPPED = frozenset({"connection", "keep-alive", "proxy-connection", "upgrade"})


class Roll(Protocol):
    """Where connections are counted."""

    def add(self, transport: asyncio.BaseTransport) -> None: ...

    def remove(self, transport: asyncio.BaseTransport) -> None: ...


def split_head(head: bytes, larger: Mapping[str, int] | None = None) -> tuple[bytes, int]:
    """The head of a request as the library gets it, and the length of the body that follows.

    `larger` has the limits of paths that take more than `MOST_BODY_BYTES`.
    """
    first, *lines = head.split(b"\r\n")
    found = _check_request_line(first)
    if len(lines) > MOST_HEADERS:
        raise BadRequest(431, f"more than {MOST_HEADERS} headers")
    seen: dict[str, bytes] = {}
    kept = [b" ".join(found.groups())]
    for line in lines:
        name, value = _check_header(line)
        if name in seen and name not in _REPEATABLE:
            shown = name if name in _DECIDING else "of one name"
            raise BadRequest(400, f"the header {shown} was sent twice")
        seen[name] = value
        if name not in _DROPPED:
            kept.append(line)
    if "host" not in seen:
        raise BadRequest(421, "this server does not answer without a Host")
    if "transfer-encoding" in seen:
        raise BadRequest(411, "a body is sent with Content-Length, not with Transfer-Encoding")
    if "expect" in seen:
        raise BadRequest(417, "nothing is promised before the body is here")
    length = seen.get("content-length", b"0")
    if not _LENGTH.fullmatch(length):
        raise BadRequest(400, "Content-Length is not a number of bytes")
    path = found[2].partition(b"?")[0].decode()
    most_bytes = (larger or {}).get(path, MOST_BODY_BYTES)
    if int(length) > most_bytes:
        raise BadRequest(413, f"the body is larger than {most_bytes} bytes")
    return b"\r\n".join([*kept, b"Connection: close", b"", b""]), int(length)


def _check_request_line(line: bytes) -> re.Match[bytes]:
    if len(line) > MOST_LINE_BYTES:
        raise BadRequest(414, f"the first line is longer than {MOST_LINE_BYTES} bytes")
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        raise BadRequest(400, "a request begins with METHOD /path HTTP/1.1")
    if found[1] not in (b"GET", b"POST"):
        raise BadRequest(405, "only GET and POST are used here")
    return found


def _check_header(line: bytes) -> tuple[str, bytes]:
    if len(line) > MOST_LINE_BYTES:
        raise BadRequest(431, f"a header is longer than {MOST_LINE_BYTES} bytes")
    name, colon, value = line.partition(b":")
    if not colon or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        raise BadRequest(400, "a header is not 'Name: value' of printable characters")
    return name.decode("ascii").lower(), value.strip(b" \t")


class Gate(asyncio.Protocol):
    """One connection. The library's protocol is made once a request is whole."""

    def __init__(
        self,
        make_protocol: Callable[[], Any],
        roll: Roll,
        larger: Mapping[str, int] | None = None,
    ) -> None:
        self._make_protocol, self._roll, self._larger = make_protocol, roll, larger
        self._transport: asyncio.Transport | None = None
        self._behind: Any = None
        self._received = bytearray()
        self._head: bytes | None = None
        self._length = 0
        self._num_due = 0
        """Bytes of a body that is handed on as it comes."""
        self._pause_s = _FIRST_PAUSE_S
        self._timer: asyncio.TimerHandle | None = None
        self._num_lingering_bytes: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._roll.add(transport)

    def data_received(self, data: bytes) -> None:
        if self._num_lingering_bytes is not None:
            self._linger(len(data))
        elif self._num_due:
            self._pass_on(data)
        elif self._behind is not None:
            self._stop_reading()  # there is one request on a connection, and it was answered
        else:
            searched = max(0, len(self._received) - 3)
            self._received += data
            try:
                self._advance(searched)
            except BadRequest as error:
                self._refuse(error)

    def _advance(self, searched: int) -> None:
        """Find the end of the head, then of the body; then hand the request on."""
        if self._head is None:
            end = self._find_end(searched)
            if end >= 0:
                self._head, self._length = split_head(bytes(self._received[:end]), self._larger)
                del self._received[: end + 4]
        # A body that is allowed to be larger is handed on as it comes.
        if self._head is None or len(self._received) < self._length <= MOST_BODY_BYTES:
            self._wait()
        else:
            self._hand_on()

    def _find_end(self, searched: int) -> int:
        """Where the head ends; -1: it goes on. One that can become nothing is refused at once."""
        end = self._received.find(b"\r\n\r\n", searched)
        if not self._received[:1].isupper():
            _check_request_line(b"")
        if end < 0 or end > MOST_HEAD_BYTES:
            line = self._received.find(b"\n", 0, MOST_LINE_BYTES + 2)
            if line >= 0:
                _check_request_line(bytes(self._received[: max(0, line - 1)]))
            elif len(self._received) > MOST_LINE_BYTES:
                _check_request_line(bytes(self._received))
            if len(self._received) > MOST_HEAD_BYTES:
                raise BadRequest(431, f"the headers are longer than {MOST_HEAD_BYTES} bytes")
        return end

    def _hand_on(self) -> None:
        assert self._head is not None and self._transport is not None
        request = self._head + bytes(self._received[: self._length])
        more = len(self._received) > self._length
        self._num_due = max(0, self._length - len(self._received))
        self._received, self._head = bytearray(), b""
        self._behind = self._make_protocol()
        self._behind.connection_made(self._transport)
        self._behind.data_received(request)
        if more:
            self._stop_reading()

    def _pass_on(self, data: bytes) -> None:
        """More of a large body; the library stops the reading when it has enough of it."""
        part = data[: self._num_due]
        self._num_due -= len(part)
        self._behind.data_received(part)
        if len(part) < len(data):
            self._stop_reading()

    def _wait(self) -> None:
        """Read on after a moment, and a longer one each time: a request sent byte by byte would
        otherwise wake this thread for every byte of it."""
        transport = self._transport
        assert transport is not None
        self._stop_reading()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._pause_s, _read_on, transport)
        self._pause_s = min(_MOST_PAUSE_S, 2 * self._pause_s)

    def _stop_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _refuse(self, error: BadRequest) -> None:
        assert self._transport is not None
        self._received, self._num_lingering_bytes = bytearray(), 0
        self._transport.write(_answer(error))
        if self._transport.can_write_eof():
            self._transport.write_eof()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_LINGER_S, self._transport.abort)
        else:
            self._transport.close()

    def _linger(self, num_bytes: int) -> None:
        assert self._num_lingering_bytes is not None and self._transport is not None
        self._num_lingering_bytes += num_bytes
        if self._num_lingering_bytes > _MOST_LINGER_BYTES:
            self._transport.abort()
        else:
            self._stop_reading()
            asyncio.get_running_loop().call_later(_FIRST_PAUSE_S, _read_on, self._transport)

    # -- what the library must hear of ----------------------------------------------------------

    def eof_received(self) -> bool | None:
        if self._behind is not None:
            self._behind.eof_received()
        return None

    def pause_writing(self) -> None:
        if self._behind is not None:
            self._behind.pause_writing()

    def resume_writing(self) -> None:
        if self._behind is not None:
            self._behind.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._roll.remove(self._transport)
        if self._behind is not None:
            self._behind.connection_lost(error)
        self._transport = self._behind = self._timer = None


def _read_on(transport: asyncio.Transport) -> None:
    if not transport.is_closing():
        transport.resume_reading()


def _answer(error: BadRequest) -> bytes:
    body = json.dumps(error.to_dict()).encode()
    headers = {
        **ANSWER_HEADERS,
        "Content-Type": "application/json; charset=utf-8",
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
