"""Who a worker is: tokens of single workers and of all, and the guard that knows them.

Owns: token files, the guard of a DiLoCo server. Does not own: the other rules of requests
(control/security.py), sessions (rounds.py).
"""

from __future__ import annotations

import hmac
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headway.control.schema import BadRequest
from headway.control.security import Guard, check_token, new_token
from headway.diloco.rounds import WORKER_ID
from headway.diloco.wire import CONTENT_TYPE
from headway.errors import ConfigError

ROLES = ("join", "read")
"""Names in a token file that are nobody's: the token of all workers, the one that only reads."""


@dataclass(frozen=True)
class Tokens:
    """Whom the server lets in; all empty: everybody on this machine."""

    workers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Each worker's own."""
    join: str | None = field(default=None, repr=False)
    read: str | None = field(default=None, repr=False)

    def __bool__(self) -> bool:
        return bool(self.workers or self.join)


def read_tokens(path: str | Path) -> Tokens:
    """A file of lines `name token`; a line with a token alone is that of all workers."""
    place = Path(path)
    try:
        mode = place.stat().st_mode
        lines = place.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file={str(path)!r} cannot be read: {error}") from None
    if mode & 0o077:
        raise ConfigError(
            f"token_file={str(path)!r} can be read by others (mode {mode & 0o777:o}); allowed: 600"
        )
    named: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, token = ("join", words[0]) if len(words) == 1 else (words[0], words[-1])
        where = f"token_file={str(path)!r}, line {number}"
        if len(words) > 2 or not WORKER_ID.fullmatch(name):
            raise ConfigError(f"{where}: a line is a token, or a worker's id and its token")
        if problem := check_token(token):
            raise ConfigError(f"{where}: a token {problem}")
        if name in named or token in named.values():
            raise ConfigError(f"{where}: the name or the token is there already")
        named[name] = token
    workers = {name: token for name, token in named.items() if name not in ROLES}
    if not workers and "join" not in named:
        raise ConfigError(f"token_file={str(path)!r} has no token for a worker")
    return Tokens(workers, named.get("join"), named.get("read"))


def choose_tokens(
    token: str | None, token_file: str | Path | None, disable_auth: bool
) -> Tokens | None:
    """The tokens that the options stand for; None: one is made and kept in the server's folder."""
    options = {"token": token, "token_file": token_file, "disable_auth": disable_auth}
    given = [name for name, value in options.items() if value]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: allowed is one of them")
    if token_file is not None:
        return read_tokens(token_file)
    if token is None:
        return None
    if problem := check_token(token):
        raise ConfigError(f"token: it {problem}")
    return Tokens(join=token)


def keep_token(path: Path) -> str:
    """The token in a file of this user's, which is made if it is not there."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        found = read_tokens(path).join
        if found is None:
            raise ConfigError(f"{path} holds no token for all workers") from None
        return found
    token = new_token()
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return token


def make_tls(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """What the server shows of itself, from its files."""
    if certificate is None:
        if key is not None:
            raise ConfigError(f"tls_key={key!r} needs tls_cert beside it")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A key with a passphrase is refused: asking for it would hold a server that nobody sees.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"tls_cert={certificate!r}, tls_key={key!r}: not a certificate and its key (without a "
            f"passphrase): {error}"
        ) from None
    return context


@dataclass(frozen=True)
class WorkerGuard(Guard):
    """The rules of a DiLoCo server, which is reached through tunnels and proxies of any name."""

    known: Tokens = field(default_factory=Tokens, repr=False)
    content_types: tuple[str, ...] = ("application/json", CONTENT_TYPE)

    def _is_own_host(self, given: str) -> bool:
        # A page of another site that reaches this server under its own name has no token.
        return bool(self.known) or super()._is_own_host(given)

    def _check_token(self, given: str | None, needs: str) -> None:
        if not self.known or self.identify(given) is not None:
            return
        if self.known.read is not None and _is_token(given, self.known.read):
            if needs != "read":
                raise BadRequest(403, "this token may only read", reason="unauthorized")
            return
        raise BadRequest(401, "authentication required", reason="unauthorized")

    def identify(self, given: str | None) -> str | None:
        """The worker whose token was sent; "" for the token of all; None for no worker's."""
        found = None
        for name, token in [*self.known.workers.items(), ("", self.known.join)]:
            if token is not None and _is_token(given, token):
                found = name
        return found

    def check_worker(self, given: str | None, worker_id: str) -> None:
        """Refuse somebody who speaks for another worker."""
        if not self.known:
            return
        found = self.identify(given)
        own = self.known.workers.get(worker_id)
        if found is None or ((found or own is not None) and found != worker_id):
            raise BadRequest(403, "that is another worker's id", reason="unauthorized")


def _is_token(given: str | None, token: str) -> bool:
    word, _, said = (given or "").partition(" ")
    # As bytes: text that is not ASCII cannot be compared in constant time.
    same = hmac.compare_digest(said.strip().encode("utf-8", "replace"), token.encode())
    return same and word.lower() == "bearer"
