"""`headway train --nproc N`: one command that starts all ranks of a machine and answers for them.

Owns: the torchrun command, passing signals on to the ranks, their exit code, leaving no process
behind. Does not own: what a rank does (rank.py), finding the other ranks (dist/).

torchrun starts and restarts the ranks. What it does not do is done here: it ends its ranks when it
is interrupted instead of letting them save and stop, and returns 1 whatever they returned.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from headway.cli.launch_report import Launched
from headway.cli.messages import say_error, write_line
from headway.dist.exits import (
    COMMAND_NAME,
    FOLDER_VARIABLE,
    RankEnd,
    attempt,
    read_command,
    read_ends,
    read_running,
)
from headway.dist.processes import ProcessIdentity, look_at
from headway.errors import ConfigError

_OPTIONS = ("--nproc", "--nnodes", "--rdzv-endpoint", "--max-restarts")
_BEFORE = "checkpoints-before.json"
_TURN_S = 0.1
# How long the other ranks may live after one has ended badly: a stopped one, any one.
_STOPPED_LIMIT_S, _OTHERS_LIMIT_S = 2.0, 12.0
_PR_SET_PDEATHSIG = 1


def add_launch_arguments(parser: argparse.ArgumentParser, *, restarts: bool = True) -> None:
    """Declare how many ranks to start, and where."""
    group = parser.add_argument_group("several processes")
    group.add_argument(
        "--nproc", type=int, metavar="N", help="start N ranks on this machine, under torchrun"
    )
    group.add_argument(
        "--nnodes",
        metavar="M",
        default="1",
        help="how many machines take part (MIN:MAX for a number that may change); run the same "
        "command on each",
    )
    group.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT", help="where the machines meet: one of them"
    )
    if not restarts:
        parser.set_defaults(max_restarts=0)
        return
    group.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="K",
        help="start all ranks again, from the newest checkpoint, after up to K failures",
    )


@dataclass(frozen=True)
class Ranks:
    """How many ranks to start, and where they meet."""

    nproc: int
    nnodes: str = "1"
    rdzv_endpoint: str | None = None
    max_restarts: int = 0

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Ranks:
        ranks = cls(options.nproc, options.nnodes, options.rdzv_endpoint, options.max_restarts)
        problems = ranks.find_problems() + _find_outer_launcher()
        if problems:
            raise ConfigError(problems)
        return ranks

    @property
    def num_nodes(self) -> tuple[int, int]:
        least, _, most = self.nnodes.partition(":")
        return int(least), int(most or least)

    @property
    def smallest_world(self) -> int:
        return self.nproc * self.num_nodes[0]

    def find_problems(self) -> list[str]:
        problems = []
        if self.nproc < 1:
            problems.append(f"--nproc: {self.nproc} given; allowed: 1 and up")
        if self.max_restarts < 0:
            problems.append(f"--max-restarts: {self.max_restarts} given; allowed: 0 and up")
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", self.nnodes):
            problems.append(f"--nnodes: {self.nnodes!r} given; allowed: a number, or MIN:MAX")
            return problems
        least, most = self.num_nodes
        if least > most:
            problems.append(f"--nnodes: {self.nnodes!r} given; MIN must not exceed MAX")
        if self.rdzv_endpoint is None:
            if most > 1:
                problems.append(
                    f"--rdzv-endpoint: missing; --nnodes={self.nnodes} needs a place to meet, for "
                    "example first-host:29400"
                )
        elif not re.fullmatch(r".+:\d{1,5}", self.rdzv_endpoint):
            problems.append(f"--rdzv-endpoint: {self.rdzv_endpoint!r} given; allowed: HOST:PORT")
        return problems

    def command(self, module: str, words: Sequence[str]) -> list[str]:
        """The torchrun command that runs a module with these words on every rank."""
        if self.rdzv_endpoint is None:
            meeting = ["--standalone"]
        else:
            meeting = ["--nnodes", self.nnodes, "--rdzv-backend", "c10d", "--rdzv-id", "headway",
                       "--rdzv-endpoint", self.rdzv_endpoint]  # fmt: skip
        return [
            sys.executable, "-m", "headway.cli.torchrun", "--nproc-per-node", str(self.nproc),
            *meeting, "--max-restarts", str(self.max_restarts), "-m", module, *words,
        ]  # fmt: skip


def launch(options: argparse.Namespace) -> int:
    """Train on several ranks: checks the run file here, once, then starts them."""
    from headway.config.load import load_run

    ranks = Ranks.from_options(options)
    run_config = load_run(options.config, options.overrides)
    if run_config.trainer == "single" and ranks.smallest_world > 1:
        raise ConfigError(
            f"--nproc: {ranks.nproc} given ({ranks.smallest_world} ranks), but trainer is "
            "'single', which runs on one; set trainer to ddp, fsdp2, pipeline or accelerate"
        )
    launched = Launched(run_config, options.argv, ranks.smallest_world, time.time())
    words = strip_options(options.argv[1:])
    with tempfile.TemporaryDirectory(prefix="headway-launch-") as folder:
        before = _saved(run_config.args.checkpoint_place)
        Path(folder, _BEFORE).write_text(json.dumps(before))
        Path(folder, COMMAND_NAME).write_text(json.dumps(options.argv))
        command = ranks.command("headway", words)
        return supervise(
            command, ranks.nproc, folder, options.quiet, on_failure=launched.report_failure
        )


def refuse_without_nproc(options: argparse.Namespace) -> None:
    """The other options of the launcher mean nothing without it."""
    defaults = {"nnodes": "1", "rdzv_endpoint": None, "max_restarts": 0}
    problems = [
        f"--{name.replace('_', '-')}: {getattr(options, name)!r} given without --nproc; say with "
        "--nproc how many ranks to start on this machine"
        for name, default in defaults.items()
        if getattr(options, name) != default
    ]
    if problems:
        raise ConfigError(problems)


def supervise(
    command: list[str],
    nproc: int,
    folder: str,
    quiet: bool,
    variables: Mapping[str, str] | None = None,
    on_failure: Callable[[Path, Collection[int]], Path | None] | None = None,
) -> int:
    """Run torchrun to its end and return the ranks' own exit code.

    `on_failure` gets the folder and the processes that were killed from here, once all have ended;
    where to read about the failure is what it returns.
    """
    if not quiet:
        write_line(f"running: {shlex.join(command)}")
    environ = {**os.environ, FOLDER_VARIABLE: folder, **(variables or {})}
    # As the console command has it: modules beside the user shadow nothing.
    environ["PYTHONSAFEPATH"] = "1"
    environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cpus() // nproc)))
    return _Supervisor(command, environ, Path(folder), on_failure).run()


def choose_resume(given: bool | str | None, place: str) -> bool | str | None:
    """What an attempt goes on from: after a restart the run's own newest checkpoint, if any.

    That is so even when the command says to start afresh: the first attempt did. A checkpoint that
    was there before the command began is not this run's.
    """
    if attempt() == 0:
        return given
    from headway.checkpoint import find_latest_checkpoint

    newest = find_latest_checkpoint(place, kind="training")
    if newest is None:
        return given
    note = Path(os.environ.get(FOLDER_VARIABLE, ""), _BEFORE)
    before = json.loads(note.read_text()) if note.is_file() else {}
    is_old = newest in before and before[newest] == _saved(place).get(newest)
    return given if is_old else True


def users_command(argv: list[str]) -> list[str]:
    """The command line that the user gave: the launcher's where there is one, else this one."""
    return read_command() or argv


