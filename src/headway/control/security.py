"""Who may talk to a server of ours, and how much: tokens, roles, hosts, origins, limits.

Owns: the checks that a request passes before any handler sees it, and the headers of every answer.
Does not own: routes (server.py), nor sockets (listener.py).

Everything is refused that is not allowed here by name: a page of another site cannot reach a run
through its user's browser (Host, Origin, Sec-Fetch-Site, a token that no browser sends by itself),
and nobody else on the machine or the network without a token.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.control.schema import BadRequest

ROLES = ("public", "read", "control")
"""What a route asks for, each one more than the last; `public` shows nothing of a run."""
ANSWER_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "headway",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_LEAST_TOKEN_CHARACTERS = 16


def new_token() -> str:
    """256 random bits, as hexadecimal digits."""
    return secrets.token_hex(32)


def check_token(token: object) -> str | None:
    """Why something cannot be a token; None if it can."""
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        return "must be printable ASCII text"
    if " " in token or len(token) < _LEAST_TOKEN_CHARACTERS:
        return f"must be {_LEAST_TOKEN_CHARACTERS} characters or more without a space"
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def prove(nonce: str, challenge: str) -> str:
    """What only somebody who knows a job's nonce can answer to a challenge."""
    return hmac.new(nonce.encode(), challenge.encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Guard:
    """The rules of one server."""

    tokens: Mapping[str, str] = field(repr=False)
    """Role -> token. None at all: everybody who passes the other checks may do everything."""
    port: int | None
    """None: a Unix socket, which its folder protects."""
    extra_hosts: frozenset[str] = frozenset()
    """Names, beyond this machine's own, under which the server is reached (by way of a proxy)."""
    loopback: bool = True
    content_types: tuple[str, ...] = ("application/json",)
    """What a body may be sent as; none of those that a form of another site's page can send."""
    tls: bool = False
    """Whether the server speaks HTTPS: a Host without a port means another one then."""

    def check(self, method: str, headers: Mapping[str, str], needs: str, hosts: list[str]) -> None:
        """Pass a request or raise `BadRequest`. `hosts` is every Host header there is."""
        if len(hosts) != 1 or not self._is_own_host(hosts[0]):
            raise BadRequest(421, "this server does not answer to that Host")
        self._check_origin(headers, hosts[0])
        if method not in ("GET", "POST"):
            raise BadRequest(405, f"the method {method[:16]!r} is not used here")
        if needs != "public":
            self._check_token(headers.get("Authorization"), needs)
        if method == "POST":
            kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if kind not in self.content_types:
                allowed = " or ".join(self.content_types)
                raise BadRequest(415, f"the body must be sent as {allowed}")
        if headers.get("Content-Encoding"):
            raise BadRequest(415, "bodies are taken as they are, without Content-Encoding")

    def _is_own_host(self, given: str) -> bool:
        if given in self.extra_hosts:
            return True
        name, port = _split_host(given, 443 if self.tls else 80)
        if name in ("localhost", "127.0.0.1", "::1"):
            return port >= 0  # a tunnel to this machine may begin at any port
        if self.port is None or self.loopback or port != self.port:
            return False
        # No page of another site can have an address of numbers, or this machine's name.
        return _is_address(name) or name in _own_names()

    def _check_origin(self, headers: Mapping[str, str], host: str) -> None:
        origin = headers.get("Origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            raise BadRequest(403, "requests of other sites' pages are refused")
        site = headers.get("Sec-Fetch-Site")
        if site is not None and site not in ("same-origin", "none"):
            raise BadRequest(403, "requests of other sites' pages are refused")

    def _check_token(self, given: str | None, needs: str) -> None:
        if not self.tokens:
            return
        word, _, token = (given or "").partition(" ")
        role = None
        if word.lower() == "bearer":
            for candidate, known in self.tokens.items():
                # As bytes: text that is not ASCII cannot be compared in constant time.
                if hmac.compare_digest(token.strip().encode("utf-8", "replace"), known.encode()):
                    role = candidate
        if role is None:
            raise BadRequest(401, "authentication required")
        if ROLES.index(role) < ROLES.index(needs):
            raise BadRequest(403, "this token may only read")


def _split_host(given: str, usual_port: int) -> tuple[str, int]:
    """'[::1]:8900' -> ('::1', 8900); a port that is no number makes it nobody's."""
    given = given.strip().lower()
    if given.startswith("["):
        name, closed, rest = given[1:].partition("]")
        port = rest.removeprefix(":") if rest.startswith(":") or (closed and not rest) else "x"
    else:
        name, colon, port = given.partition(":")
        port = port if colon else ""
    if not port:
        return name, usual_port
    return name, int(port) if port.isascii() and port.isdigit() and len(port) < 6 else -1


@functools.cache
def _own_names() -> tuple[str, str]:
    """Asked once: the answer may come from far away, and any stranger could have it asked."""
    return socket.gethostname().lower(), socket.getfqdn().lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
