"""Sockets of a server in a training process: accepted slowly, limited in number and in patience.

Owns: the listening socket, the pace at which connections are taken, and closing those that do
not get to the point. Does not own: what is said on them (server.py).

The interpreter that answers is the one that trains. A flood therefore has to wait in the system's
queue: a connection that is not accepted costs training nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headway.control.gate import Gate
from headway.errors import ConfigError

MOST_CONNECTIONS = 128
ACCEPTS_PER_S = 10.0
"""Of connections that come to nothing; a request that passes the guard does not count."""
ACCEPT_BURST = 1200
PATIENCE_S = 10.0
"""For a connection to bring a whole request."""
_BACKLOG = 32
_SWEEP_S = 1.0
_ROOM_S = 0.05
_DRAIN_LOOK_S = 0.02
_MOST_ARRIVING = 64


class Bucket:
    """Tokens that come at a rate, up to a burst; who finds none has to wait."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s, self._burst = per_s, burst
        self._level, self._at = float(burst), time.monotonic()

    def take(self) -> float:
        """Take one; returns how long to wait before using it."""
        now = time.monotonic()
        self._level = min(self._burst, self._level + (now - self._at) * self._per_s) - 1
        self._at = now
        return max(0.0, -self._level / self._per_s)

    def give_back(self) -> None:
        """One was taken for nothing."""
        self._level += 1


class Connections:
    """The connections of one server: how old they are, and which of them are at work."""

    def __init__(self) -> None:
        self.accepts = Bucket(ACCEPTS_PER_S, ACCEPT_BURST)
        self._idle_since: dict[asyncio.BaseTransport, float] = {}
        self._busy: set[asyncio.BaseTransport] = set()

    def __len__(self) -> int:
        return len(self._idle_since)

    def add(self, transport: asyncio.BaseTransport) -> None:
        self._idle_since[transport] = time.monotonic()

    def begin(self, transport: asyncio.BaseTransport | None) -> None:
        """A whole request has come on it."""
        if transport is not None and transport in self._idle_since:
            self._busy.add(transport)

    def welcome(self) -> None:
        """A request was allowed: its connection is none of those that are kept few."""
        self.accepts.give_back()

    def end(self, transport: asyncio.BaseTransport | None) -> None:
        """The request was answered."""
        if transport is not None and transport in self._busy:
            self._busy.discard(transport)
            self._idle_since[transport] = time.monotonic()

    def make_room(self, most: int) -> bool:
        """Have fewer than `most`, if closing those that have brought nothing yet can do that."""
        if len(self._idle_since) >= most:
            self.sweep(PATIENCE_S, most - 1)
        return len(self._idle_since) < most

    def sweep(self, patience_s: float, most: int) -> None:
        """Close what has come to nothing; the oldest if there are many. Also what is being closed
        already: that takes as long as somebody likes who does not read the rest."""
        idle = [t for t in self._idle_since if t not in self._busy]
        too_many = len(self._idle_since) - most
        late = time.monotonic() - patience_s
        for number, transport in enumerate(idle):  # in the order in which they came
            if number < too_many or self._idle_since[transport] < late:
                abort = getattr(transport, "abort", transport.close)
                abort()
                self.remove(transport)

    def remove(self, transport: asyncio.BaseTransport) -> None:
        """It is closed."""
        self._idle_since.pop(transport, None)
        self._busy.discard(transport)

    async def drain(self, limit_s: float) -> None:
        """Wait for the answers that are under way; streams among them say their last."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and any(not t.is_closing() for t in self._busy):
            await asyncio.sleep(_DRAIN_LOOK_S)

    def close(self) -> None:
        for transport in list(self._idle_since):
            transport.close()


class Listener:
    """Accepts connections for a protocol, at its own pace."""

    def __init__(
        self,
        listening: socket.socket,
        tls: ssl.SSLContext | None = None,
        larger_bodies: Mapping[str, int] | None = None,
        most_connections: int = MOST_CONNECTIONS,
    ) -> None:
        self.connections = Connections()
        self._most = most_connections
        self._socket, self._tls, self._larger = listening, tls, larger_bodies
        self._place = _find_place(listening)
        self._tasks: list[asyncio.Task[None]] = []
        self._arriving: dict[asyncio.Task[None], None] = {}
        """Connections that are not there yet: with TLS, their handshake is under way."""

    def start(self, make_protocol: Callable[[], Any]) -> None:
        self._socket.setblocking(False)
        self._tasks = [
            asyncio.create_task(self._accept(make_protocol)),
            asyncio.create_task(self._sweep()),
        ]

    async def _accept(self, make_protocol: Callable[[], Any]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._socket)
            except OSError:
                # No descriptors left, or the peer was gone already: neither ends the server.
                await asyncio.sleep(_SWEEP_S)
                continue
            try:
                while not self.connections.make_room(self._most - len(self._arriving)):
                    await asyncio.sleep(_ROOM_S)
            except asyncio.CancelledError:
                accepted.close()
                raise
            if len(self._arriving) >= _MOST_ARRIVING:
                oldest = next(iter(self._arriving))
                del self._arriving[oldest]
                oldest.cancel()
            task = asyncio.create_task(self._serve(make_protocol, accepted))
            self._arriving[task] = None
            task.add_done_callback(lambda done: self._arriving.pop(done, None))
            await asyncio.sleep(self.connections.accepts.take())

    async def _serve(self, make_protocol: Callable[[], Any], accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await loop.connect_accepted_socket(
                    lambda: Gate(make_protocol, self.connections, self._larger),
                    accepted,
                    ssl=self._tls,
                )
        except (OSError, TimeoutError, ssl.SSLError):
            accepted.close()
        except asyncio.CancelledError:
            accepted.close()
            raise

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.connections.sweep(PATIENCE_S, self._most)

    async def stop(self) -> None:
        """Take no more connections."""
        tasks = [*self._tasks, *self._arriving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._place is not None and self._place == _find_place(self._socket):
            os.unlink(self._place[0])
        self._socket.close()


def bind_tcp(host: str, port: int) -> socket.socket:
    """Listen on an address; port 0 is one that is free."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"host={host!r} is no address of this machine: {error}") from None
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
    return listening


def bind_unix(path: str) -> socket.socket:
    """Listen on a Unix socket that only this user can open."""
    place = Path(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(place).st_mode) and not _answers(path):
                place.unlink()
        listening.bind(path)
        os.chmod(path, 0o600)  # nobody can connect before `listen`
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"unix_socket={path!r}: cannot listen there: {error}") from None
    return listening


def _find_place(listening: socket.socket) -> tuple[str, int] | None:
    """A Unix socket's path, and what tells it from another that was put there since."""
    if listening.family != socket.AF_UNIX:
        return None
    path = str(listening.getsockname())
    try:
        return path, os.lstat(path).st_ino
    except OSError:
        return None


def _answers(path: str) -> bool:
    """Whether somebody listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
