"""A server and an environment for callbacks that talk to services."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def posted() -> Iterator[tuple[str, list[bytes]]]:
    """A server on this machine, and what it was sent."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        do_PUT = do_PATCH = do_POST

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="server-of-tests", daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", bodies
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No key, no server and no file of the user's is found by a tracker."""
    folder = tmp_path_factory.mktemp("offline")
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "COMET_API_KEY", "COMET_MODE",
            "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_SPACE_ID",
            "TRACKIO_SERVER_URL", "TRACKIO_PROJECT", "SLACK_WEBHOOK_URL", "HEADWAY_WEBHOOK_URL",
            "HEADWAY_WEBHOOK_SECRET", "BEAKER_JOB_ID", "BEAKER_EXPERIMENT_ID",
        ):  # fmt: skip
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(folder / "netrc"))
        patch.setenv("COMET_CONFIG", str(folder / "comet.config"))
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.setenv("HEADWAY_JOBS_DIR", str(folder / "jobs"))
        yield folder
