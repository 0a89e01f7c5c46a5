"""`headway diloco local CONFIG --workers N`: a server and its workers on this machine.

Owns: starting them as processes, one view of all, ending all of them together, the exit code. Does
not own: what each of them does (diloco_server.py, diloco.py).

The first worker that fails ends the others; so does Ctrl-C, after which workers save and stop as
`headway train` does. Each process writes to a log of its own in the run's folder.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from headway.cli.diloco import find_or_add_callback
from headway.cli.diloco_server import as_flags, server_options
from headway.cli.diloco_status import describe, headline
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.config.schema import RunConfig

_OF_WORKERS = ("sync_every", "num_fragments", "comm", "dylu", "bf16_fetch")
_TURN_S, _LOOK_S = 0.1, 1.0
_START_S = 120.0
_END_S = 30.0
_LAST_LINES = 15


def run(options: argparse.Namespace) -> int:
    """Start all, show them, and wait for the workers' end."""
    from headway.config.load import load_run

    problems: list[str] = []
    for check in (server_options, _check_worker):
        try:
            check(options)
        except ConfigError as error:
            told = {_option_of(text) for text in problems}
            problems += [text for text in error.problems if _option_of(text) not in told]
    if problems:
        raise ConfigError(problems)
    run_config = load_run(options.config, options.overrides)
    _settle(options, run_config)
    folder = Path(run_config.args.output_dir)
    (folder / "server").mkdir(parents=True, exist_ok=True)
    args = run_config.args
    local = _Local(options, folder, args.checkpoint_address, max(0, args.seed))
    with local.taking_signals():
        return local.run()


def _check_worker(options: argparse.Namespace) -> None:
    from headway.diloco.options import WorkerOptions

    with as_flags():
        WorkerOptions(**_given_to_workers(options))


def _given_to_workers(options: argparse.Namespace) -> dict[str, Any]:
    found = {name: getattr(options, name) for name in _OF_WORKERS}
    return {
        name: value for name, value in found.items() if value is not None and value is not False
    }


def _settle(options: argparse.Namespace, run_config: RunConfig) -> None:
    """What is not given here is what the workers' callback has, as in `headway diloco worker`."""
    from headway.callbacks import DiLoCoCallback

    component = find_or_add_callback(run_config)
    callback = DiLoCoCallback(**{**component.init_args, **_given_to_workers(options)})
    for name in _OF_WORKERS:
        setattr(options, name, getattr(callback.options, name))


def _option_of(problem: str) -> str:
    """Which option a message is of: server and worker say of the same one the same."""
    return re.split("[=:]", problem, maxsplit=1)[0]


@dataclass
class _Process:
    """One of the processes."""

    name: str
    child: subprocess.Popen[bytes]
    log: Path

    def tail(self) -> list[str]:
        lines = self.log.read_text(errors="replace").splitlines()
        return lines[-_LAST_LINES:]


