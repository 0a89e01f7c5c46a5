"""HTTP as nobody should send it: broken, ambiguous, endless, and after what was refused."""

from __future__ import annotations

import contextlib
import socket

import pytest

from headway.control.gate import MOST_HEAD_BYTES, MOST_HEADERS, MOST_LINE_BYTES, split_head
from headway.control.schema import MOST_BODY_BYTES, BadRequest


def fill(target, request):
    """Words in braces become this server's."""
    words = {
        b"{host}": target.host.encode(),
        b"{path}": target.control_path.encode(),
        b"{token}": target.tokens["control"].encode(),
        b"{body}": target.command(),
        b"{length}": str(len(target.command())).encode(),
    }
    for word, value in words.items():
        request = request.replace(word, value)
    return request


AUTH = b"Host: {host}\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
START = b"POST {path} HTTP/1.1\r\n" + AUTH
CHUNKED = b"1d\r\n" + b'{"command":"abort","id":"sm"}' + b"\r\n0\r\n\r\n"
MALFORMED = {
    "nothing but line ends": b"\r\n\r\n\r\n\r\n",
    "a line end before": b"\r\n" + START + b"Content-Length: {length}\r\n\r\n{body}",
    "HTTP/0.9": b"GET /healthz\r\n",
    "HTTP/0.9 with an end": b"GET /healthz\r\n\r\n",
    "HTTP/0.9 by version": b"GET /healthz HTTP/0.9\r\nHost: {host}\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/1.2": START.replace(b"1.1", b"1.2") + b"\r\n",
    "version in small letters": START.replace(b"HTTP", b"http") + b"\r\n",
    "no version": b"GET /jobs\r\nHost: {host}\r\n\r\n",
    "two spaces": START.replace(b" HTTP", b"  HTTP") + b"\r\n",
    "a tab": START.replace(b" HTTP", b"\tHTTP") + b"\r\n",
    "a space before": b" " + START + b"\r\n",
    "a method in small letters": b"get /jobs HTTP/1.1\r\n" + AUTH + b"\r\n",
    "a method with NUL": b"GE\x00T /jobs HTTP/1.1\r\n" + AUTH + b"\r\n",
    "NUL in the path": b"GET /jobs\x00 HTTP/1.1\r\n" + AUTH + b"\r\n",
    "NUL in a header": START + b"X: a\x00b\r\n\r\n",
    "NUL in a header's name": START + b"X\x00: a\r\n\r\n",
    "escape in a header": START + b"X: \x1b[31m\r\n\r\n",
    "bytes above 127 in the path": b"GET /jobs\xff HTTP/1.1\r\n" + AUTH + b"\r\n",
    "a fragment in a path that is a URL": b"GET http://{host}/jobs#x HTTP/1.1\r\n" + AUTH + b"\r\n",
    "an absolute target, ours": b"GET http://{host}/jobs HTTP/1.1\r\n" + AUTH + b"\r\n",
    "an absolute target, theirs": b"GET http://evil.example/jobs HTTP/1.1\r\n" + AUTH + b"\r\n",
    "an absolute target of files": b"GET file:///etc/passwd HTTP/1.1\r\n" + AUTH + b"\r\n",
    "an authority": b"CONNECT evil.example:443 HTTP/1.1\r\n" + AUTH + b"\r\n",
    "a star": b"OPTIONS * HTTP/1.1\r\n" + AUTH + b"\r\n",
    "no slash": b"GET jobs HTTP/1.1\r\n" + AUTH + b"\r\n",
    "a header without a name": START + b": x\r\n\r\n",
    "a header without a colon": START + b"nothing\r\n\r\n",
    "a space before the colon": START + b"Content-Length : {length}\r\n\r\n{body}",
    "a folded header": START + b"X: a\r\n b\r\nContent-Length: {length}\r\n\r\n{body}",
    "a folded first header": b"GET /jobs HTTP/1.1\r\n Host: {host}\r\n" + AUTH + b"\r\n",
    "line feeds alone": (START + b"Content-Length: {length}\r\n\r\n").replace(b"\r\n", b"\n")
    + b"{body}",
    "one line feed alone": START.replace(b"\r\nAuth", b"\nAuth") + b"\r\n",
    "a carriage return alone": START + b"X: a\rContent-Length: {length}\r\n\r\n{body}",
    "length of another kind": START + b"Content-Length: 0x1d\r\n\r\n{body}",
    "negative length": START + b"Content-Length: -1\r\n\r\n{body}",
    "length with a sign": START + b"Content-Length: +{length}\r\n\r\n{body}",
    "length of several": START + b"Content-Length: {length}, {length}\r\n\r\n{body}",
    "length in other digits": START + "Content-Length: ٢٩\r\n\r\n".encode() + b"{body}",
    "empty length": START + b"Content-Length:\r\n\r\n{body}",
    "two lengths": START + b"Content-Length: {length}\r\nContent-Length: 0\r\n\r\n{body}",
    "two lengths, the same": START + b"Content-Length: {length}\r\n" * 2 + b"\r\n{body}",
    "length 2^63": START + b"Content-Length: 9223372036854775808\r\n\r\n{body}",
    "length 2^64": START + b"Content-Length: 18446744073709551617\r\n\r\n{body}",
    "length of thousands of digits": START + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "length and chunks": START
    + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    + CHUNKED,
    "chunks and length": START
    + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n"
    + CHUNKED,
    "chunks": START + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "chunks in disguise": START + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKED,
    "chunks after a tab": START + b"Transfer-Encoding:\tchunked\r\n\r\n" + CHUNKED,
    "chunks twice": START + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n" + CHUNKED,
    "chunks and identity": START + b"Transfer-Encoding: identity, chunked\r\n\r\n" + CHUNKED,
    "bad chunks": START + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "a chunk of -1": START + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
    "endless extension of a chunk": START + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"a" * 20000,
    "promises": START + b"Expect: 100-continue\r\nContent-Length: {length}\r\n\r\n{body}",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200 + b"\r\n",
    "zeros": b"\x00" * 20000,
    "ones": b"\xff" * 20000,
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "SMTP": b"EHLO evil.example\r\nMAIL FROM:<a@b>\r\n\r\n",
    "redis": b"*1\r\n$8\r\nFLUSHALL\r\n\r\n",
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_what_is_malformed_is_refused_at_once_without_being_repeated(target, kind):
    answer = target.raw(fill(target, MALFORMED[kind]))
    assert 400 <= answer.status < 500, answer.raw[:300]
    assert answer.headers["connection"] == "close"
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert list(answer.json) == ["error"]
    for secret in (*target.tokens.values(), "evil.example", "aiohttp", "Python"):
        assert secret.encode() not in answer.raw
    assert answer.raw.count(b"HTTP/1.1 ") == 1


OVERSIZED = {
    "a path": (b"GET /" + b"a" * MOST_LINE_BYTES + b" HTTP/1.1\r\n" + AUTH + b"\r\n", 414),
    "an endless path": (b"GET /" + b"a" * 500_000, 414),
    "a query": (b"GET /jobs?" + b"a" * 10_000 + b" HTTP/1.1\r\n" + AUTH + b"\r\n", 414),
    "a header": (START + b"X: " + b"a" * MOST_LINE_BYTES + b"\r\n\r\n", 431),
    "a header's name": (START + b"X" * 9000 + b": a\r\n\r\n", 431),
    "many headers": (
        START + b"".join(b"X-%d: a\r\n" % i for i in range(MOST_HEADERS)) + b"\r\n",
        431,
    ),
    "endless headers": (START + b"X: aaaaaaaaaaaaaaaa\r\n" * 50_000, 431),
    "much of little": (START + b"".join(b"X-%d: %s\r\n" % (i, b"a" * 4000) for i in range(9)), 431),
    "a body": (
        START
        + b"Content-Length: %d\r\n\r\n" % (MOST_BODY_BYTES + 1)
        + b" " * (MOST_BODY_BYTES + 1),
        413,
    ),
    "a body that is announced": (START + b"Content-Length: 999999999999\r\n\r\n", 413),
    "a body of megabytes": (START + b"Content-Length: 3000000\r\n\r\n" + b" " * 3_000_000, 413),
}


@pytest.mark.parametrize("kind", OVERSIZED)
def test_what_is_too_large_is_refused_with_the_limit(target, kind):
    request, status = OVERSIZED[kind]
    before = target.look()["rss_bytes"]
    answer = target.raw(fill(target, request))
    assert answer.status == status, answer.raw[:300]
    assert target.look()["rss_bytes"] - before < 5 << 20


def test_the_largest_allowed_is_taken(target):
    padding = b" " * (MOST_BODY_BYTES - len(target.command("status")))
    body = target.command("status") + padding
    answer = target.ask("POST", target.control_path, target.tokens["control"], body)
    assert answer.status == 200
    assert len(target.take()) == 1


@pytest.mark.parametrize(
    "first",
    [
        b"GET /jobs HTTP/1.1\r\nHost: {host}\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: {host}\r\nConnection: keep-alive\r\n\r\n",
        b"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 3\r\n\r\nabc",
        b"GET /healthz HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n",
        b"BREW / HTTP/1.1\r\nHost: {host}\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: {host}\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
        b"\r\n",
    ],
)
def test_nothing_hides_behind_another_request(target, first):
    """Not even with the right token: on a connection there is one request, and one answer."""
    second = START + b"Content-Length: {length}\r\n\r\n{body}"
    for times in (1, 500):
        answer = target.raw(fill(target, first + second * times))
        assert answer.raw.count(b"HTTP/1.1 ") == 1, answer.raw[:500]
        assert answer.headers["connection"] == "close"
    with target.connect() as mine:  # also when it comes later
        mine.sendall(fill(target, first))
        received = mine.recv(65536)
        with contextlib.suppress(ConnectionError):
            mine.sendall(fill(target, second))
            while block := mine.recv(65536):
                received += block
    assert received.count(b"HTTP/1.1 ") == 1


def test_a_body_is_not_taken_for_a_request(target):
    inner = fill(target, START + b"Content-Length: {length}\r\n\r\n{body}")
    answer = target.ask("POST", target.control_path, target.tokens["control"], inner)
    assert answer.status == 400 and answer.raw.count(b"HTTP/1.1 ") == 1
    answer = target.ask("GET", "/healthz", None, inner)
    assert answer.status == 200 and answer.raw.count(b"HTTP/1.1 ") == 1


def test_a_request_in_pieces_is_whole_in_the_end(target):
    body = target.command("status")
    request = fill(target, START) + b"Content-Length: %d\r\n\r\n" % len(body) + body
    for cuts in ((1,), (5, 40, 41), (len(request) - 1,), (len(request) - len(body),)):
        with target.connect() as mine:
            mine.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for begin, end in zip((0, *cuts), (*cuts, len(request))):
                mine.sendall(request[begin:end])
            assert mine.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert len(target.take()) == 1


TRAVERSALS = [
    "/../../../etc/passwd",
    "/jobs/../../../etc/passwd",
    "/jobs/..%2f..%2f..%2fetc%2fpasswd",
    "/jobs/%2e%2e/%2e%2e/etc/passwd",
    "/%252e%252e/%252e%252e/etc/passwd",
    "/%252e%252e%252fetc%252fpasswd",
    "/..%c0%af..%c0%afetc/passwd",
    "/..%5c..%5cetc%5cpasswd",
    "/..\\..\\etc\\passwd",
    "//etc/passwd",
    "/%2fetc/passwd",
    "/etc/passwd%00.html",
    "/%00",
    "/.%00./etc/passwd",
    "/....//....//etc/passwd",
    "/jobs/{job}/commands/../../../../etc/passwd",
    "/jobs/{job}/commands/..%2f..%2ftoken",
    "/jobs/{job}/commands/%2e%2e%2ftoken",
    "/jobs/{job}/commands/%252e%252e%252ftoken",
    "/jobs/{job}/token",
    "/jobs/{job}/endpoint.json",
    "/jobs/{job}/../{job}/token",
    "/token",
    "/%ff%fe",
    "/jobs/{job}/commands/%ed%a0%80",
    "/?/../../etc/passwd",
]


def test_no_path_leads_out(target):
    prefixes = {""}
    for method, path, _ in target.routes:
        if method == "GET":
            fixed = path.partition("{")[0]
            prefixes |= {fixed.rstrip("/"), fixed.rpartition("/")[0]}
    for prefix in sorted(prefixes):
        for path in TRAVERSALS:
            path = prefix + path.format(job=target.job_id)
            answer = target.ask("GET", path, target.tokens["control"])
            if answer.status == 200:  # what a `?` makes of it: the route itself
                assert "?" in path or answer.headers["content-type"].startswith("text/html"), path
            else:
                assert answer.status in (400, 404, 405), (path, answer.raw[:200])
            for secret in (b"root:", *(token.encode() for token in target.tokens.values())):
                assert secret not in answer.raw, path


def test_a_challenge_of_any_characters_is_an_answer(target):
    for text in ("%ed%a0%80" * 16, "%ff" * 16, "%00" * 16, "x" * 129, "x", "é" * 16):
        answer = target.ask("GET", f"/healthz?challenge={text}")
        assert answer.status in (200, 400), (text, answer.raw)


def test_heads_are_split_as_they_were_meant():
    head, length = split_head(b"POST /a?b HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\nA:  b ")
    assert head == b"POST /a?b HTTP/1.1\r\nHost: x\r\nA:  b \r\nConnection: close\r\n\r\n"
    assert length == 0
    assert split_head(b"POST / HTTP/1.0\r\ncontent-LENGTH: 7\r\nhost:")[1] == 7
    with pytest.raises(BadRequest, match="host was sent twice"):
        split_head(b"GET / HTTP/1.1\r\nHost: x\r\nHOST: x")
    assert MOST_HEAD_BYTES > MOST_LINE_BYTES
