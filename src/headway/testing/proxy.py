"""A TCP proxy that treats connections badly, on purpose.

Owns: what can happen to bytes between two ends that both work: they come late, twice, changed, in
part or not at all. Does not own: the ends.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

_READ_BYTES = 1 << 16
_CONNECT_S = 5.0

Direction = Literal["request", "reply"]


@dataclass(frozen=True)
class Fault:
    """What happens to one connection; the default is nothing.

    `after_bytes` counts the bytes of `direction` that get through before it is reset (`reset`),
    closed as if all had been said (`truncate`), or one bit of the next one is changed (`corrupt`).
    """

    kind: Literal["none", "reset", "truncate", "corrupt", "lose_reply", "duplicate", "refuse"] = (
        "none"
    )
    """`lose_reply`: the request arrives whole, the answer is made and thrown away. `duplicate`: the
    whole request arrives a second time, on a connection of its own, before the answer is given.
    `refuse`: the connection is reset before anything is said."""
    direction: Direction = "request"
    after_bytes: int = 0
    delay_s: float = 0.0
    """How late every piece comes, in both directions."""
    bytes_per_s: float | None = None


class Proxy:
    """Listens on a free port of this machine and passes on to `target` (host:port).

    `with Proxy(target) as proxy: client = connect(proxy.address)`. Faults are chosen by `plan`,
    which is given the number of the connection, or queued with `next`.
    """

    def __init__(self, target: str, plan: Callable[[int], Fault | None] | None = None) -> None:
        self.target, self.plan = target, plan
        self.num_connections = self.num_faulted = 0
        self._queue: list[Fault] = []
        self._lock = threading.Lock()
        self._flows = threading.Event()
        self._flows.set()
        self._closed = threading.Event()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="headway-proxy", daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- what is wanted ---------------------------------------------------------------------

    def next(self, faults: Iterable[Fault]) -> None:
        """What happens to the next connections, one each, before `plan` is asked again."""
        with self._lock:
            self._queue += faults

    def partition(self) -> None:
        """From now on nothing gets through, and nothing says so, until `heal`."""
        self._flows.clear()

    def heal(self) -> None:
        """Everything gets through again; connections of before the partition are gone."""
        self._drop_all()
        self._flows.set()

    @contextlib.contextmanager
    def partitioned(self) -> Iterator[None]:
        """A partition for as long as this lasts."""
        self.partition()
        try:
            yield
        finally:
            self.heal()

    def close(self) -> None:
        """End, with all connections."""
        self._closed.set()
        self._flows.set()
        self._listener.close()
        self._drop_all()

    # -- connections ------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            fault = self._choose()
            threading.Thread(
                target=self._serve, args=(client, fault), name="headway-proxy", daemon=True
            ).start()

    def _choose(self) -> Fault:
        with self._lock:
            number = self.num_connections
            self.num_connections += 1
            chosen = self._queue.pop(0) if self._queue else self.plan and self.plan(number)
            if not chosen:
                return Fault()
            self.num_faulted += chosen != Fault()
            return chosen

    def _serve(self, client: socket.socket, fault: Fault) -> None:
        with self._kept(client):
            if fault.kind == "refuse":
                _reset(client)
                return
            if not self._wait_for_flow():
                return
            host, _, port = self.target.rpartition(":")
            try:
                server = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)
            except OSError:
                _reset(client)
                return
            server.settimeout(None)
            with self._kept(server):
                _Pair(self, client, server, fault).run()

    @contextlib.contextmanager
    def _kept(self, one: socket.socket) -> Iterator[None]:
        with self._lock:
            self._open.add(one)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(one)
            one.close()

    def _drop_all(self) -> None:
        with self._lock:
            connections = list(self._open)
        for one in connections:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _wait_for_flow(self) -> bool:
        self._flows.wait()
        return not self._closed.is_set()

    def _pause(self, seconds: float) -> bool:
        return not self._closed.wait(seconds)


class _Pair:
    """A connection and the one behind it."""

    def __init__(
        self, proxy: Proxy, client: socket.socket, server: socket.socket, fault: Fault
    ) -> None:
        self._proxy, self._client, self._server, self._fault = proxy, client, server, fault
        self._request = bytearray()

    def run(self) -> None:
        other = threading.Thread(
            target=self._pump, args=("request",), name="headway-proxy", daemon=True
        )
        other.start()
        self._pump("reply")
        # An answer may come before all of a request; its end ends both.
        for one in (self._client, self._server):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        other.join()

    def _pump(self, direction: Direction) -> None:
        source, sink = (self._client, self._server)
        if direction == "reply":
            source, sink = sink, source
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(_READ_BYTES):
                if not self._proxy._wait_for_flow() or not self._delay(len(data)):
                    return
                if direction == "request":
                    self._request += data
                data, ends = self._spoil(direction, data, passed)
                sink.sendall(data)
                passed += len(data)
                if ends:
                    return
            if self._proxy._wait_for_flow():
                sink.shutdown(socket.SHUT_WR)

    def _delay(self, num_bytes: int) -> bool:
        seconds = self._fault.delay_s
        if self._fault.bytes_per_s:
            seconds += num_bytes / self._fault.bytes_per_s
        return seconds <= 0 or self._proxy._pause(seconds)

    def _spoil(self, direction: Direction, data: bytes, passed: int) -> tuple[bytes, bool]:
        """What is passed on of some bytes, and whether that is the end of it."""
        fault = self._fault
        if direction == "reply" and fault.kind == "lose_reply":
            _reset(self._client)
            return b"", True
        if direction == "reply" and fault.kind == "duplicate" and passed == 0:
            self._repeat()
        if direction != fault.direction or not passed <= fault.after_bytes < passed + len(data):
            return data, False
        place = fault.after_bytes - passed
        if fault.kind == "corrupt":
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], False
        if fault.kind == "reset":
            _reset(self._client)
            _reset(self._server)
            return b"", True
        if fault.kind == "truncate":
            return data[:place], True
        return data, False

    def _repeat(self) -> None:
        """The same request once more; its answer is read and forgotten."""
        host, port = self._server.getpeername()[:2]
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, port), _CONNECT_S) as again,
        ):
            again.sendall(bytes(self._request))
            while again.recv(_READ_BYTES):
                pass


def _reset(one: socket.socket) -> None:
    """End a connection as a crash of the other machine's network would."""
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.shutdown(socket.SHUT_RD)
        one.close()
