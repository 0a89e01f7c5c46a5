"""A control server in a process of its own, beside something like training, for tests of it.

Owns: the process, what it is asked over a pipe, and what it tells of itself. Does not own: the
server (control/), nor what is sent to it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_WAIT_S = 120.0


@dataclass(frozen=True)
class Options:
    """How the process is made."""

    root: str
    """The folder of jobs."""
    job_id: str = "job-1"
    log: str | None = None
    """A file for all that the process logs, from DEBUG on."""
    limited: bool = True
    """Whether the limits on connections and requests per second hold."""
    patience_s: float | None = None
    """How long a connection may take for its request; None: as long as in earnest."""
    num_descriptors: int | None = None
    torch: bool = False
    """Steps of a small model instead of steps in plain Python."""
    server: dict[str, Any] = field(default_factory=dict)
    """More arguments of `ControlServer`."""
    output_dir: str | None = None
    """A run's folder; with it, the dashboard is served as well."""


class ControlledProcess:
    """The parent's side. Methods ask the process, whose main thread answers between steps."""

    def __init__(self, options: Options) -> None:
        command = [sys.executable, "-m", __name__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid, self.job_id = self._process.pid, options.job_id
        try:
            said = self._ask(asdict(options))
        except BaseException:
            self._process.kill()
            raise
        self.port: int | None = said["port"]
        self.unix_socket: str | None = said["unix_socket"]
        self.routes = [(method, path, role) for method, path, role in said["routes"]]
        self.run_id: str | None = said["run_id"]
        self.tokens: dict[str, str] = said["tokens"]

    def _ask(self, value: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with {self._process.wait(_WAIT_S)}")
        return json.loads(line)

    def take(self) -> list[dict[str, Any]]:
        """The commands that have come to the run since it was last asked, all settled now."""
        taken: list[dict[str, Any]] = self._ask({"verb": "take"})
        return taken

    def look(self) -> dict[str, Any]:
        """`rss_bytes`, `num_descriptors`, `num_threads` and `can_open` (another file) now."""
        facts: dict[str, Any] = self._ask({"verb": "look"})
        return facts

    def publish(self, **values: Any) -> None:
        """Change the status that the run shows."""
        self._ask({"verb": "publish", "values": values})

    def begin_steps(self, seconds: float, core: int | None = None) -> Callable[[], dict[str, Any]]:
        """Have it train for a while; call what is returned for `steps`, `median_s`, `mean_s`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"verb": "train", "seconds": seconds, "core": core}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        output = self._process.stdout
        return lambda: json.loads(output.readline())

    def connect(self, timeout_s: float = 30.0) -> socket.socket:
        """A new connection to the server."""
        if self.unix_socket is not None:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.settimeout(timeout_s)
            made.connect(self.unix_socket)
            return made
        assert self.port is not None
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s)

    @property
    def host(self) -> str:
        """What a right Host header says."""
        return "localhost" if self.port is None else f"127.0.0.1:{self.port}"

    def end(self) -> int:
        """End the server, then the process; returns its exit code."""
        if self._process.poll() is None:
            self._ask({"verb": "end"})
        return self._process.wait(_WAIT_S)

    def kill(self) -> None:
        """No farewell."""
        self._process.kill()
        self._process.wait(_WAIT_S)

    def __enter__(self) -> ControlledProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


# -- the process ---------------------------------------------------------------------------------


def _change_limits(options: Options) -> None:
    from headway.control import listener
    from headway.control.server import ControlServer

    if not options.limited:
        listener.ACCEPTS_PER_S = ControlServer.requests_per_s = 1e9
    if options.patience_s is not None:
        listener.PATIENCE_S = options.patience_s


def _make_step(with_torch: bool) -> Callable[[], object]:
    if not with_torch:
        page = bytes(1 << 20)
        # Work that lets other threads run, as that of tensors does, and some that does not.
        return lambda: (hashlib.sha256(page).digest(), sum(range(10_000)))
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(256, 256)

    def step() -> object:
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


class _Run:
    """The process' side: a server, and the inbox as a training loop would use it."""

    def __init__(self, options: Options) -> None:
        from headway.control.discovery import Registration
        from headway.control.inbox import Inbox
        from headway.control.security import new_token
        from headway.control.server import ControlServer
        from headway.control.status import StatusBoard

        self.options = options
        self.board, self.inbox = StatusBoard(options.job_id), Inbox()
        self.tokens = {role: new_token() for role in ("control", "read")}
        self.registration = Registration(options.job_id, Path(options.root))
        self.registration.write_tokens(self.tokens)
        self.server = ControlServer(
            self.board,
            self.inbox,
            **{
                "nonce": self.registration.nonce,
                "tokens": self.tokens,
                "version": "1",
                **options.server,
            },
        )
        self.run_id = None if options.output_dir is None else self._mount(options.output_dir)
        self.server.start()
        self.registration.write_endpoint(
            self.server.host,
            self.server.port,
            self.server.unix_socket,
            output_dir=options.output_dir or "out",
            logging_dir=None,
            run_name=None,
            version="1",
        )
        self.step = _make_step(options.torch)
        self.taken: list[dict[str, Any]] = []
        self.num_steps = 0

    def _mount(self, output_dir: str) -> str:
        from headway.control.dashboard.mounted import mount
        from headway.control.dashboard.shelf import run_id_of

        mount(self.server, self.board, self.inbox, output_dir, None)
        return run_id_of(Path(output_dir).absolute())

    def describe(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "port": self.server.port,
            "unix_socket": self.server.unix_socket,
            "routes": [(method, path, role) for method, path, _, role in self.server.routes],
            "tokens": self.tokens,
        }

    def drain(self) -> None:
        for command in self.inbox.take():
            self.taken.append(command.to_dict())
            self.inbox.settle(command.id, "applied", self.num_steps)

    def take(self) -> list[dict[str, Any]]:
        self.drain()
        taken, self.taken = self.taken, []
        return taken

    def train(self, seconds: float, core: int | None) -> dict[str, Any]:
        """Steps until the time is over, each as a loop makes it: work, then look at the inbox."""
        if core is not None:
            os.sched_setaffinity(0, {core})
        times = []
        end = time.perf_counter() + seconds
        cpu = time.thread_time()
        now = time.perf_counter()
        while now < end:
            self.step()
            self.num_steps += 1
            if self.inbox.pending:
                self.drain()
            before, now = now, time.perf_counter()
            times.append(now - before)
        return {
            "steps": len(times),
            "median_s": statistics.median(times),
            "mean_s": statistics.fmean(times),
            "most_s": max(times),
            "cpu_s": time.thread_time() - cpu,
        }

    def answer(self, request: dict[str, Any]) -> Any:
        verb = request["verb"]
        if verb == "take":
            return self.take()
        if verb == "look":
            return _look()
        if verb == "publish":
            self.board.publish(**request["values"])
            self.board.announce("log", **request["values"])
            return None
        if verb == "train":
            return self.train(request["seconds"], request["core"])
        assert verb == "end", verb
        stopped = self.server.stop()
        self.registration.remove()
        return stopped


def _look() -> dict[str, Any]:
    status = Path("/proc/self/status").read_text()
    facts = dict(line.split(":", 1) for line in status.splitlines())
    try:
        with open(os.devnull):
            can_open = True
    except OSError:
        can_open = False
    return {
        "rss_bytes": int(facts["VmRSS"].split()[0]) * 1024,
        "num_threads": int(facts["Threads"]),
        "num_descriptors": len(os.listdir("/proc/self/fd")) - 1,
        "can_open": can_open,
    }


def _main() -> None:
    options = Options(**json.loads(sys.stdin.readline()))
    if options.num_descriptors is not None:
        import resource

        limits = (options.num_descriptors, options.num_descriptors)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    if options.log is not None:
        logging.basicConfig(filename=options.log, level=logging.DEBUG)
    _change_limits(options)
    run = _Run(options)
    print(json.dumps(run.describe()), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(run.answer(request)), flush=True)
        if request["verb"] == "end":
            break


if __name__ == "__main__":
    _main()