@dataclass
class _Local:
    """All processes of one command."""

    options: argparse.Namespace
    folder: Path
    address: str | None
    """Below which each worker has its checkpoints, if not in its folder."""
    seed: int
    server: _Process | None = None
    workers: list[_Process] = field(default_factory=list)
    stop: signal.Signals | None = None
    killed: bool = False
    """Whether a second stop has come."""
    told: list[_Process] = field(default_factory=list)
    """The workers that were asked to save and stop."""

    def run(self) -> int:
        from headway.diloco.client import DiLoCoClient

        try:
            address = self._start_server()
            if address is None:
                return self._fail(self.server)
            token_file = self.folder / "server" / "token"
            client = DiLoCoClient(address, token_file.read_text().strip(), timeout_s=5.0)
            for number in range(self.options.workers):
                if self.stop is None:
                    self._start_worker(number, address, token_file)
            return self._watch(client)
        finally:
            self._end_all()

    # -- starting ---------------------------------------------------------------------------

    def _start(self, name: str, words: list[str]) -> _Process:
        log = self.folder / f"{name}.log"
        environ = {**os.environ, "PYTHONSAFEPATH": "1"}
        # Several processes that each take all cores only get in each other's way.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // (self.options.workers or 1))))
        with log.open("wb") as file:
            child = subprocess.Popen(
                [sys.executable, "-m", "headway", "diloco", *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environ,
                # Ctrl-C in a terminal goes to everyone there; here it is passed on once.
                start_new_session=True,
            )
        return _Process(name, child, log)

    def _start_server(self) -> str | None:
        options, place = self.options, self.folder / "server"
        address_file = place / "address"
        address_file.unlink(missing_ok=True)
        words = ["server", "--output-dir", str(place), "--address-file", str(address_file)]
        for name in ("workers", "mode", "sync_every", "num_fragments", "deadline_s", "heartbeat_s",
                     "max_uploads", "max_norm_ratio", "outer_lr", "momentum",
                     "accumulate"):  # fmt: skip
            words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        for name in ("dylu", "no_nesterov", "keep_submissions"):
            words += [f"--{name.replace('_', '-')}"] * getattr(options, name)
        for name in ("min_workers", "max_update_norm"):
            if (given := getattr(options, name)) is not None:
                words += [f"--{name.replace('_', '-')}", str(given)]
        self.server = self._start("server", words)
        deadline_s = time.monotonic() + _START_S
        while not address_file.exists():
            if self.server.child.poll() is not None or self.stop is not None:
                return None
            if time.monotonic() > deadline_s:
                return None
            time.sleep(_TURN_S)
        return address_file.read_text()

    def _start_worker(self, number: int, address: str, token_file: Path) -> None:
        options, name = self.options, f"worker-{number}"
        words = ["worker", options.config, "--server", address, "--worker-id", name]
        words += ["--sync-every", str(options.sync_every), "--comm", options.comm]
        words += ["--num-fragments", str(options.num_fragments), "--token-file", str(token_file)]
        words += ["--dylu"] * options.dylu + ["--bf16-fetch"] * bool(options.bf16_fetch)
        # Each has its own order of the data: equal workers would learn the same things.
        words += [*options.overrides, f"--args.seed={self.seed + number}"]
        words += [f"--args.output_dir={self.folder / name}"]
        if self.address is not None:
            words += [f"--args.checkpoint_address={self.address.rstrip('/')}/{name}"]
        self.workers.append(self._start(name, words))

    # -- watching ---------------------------------------------------------------------------

    def _watch(self, client: Any) -> int:
        from headway.cli.messages import say_error
        from headway.diloco.faults import DiLoCoError

        view = _View(self.options)
        deadline_s = time.monotonic() + (self.options.timeout_s or float("inf"))
        looked_s, status = 0.0, {}
        with view:
            while any(one.child.poll() is None for one in self.workers):
                self._pass_on_stop()
                failed = self._failed()
                if failed is not None and self.stop is None:
                    view.close()
                    return self._fail(failed)
                if time.monotonic() > deadline_s:
                    view.close()
                    say_error([f"all are ended: --timeout-s={self.options.timeout_s:g} is over"])
                    return 1
                if time.monotonic() - looked_s >= _LOOK_S:
                    looked_s = time.monotonic()
                    with contextlib.suppress(DiLoCoError):
                        status = client.status()
                        view.show(status, str(client.address))
                time.sleep(_TURN_S)
            with contextlib.suppress(DiLoCoError):
                status = client.status()
        return self._answer(status)

    def _failed(self) -> _Process | None:
        if self.server is not None and self.server.child.poll() is not None:
            return self.server
        return next((one for one in self.workers if one.child.poll() not in (None, 0)), None)

    def _fail(self, failed: _Process | None) -> int:
        from headway.cli.messages import write_line

        if failed is None or self.stop is not None:
            return 1 if self.stop is None else 128 + self.stop
        for line in failed.tail():
            write_line(f"{failed.name}: {line}")
        write_line(f"error: {failed.name} failed; its log is {failed.log}")
        code = failed.child.returncode
        return 2 if code == 2 else 1

    def _answer(self, status: Mapping[str, Any]) -> int:
        from headway.cli.messages import print_json

        if self.stop is not None:
            return 128 + self.stop
        failed = self._failed()
        if failed is not None:
            return self._fail(failed)
        facts = {
            "output_dir": str(self.folder),
            "workers": [str(self.folder / one.name) for one in self.workers],
            "server": str(self.folder / "server"),
            "num_rounds": status.get("num_rounds"),
            "received_bytes": status.get("received_bytes"),
            "sent_bytes": status.get("sent_bytes"),
            "state_hash": status.get("state_hash"),
        }
        if self.options.json:
            print_json(facts)
            return 0
        print(f"{len(self.workers)} workers are done after {facts['num_rounds']} rounds")
        for one in self.workers:
            print(f"{one.name}: {self.folder / one.name} (log: {one.log})")
        return 0

    # -- ending -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def taking_signals(self) -> Iterator[None]:
        """The first stop goes to the workers, which save; the second ends everything."""
        stops = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
            stops.append(signal.SIGHUP)
        found = {number: signal.signal(number, self._on_stop) for number in stops}
        try:
            yield
        finally:
            for number, handler in found.items():
                signal.signal(number, handler)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.killed = self.stop is not None
        # A lost terminal is a reason to save and stop as well.
        self.stop = signal.Signals(signal.SIGTERM if number == signal.SIGHUP else number)
        self._pass_on_stop()

    def _pass_on_stop(self) -> None:
        """Also to a worker that was being started when the stop came."""
        if self.stop is None:
            return
        for one in self.workers:
            if one.child.poll() is None and (self.killed or one not in self.told):
                self.told.append(one)
                _send(one, signal.SIGKILL if self.killed else signal.SIGTERM)

    def _end_all(self) -> None:
        """Workers first: they leave the server in order."""
        everyone = [*self.workers, *([self.server] if self.server else [])]
        for one in everyone:
            if one.child.poll() is None:
                if one not in self.told:  # a second time, it would end without saving
                    _send(one, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.child.wait(_END_S)
        for one in everyone:
            if one.child.poll() is None:
                _send(one, signal.SIGKILL)
                one.child.wait()


def _send(one: _Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            os.killpg(one.child.pid, number)
        else:
            one.child.send_signal(number)


class _View:
    """All workers at a glance: a table that is drawn again in a terminal, else a line per round."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._quiet = bool(options.quiet or options.json)
        self._live: Any = None
        self._last = ""

    def __enter__(self) -> _View:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.__exit__(None, None, None)

    def show(self, status: Mapping[str, Any], address: str) -> None:
        from headway.cli.messages import write_line

        if self._quiet:
            return
        if self._live is not None:
            self._live.update("\n".join(describe(status, address)), refresh=True)
            return
        steps = ", ".join(f"{one['id']} step {one['step']:,}" for one in status["workers"])
        rounds = str([one["number"] for one in status["rounds"]])
        if rounds != self._last:
            self._last = rounds
            write_line(f"{headline(status)}; {steps}")
