"""A process with torch imported that forks a child for every trial.

Owns: starting the server, its children, their ends however they come. Does not own: what a
child does or who kills it.

A fork costs milliseconds where a fresh interpreter pays seconds for its imports. The server has
a single thread and never runs a trial itself, so a child starts from a clean state.
"""

from __future__ import annotations

import importlib
import json
import os
import select
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
    """Runs functions, named `module:function`, in forked children, any number at a time.

    Arguments are JSON. What a child writes to its output and error streams goes to `log`.
    """

    def __init__(self, *, preload: Sequence[str] = _PRELOAD, log: str | Path = os.devnull) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__, str(log), *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            bufsize=0,
        )
        self._running: list[int] = []
        self._ended: dict[int, int] = {}
        self._unread = b""
        self._answers: list[dict[str, int]] = []
        self._receive()  # it has imported everything

    def start(self, function: str, **arguments: Any) -> int:
        """Fork a child that calls the function; returns its process id."""
        self._send({"function": function, "arguments": arguments})
        pid = self._receive()["started"]
        self._running.append(pid)
        return pid

    def kill(self, pid: int | None = None, number: int = signal.SIGKILL) -> None:
        """A signal, SIGKILL unless given, to a child (None: the only one); it may have ended."""
        # The server tells of an end when it reaps the child; until then its id is no other's.
        self._send({"kill": self._only() if pid is None else pid, "signal": number})

    def wait(self, pid: int | None = None) -> int:
        """Wait for a child (None: the only one): its exit code, or the negative of its signal."""
        child = self._only() if pid is None else pid
        while child not in self._ended:
            self._read()
        self._running.remove(child)
        return self._ended.pop(child)

    def wait_any(self, limit_s: float) -> set[int]:
        """The children that have ended, so that `wait` returns at once; waits for one if none."""
        assert self._server.stdout is not None
        if not self._ended and select.select([self._server.stdout], [], [], limit_s)[0]:
            self._read()
        return set(self._ended)

    def _only(self) -> int:
        (child,) = self._running
        return child

    def _send(self, message: dict[str, Any]) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(message).encode() + b"\n")

    def _read(self) -> None:
        assert self._server.stdout is not None
        data = os.read(self._server.stdout.fileno(), 1 << 16)
        if not data:
            raise RuntimeError(f"the fork server ended with code {self._server.wait()}")
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "ended" in message:
                self._ended[message["pid"]] = message["ended"]
            else:
                self._answers.append(message)

    def _receive(self) -> dict[str, int]:
        while not self._answers:
            self._read()
        return self._answers.pop(0)

    def close(self) -> None:
        """End the server and the children that are still there."""
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
    children: set[int] = set()
    pending = b""
    while True:
        ready, _, _ = select.select([0, read_end], [], [])
        if read_end in ready:
            os.read(read_end, 64)
            for child in list(children):
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    children.remove(child)
                    _answer({"ended": os.waitstatus_to_exitcode(status), "pid": child})
        if 0 not in ready:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            for child in children:
                os.kill(child, signal.SIGKILL)
            return
        pending += data
        *lines, pending = pending.split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "kill" in request:
                if request["kill"] in children:
                    os.kill(request["kill"], request["signal"])
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run_child(request, log)
            children.add(pid)
            _answer({"started": pid})


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