def strip_options(words: Sequence[str]) -> list[str]:
    """A command line without the options that only the launcher reads."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in _OPTIONS:
            skip = True
        elif word.partition("=")[0] not in _OPTIONS:
            kept.append(word)
    return kept


class _Supervisor:
    """torchrun and the ranks under it, from start to end."""

    def __init__(
        self,
        command: list[str],
        environ: Mapping[str, str],
        folder: Path,
        on_failure: Callable[[Path, Collection[int]], Path | None] | None = None,
    ) -> None:
        self._command, self._environ, self._folder = command, environ, folder
        self._on_failure = on_failure
        self._child: subprocess.Popen[bytes] | None = None
        self._stop: signal.Signals | None = None
        self._told: set[tuple[int, int]] = set()
        self._killed = False
        self._ended: set[int] = set()
        self._lost: list[str] = []
        self._first_bad_end: tuple[int, float] | None = None
        self._left_behind: list[ProcessIdentity] = []

    def run(self) -> int:
        with self._taking_signals():
            self._child = subprocess.Popen(
                self._command,
                env=self._environ,
                # Ctrl-C in a terminal goes to everyone there; torchrun would end its ranks.
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),
            )
            try:
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        code = self._child.wait(_TURN_S)
                        break
                    self._tend()
                self._lost = _find_lost(self._folder)
            finally:
                self._kill_all()
        return self._answer(code)

    # -- signals ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _taking_signals(self) -> Iterator[None]:
        stops = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
            stops.append(signal.SIGHUP)
        found = {number: signal.signal(number, self._on_stop) for number in stops}
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            found[number] = signal.signal(number, self._on_request)
        found[signal.SIGXCPU] = signal.signal(signal.SIGXCPU, self._on_limit)
        try:
            yield
        finally:
            for number, handler in found.items():
                signal.signal(number, handler)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self._stop is not None:
            self._killed = True
            self._kill_all()
            return
        # A lost terminal is a reason to save and stop as well; ranks know SIGTERM for that.
        self._stop = signal.Signals(signal.SIGTERM if number == signal.SIGHUP else number)
        self._pass_on_stop()

    def _on_limit(self, number: int, frame: FrameType | None) -> None:
        # It comes again with every second of processor time, which is no second request.
        if self._stop is None:
            self._on_stop(signal.SIGTERM, frame)

    def _on_request(self, number: int, frame: FrameType | None) -> None:
        # To one: all ranks save when one asks, and two that ask a step apart would save twice.
        running = read_running(self._folder)
        if running:
            first = max(running, key=lambda key: (key[0], -key[1]))
            _send(running[first], signal.Signals(number))

    def _pass_on_stop(self) -> None:
        """To ranks that are up; those that are still starting get it when they are."""
        if self._stop is not None:
            for key, process in read_running(self._folder).items():
                if key not in self._told:
                    self._told.add(key)
                    _send(process, self._stop)

    # -- tending ----------------------------------------------------------------------------

    def _tend(self) -> None:
        self._pass_on_stop()
        ends = [end for end in read_ends(self._folder) if not end.is_answer]
        bad = [end for end in ends if end.code not in (0, 130, 143)]
        if not bad:
            return
        running = read_running(self._folder)
        if self._first_bad_end is None or self._first_bad_end[0] != bad[0].attempt:
            self._first_bad_end = (bad[0].attempt, time.monotonic())
            self._left_behind = [
                process for (number, _), process in running.items() if number == bad[0].attempt
            ]
        since_s = time.monotonic() - self._first_bad_end[1]
        # torchrun waits half a minute before it ends a rank that does not react. Not those that
        # came later: with another number of machines ranks start again as the same attempt.
        for process in self._left_behind:
            if process in running.values():
                limit_s = _STOPPED_LIMIT_S if look_at(process) == "stopped" else _OTHERS_LIMIT_S
                if since_s > limit_s:
                    self._ended.add(process.pid)
                    _kill(process)

    def _kill_all(self) -> None:
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
        for process in read_running(self._folder).values():
            _kill(process)

    # -- the answer -------------------------------------------------------------------------

    def _answer(self, code: int) -> int:
        if self._killed and self._stop is not None:
            return 128 + self._stop
        ends = read_ends(self._folder)
        answer = choose_code(ends, code)
        if code == 0 and all(end.is_answer for end in ends):
            return answer  # whatever it is, the ranks have told what it stands for
        if answer == 1:
            # Again and last: torchrun's own report stands between this and the first time.
            told = [end.reason for end in sorted(ends, key=lambda end: not end.victim)]
            if code < 0:
                how = signal.Signals(-code).name
                told.insert(0, f"torchrun was ended by {how}, and with it its ranks")
            told += self._lost
            where = self._on_failure(self._folder, self._ended) if self._on_failure else None
            if where is not None:
                write_line(f"what is known of the failure is in {where}")
            say_error([reason for reason in told if reason][:1] or ["a rank failed"])
        elif answer == 2 and all(end.victim for end in ends):
            # It was told on the machine of the rank that made the mistake.
            say_error([end.reason for end in ends if end.reason][:1])
        return answer


def choose_code(ends: Sequence[RankEnd], torchrun_code: int) -> int:
    """One exit code for all ranks: that of a rank that failed by itself before any other."""
    own = {end.code for end in ends if not end.victim and end.code}
    for code in (1, 2):
        if code in own:
            return code
    if own:
        return max(own)
    if any(end.victim for end in ends):
        return 2 if all(end.code == 2 for end in ends if end.victim) else 1
    return 1 if torchrun_code else 0


def _find_lost(folder: Path) -> list[str]:
    """The ranks of the newest attempt that are gone without a word, in rank order."""
    running = read_running(folder)
    newest = max((number for number, _ in running), default=0)
    return [
        f"rank {rank} was lost: its process is gone: killed, or ended at once (process "
        f"{process.pid} on {process.host})"
        for (number, rank), process in sorted(running.items())
        if number == newest and look_at(process) == "gone"
    ]


def _send(process: ProcessIdentity, number: int) -> None:
    if look_at(process) != "gone":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def _kill(process: ProcessIdentity) -> None:
    """End a rank and the workers it started, which share its session."""
    if look_at(process) != "gone":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)


def _die_with(parent: int) -> Callable[[], None] | None:
    """torchrun hears of it, and stops its ranks, when this process is killed."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def _find_outer_launcher() -> list[str]:
    rank = os.environ.get("RANK", "").strip()
    if not rank:
        return []
    return [
        f"--nproc: this process is already rank {rank} of {os.environ.get('WORLD_SIZE', '?')} "
        "(RANK, WORLD_SIZE); leave --nproc out under another launcher, or unset RANK"
    ]


def _saved(place: str) -> dict[str, str]:
    """The digest of each committed checkpoint's manifest, by its path or address."""
    from headway.checkpoint.manifest import committed
    from headway.checkpoint.storage import open_storage

    storage = open_storage(place)
    storage.refresh()
    found = committed(storage.root)
    return {storage.locate(one.path): one.manifest.digest for one in found}


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
