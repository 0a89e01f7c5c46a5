"""A process with torch imported that forks a child for every trial.

Owns: starting the server, one child at a time, its end however it comes. Does not own: what a
child does or who kills it.

A fork costs milliseconds where a fresh interpreter pays seconds for its imports. The server has
a single thread and never runs a trial itself, so a child starts from a clean state.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_PRELOAD = ("torch", "headway.trainers.trainer", "headway.testing.trainer")


class ForkServer:
    """Runs functions, named `module:function`, in forked children, one at a time.

    Arguments are JSON. What a child writes to its output and error streams goes to `log`.
    """

    def __init__(self, *, preload: Sequence[str] = _PRELOAD, log: str | Path = os.devnull) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__, str(log), *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            text=True,
        )
        self._child: int | None = None
        self._receive()  # it has imported everything

    def start(self, function: str, **arguments: Any) -> int:
        """Fork a child that calls the function; returns its process id."""
        assert self._child is None, "one child at a time"
        self._send({"function": function, "arguments": arguments})
        self._child = int(self._receive()["pid"])
        return self._child

    def kill(self) -> None:
        """SIGKILL to the child, which may have ended already."""
        assert self._child is not None
        # The server has not reaped it yet, so its id cannot be another's.
        self._send({"kill": self._child})

    def wait(self) -> int:
        """Wait for the end of the child: its exit code, or the negative of its signal."""
        assert self._child is not None
        self._child = None
        return int(self._receive()["ended"])

    def _send(self, message: dict[str, Any]) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(message) + "\n")
        self._server.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(f"the fork server ended with code {self._server.wait()}")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """End the server and a child that is still there."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        assert self._server.stdout is not None
        self._server.stdout.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _answer(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _run_child(request: dict[str, Any], log: str) -> None:
    code = 1
    try:
        # Not in a group of the terminal: only the one who asked for a child ends it.
        os.setpgid(0, 0)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        module, _, name = request["function"].partition(":")
        getattr(importlib.import_module(module), name)(**request["arguments"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(log: str, preload: Sequence[str]) -> None:
    import select

    for module in preload:
        importlib.import_module(module)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    # A byte arrives whenever a child ends, so that one wait covers requests and ends.
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _answer({"ready": True})
    child: int | None = None
    pending = b""
    while True:
        ready, _, _ = select.select([0, read_end], [], [])
        if read_end in ready:
            os.read(read_end, 64)
            if child is not None:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    child = None
                    _answer({"ended": os.waitstatus_to_exitcode(status)})
        if 0 not in ready:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            if child is not None:
                os.kill(child, signal.SIGKILL)
            return
        pending += data
        *lines, pending = pending.split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "kill" in request:
                if child is not None and child == request["kill"]:
                    os.kill(child, signal.SIGKILL)
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run_child(request, log)
            child = pid
            _answer({"pid": pid})


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
