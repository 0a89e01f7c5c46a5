"""Requests to break a control server with: valid ones, mutated by grammar and by byte, and garbage.

Owns: making the request of a number, always the same for the same seed, and what may come of it.
Does not own: sending it (control_fuzz.py).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.control.schema import COMMANDS

ALLOWED, FORBIDDEN = "authorised", "prohibited"
"""How the ids of commands begin that may, and that must not, reach the run; of one length."""


@dataclass(frozen=True)
class Facts:
    """What a request is made from: the server that is attacked."""

    host: str
    job_id: str
    run_id: str
    routes: Sequence[tuple[str, str, str]]
    tokens: dict[str, str]


@dataclass
class Request:
    """Bytes to send, how, and whether they may have an effect."""

    number: int
    data: bytes
    may_act: bool
    """Whether it has the right token and was not made to be refused."""
    must_succeed: bool = False
    how: str = "whole"
    """`whole`, `pieces`, `close` (without reading), `reset`."""


@dataclass
class _Draft:
    method: str
    path: str
    version: str
    headers: list[tuple[str, str]]
    body: bytes
    extra: bytes = b""

    def render(self) -> bytes:
        lines = [f"{self.method} {self.path} {self.version}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + self.body + self.extra

    def set(self, name: str, value: str) -> None:
        self.headers = [(n, v) for n, v in self.headers if n.lower() != name.lower()]
        self.headers.append((name, value))


@dataclass
class Maker:
    """Makes the requests of one seed."""

    facts: Facts
    seed: int
    _hostile: tuple[Callable[[random.Random, _Draft], None], ...] = field(init=False)

    def __post_init__(self) -> None:
        self._hostile = (
            self._rebind,
            self._cross_origin,
            self._as_form,
            self._other_method,
            self._doubled,
            self._smuggled,
            self._encoded,
            self._absolute,
        )

    def make(self, number: int) -> Request:
        """The request of a number."""
        chance = random.Random(f"{self.seed}-{number}")
        kind = chance.random()
        if kind < 0.12:
            return Request(number, _garbage(chance), may_act=False, how=_way(chance))
        role = chance.choice(("none", "wrong", "read", "control", "control"))
        if kind < 0.40:  # made to be refused, whatever token it has
            draft = self._draft(chance, number, role, FORBIDDEN)
            chance.choice(self._hostile)(chance, draft)
            return Request(number, draft.render(), may_act=False, how=_way(chance))
        may_act = role == "control"
        draft = self._draft(chance, number, role, ALLOWED if may_act else FORBIDDEN)
        if kind < 0.55:
            commands = draft.method == "POST" and draft.path.endswith("/control")
            return Request(number, draft.render(), may_act, must_succeed=may_act and commands)
        for _ in range(chance.randint(1, 3)):
            chance.choice(_MUTATIONS)(chance, draft)
        data = draft.render()
        for _ in range(chance.choice((0, 0, 1, 2, 8))):
            data = chance.choice(_BYTE_MUTATIONS)(chance, data)
        return Request(number, data, may_act, how=_way(chance))

    def _draft(self, chance: random.Random, number: int, role: str, tag: str) -> _Draft:
        """A valid request, but for its token; those that may act mostly do."""
        method, path, _ = chance.choice(self.facts.routes)
        if chance.random() < 0.6:
            method, path = "POST", f"/jobs/{self.facts.job_id}/control"
        path = path.replace("{run_id}", self.facts.run_id).replace("{name}", "x")
        path = path.replace("{command_id}", f"{tag}-{number}")
        if method == "GET" and path.endswith("/events"):
            path = path.replace("events", "status")  # a stream would not end
        headers = [("Host", self.facts.host)]
        token = self.facts.tokens.get(role, f"{chance.getrandbits(256):064x}")
        if role != "none":
            headers.append(("Authorization", f"Bearer {token}"))
        body = b""
        if method == "POST":
            body = json.dumps(_command(chance, f"{tag}-{number}")).encode()
            headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        return _Draft(method, path, "HTTP/1.1", headers, body)

    # -- what must be refused, whoever sends it --------------------------------------------------

    def _rebind(self, chance: random.Random, draft: _Draft) -> None:
        port = self.facts.host.rpartition(":")[2]
        names = ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "", "*")
        draft.set("Host", chance.choice((*names, f"localhost:{port}1", f"10.0.0.1:{port}")))

    def _cross_origin(self, chance: random.Random, draft: _Draft) -> None:
        if chance.random() < 0.5:
            draft.set("Sec-Fetch-Site", chance.choice(("cross-site", "same-site", "x")))
        else:
            origin = chance.choice(("http://evil.example", "null", "https://localhost"))
            draft.set(chance.choice(("Origin", "oRIGIN")), origin)

    def _as_form(self, chance: random.Random, draft: _Draft) -> None:
        draft.method = "POST"
        kinds = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "")
        draft.set("Content-Type", chance.choice(kinds))

    def _other_method(self, chance: random.Random, draft: _Draft) -> None:
        draft.method = chance.choice(("PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "get", "Post"))
        draft.set("X-HTTP-Method-Override", "POST")

    def _doubled(self, chance: random.Random, draft: _Draft) -> None:
        name, value = chance.choice(draft.headers)
        draft.headers.insert(chance.randint(0, len(draft.headers)), (name.swapcase(), value))

    def _smuggled(self, chance: random.Random, draft: _Draft) -> None:
        coding = chance.choice(("chunked", "identity, chunked", "xchunked", "\tchunked"))
        draft.headers.append(("Transfer-Encoding", coding))
        draft.body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(draft.body), draft.body)
        draft.extra = draft.render()

    def _encoded(self, chance: random.Random, draft: _Draft) -> None:
        draft.method = "POST"
        draft.set("Content-Encoding", chance.choice(("gzip", "deflate", "br", "zstd", "x")))

    def _absolute(self, chance: random.Random, draft: _Draft) -> None:
        start = chance.choice((f"http://{self.facts.host}", "http://evil.example", "file://", "*"))
        draft.path = start + draft.path


def _command(chance: random.Random, command_id: str) -> dict[str, Any]:
    name = chance.choice(list(COMMANDS))
    kind = COMMANDS[name]
    data: dict[str, Any] = {}
    for key in kind.exactly_one_of[:1]:
        wanted = kind.fields[key]
        data[key] = wanted.choices[0] if wanted.choices else 1
    return {"command": name, "id": command_id, "data": data}


# -- mutations that may leave a request valid ----------------------------------------------------

_ODD: tuple[str, ...] = (
    "",
    "\x00",
    "'",
    '"',
    "<script>alert(1)</script>",
    "../" * 8,
    "%2e%2e%2f",
    "%252e",
    "\xff",
)
_ODD += ("9" * 40, "-1", "NaN", "1e999", "null", "[]", "{" * 200, "a" * 5000, "\t", "%00", "%ff")


def _change_path(chance: random.Random, draft: _Draft) -> None:
    at = chance.randint(0, len(draft.path))
    draft.path = draft.path[:at] + chance.choice(_ODD) + draft.path[at:]


def _change_version(chance: random.Random, draft: _Draft) -> None:
    draft.version = chance.choice(("HTTP/1.0", "HTTP/0.9", "HTTP/2", "HTTP/1.1 ", "", "http/1.1"))


def _add_header(chance: random.Random, draft: _Draft) -> None:
    names = ("Expect", "Upgrade", "Range", "Content-Encoding", "Cookie", "Last-Event-ID", "X")
    draft.headers.append((chance.choice(names), chance.choice(_ODD)))


def _drop_header(chance: random.Random, draft: _Draft) -> None:
    if draft.headers:
        draft.headers.pop(chance.randrange(len(draft.headers)))


def _change_header(chance: random.Random, draft: _Draft) -> None:
    if draft.headers:
        at = chance.randrange(len(draft.headers))
        name, value = draft.headers[at]
        odd = chance.choice(_ODD)
        draft.headers[at] = (name + odd, value) if chance.random() < 0.3 else (name, value + odd)


def _fill_headers(chance: random.Random, draft: _Draft) -> None:
    number = chance.choice((10, 63, 64, 65, 200))
    draft.headers += [(f"X-{i}", "a" * chance.choice((1, 100))) for i in range(number)]


def _change_body(chance: random.Random, draft: _Draft) -> None:
    odd = chance.choice(_ODD).encode("latin-1", "replace")
    at = chance.randint(0, len(draft.body))
    draft.body = draft.body[:at] + odd + draft.body[at:]
    if chance.random() < 0.8:
        draft.set("Content-Length", str(len(draft.body)))


def _change_json(chance: random.Random, draft: _Draft) -> None:
    values: tuple[Any, ...] = (
        None,
        True,
        -1,
        1e308,
        10**400,
        "x" * 300,
        [],
        {},
        [[[[[[[[[[]]]]]]]]]],
    )
    try:
        said = json.loads(draft.body)
    except ValueError:
        return
    if not isinstance(said, dict):
        return
    where = chance.choice((said, said.get("data"), said))
    if isinstance(where, dict):
        key = chance.choice([*where, "other"])
        if key != "id":  # by it a command is known again
            where[key] = chance.choice(values)
    draft.body = json.dumps(said).encode()
    draft.set("Content-Length", str(len(draft.body)))


def _append(chance: random.Random, draft: _Draft) -> None:
    again = draft.render().replace(ALLOWED.encode(), FORBIDDEN.encode())
    draft.extra = again if chance.random() < 0.5 else _garbage(chance)


_MUTATIONS = (
    _change_path,
    _change_version,
    _add_header,
    _drop_header,
    _change_header,
    _fill_headers,
    _change_body,
    _change_json,
    _append,
)


def _flip(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data)) if data else 0
    return data[:at] + bytes([chance.getrandbits(8)]) + data[at + 1 :]


def _delete(chance: random.Random, data: bytes) -> bytes:
    at = chance.randint(0, len(data))
    return data[:at] + data[at + chance.choice((1, 1, 2, 20)) :]


def _insert(chance: random.Random, data: bytes) -> bytes:
    at = chance.randint(0, len(data))
    odd = chance.choice((b"\r\n", b"\n", b"\r", b"\x00", b" ", b":", b"\r\n\r\n", b"\xff" * 9))
    return data[:at] + odd + data[at:]


def _repeat(chance: random.Random, data: bytes) -> bytes:
    at, to = sorted((chance.randint(0, len(data)), chance.randint(0, len(data))))
    return data[:to] + data[at:to] * chance.choice((1, 1, 5)) + data[to:]


def _cut(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.randint(0, len(data))]


_BYTE_MUTATIONS = (_flip, _flip, _delete, _insert, _repeat, _cut)


def _garbage(chance: random.Random) -> bytes:
    length = chance.choice((0, 1, 10, 200, 3000, 30_000))
    kind = chance.random()
    if kind < 0.4:
        return chance.randbytes(length)
    if kind < 0.7:
        return bytes(chance.choices(b"GETPOS/ HTTP:.1\r\n\x00", k=length))
    start = chance.choice(
        (b"GET / HTTP/1.1\r\n", b"POST /", b"\x16\x03\x01", b"PRI * HTTP/2.0\r\n")
    )
    return start + chance.randbytes(length)


def _way(chance: random.Random) -> str:
    return chance.choices(("whole", "pieces", "close", "reset"), (90, 4, 3, 3))[0]
