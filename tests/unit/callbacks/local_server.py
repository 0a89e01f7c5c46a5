"""A web server on this machine that answers as a test wants it to and keeps what it got."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Got:
    """A request."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class LocalServer:
    url: str
    got: list[Got] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)
    """Set by a test to let a hung answer go."""


Answer = Callable[[int], "tuple[int, dict[str, str]] | None"]
"""From the number of the request (from 0) to status and headers; None hangs until released."""


@contextmanager
def local_server(answer: Answer = lambda number: (200, {})) -> Iterator[LocalServer]:
    known = LocalServer("")
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                number = len(known.got)
                known.got.append(Got(self.path, dict(self.headers.items()), body))
            given = answer(number)
            if given is None:
                known.release.wait(30)
                return
            status, headers = given
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    known.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield known
    finally:
        known.release.set()
        server.shutdown()
        thread.join()
        server.server_close()
