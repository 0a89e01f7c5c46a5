"""Running a function on several real ranks, each a process of its own.

Owns: starting the ranks, their rendezvous, collecting results, telling the culprit from its
victims, stack dumps on a timeout, leaving no process behind.
Does not own: how training sets up its process groups (dist/).

Values cross between the processes as pickles: they are made and read within one call, and
never stored.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Importing torch on a loaded machine takes long; it is not the function's time.
_START_LIMIT_S = 60.0
_PRELOADED = ("torch", "torch.distributed", "headway.trainers.parallel", "headway.testing.tiny")
# How long the other ranks may take to say what went wrong after one of them has failed.
_GRACE_S = 2.0
# A signal that no training code listens to.
_DUMP_SIGNAL: int = getattr(signal, "SIGRTMIN", signal.SIGUSR2)

# What a rank says when the rank it was talking to is gone.
_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "remote process exited",
    "NCCL communicator was aborted",
)


class RankFailure(RuntimeError):
    """A rank raised or died. `rank`, `exitcode` (negative: a signal) and `traceback` name the
    one that failed first; `victims` are the ranks that failed after it."""

    def __init__(
        self, rank: int, num_ranks: int, exitcode: int | None, text: str, victims: list[int]
    ) -> None:
        self.rank = rank
        self.exitcode = exitcode
        self.traceback = text
        self.victims = victims
        message = f"rank {rank} of {num_ranks} failed first ({_describe_exit(exitcode)})"
        if victims:
            message += f"; failed after it: {_describe_ranks(victims)}"
        super().__init__(f"{message}\n{text}" if text else message)


class RankTimeout(TimeoutError):
    """The time was over. `ranks` had not returned; `stacks` holds where each of them was."""

    def __init__(self, timeout_s: float, num_ranks: int, stacks: dict[int, str]) -> None:
        self.ranks = sorted(stacks)
        self.stacks = stacks
        dumps = "".join(f"\n--- rank {rank} ---\n{stacks[rank]}" for rank in self.ranks)
        super().__init__(
            f"{_describe_ranks(self.ranks)} of {num_ranks} still running after {timeout_s:g} s"
            f"{dumps}"
        )


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 60,
    backend: str | None = "gloo",
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `num_ranks` processes; return their results in rank order.

    `fn` must be picklable, that is, stand at the top of a module. Each process finds RANK,
    WORLD_SIZE, MASTER_PORT and the rest as torchrun would set them, plus `env`, and a process
    group of `backend` is up (None: the rendezvous is there, but no group is made).

    `timeout_s` is counted from the moment every rank is ready. Raises `RankFailure` with the
    first real traceback, or `RankTimeout` with the stack of each rank that did not return.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks: {num_ranks} given; allowed: 1 and up")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        payload = pickle.dumps((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"run_ranks sends {fn!r} and its arguments to other processes, and cannot: {error}. "
            "A function has to stand at the top of a module"
        ) from error
    # The store lives here, not in rank 0, so that it outlives a rank which dies.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    with tempfile.TemporaryDirectory(prefix="headway-ranks-") as directory:
        ranks: list[_Rank] = []
        try:
            for number in range(num_ranks):
                own = {"RANK": str(number), "LOCAL_RANK": str(number), **environ}
                dump = Path(directory, f"rank-{number}.txt")
                ranks.append(_start(number, own, payload, backend, timeout_s, dump))
            _watch(ranks, timeout_s)
        finally:
            for rank in ranks:
                rank.end()
        return [pickle.loads(rank.result) for rank in ranks]


@dataclass
class _Rank:
    """One rank as its parent sees it."""

    number: int
    process: multiprocessing.process.BaseProcess
    connection: Connection
    dump: Path
    listening: bool = False
    ready: bool = False
    result: bytes = b""
    failed_at: float | None = None
    text: str = ""
    messages_over: bool = False

    @property
    def returned(self) -> bool:
        return bool(self.result)

    @property
    def over(self) -> bool:
        return self.messages_over and self.process.exitcode is not None

    @property
    def failed(self) -> bool:
        return self.failed_at is not None

    def read(self) -> None:
        """Take in what the rank has said, then note whether and how it ended."""
        while not self.messages_over and self.connection.poll():
            try:
                kind, *content = self.connection.recv()
            except (EOFError, OSError):
                self.messages_over = True
                break
            if kind == "listening":
                self.listening = True
            elif kind == "ready":
                self.ready = True
            elif kind == "result":
                self.result = content[0]
            else:
                self.failed_at, self.text = content
        if self.process.exitcode is None:
            return
        # Nothing more can come but what is in the pipe already; children of the rank may hold
        # its end open, so the end of the pipe cannot be waited for.
        if not self.connection.poll():
            self.messages_over = True
        if self.process.exitcode != 0 and self.messages_over and not self.failed:
            self.failed_at = time.monotonic()
            self.text = self._read_dump() or "(it died without a Python traceback)"

    def dump_stack(self) -> str:
        """Where the rank is now, by the dump that its fault handler writes on a signal."""
        if not self.listening or self.process.pid is None or self.process.exitcode is not None:
            return "(it had not started yet)"
        os.kill(self.process.pid, _DUMP_SIGNAL)
        deadline, size = time.monotonic() + _GRACE_S, -1
        while time.monotonic() < deadline:
            text = self._read_dump()
            if text and len(text) == size:
                return text
            size = len(text)
            wait([self.process.sentinel], timeout=0.05)
        return self._read_dump() or "(it did not answer)"

    def end(self) -> None:
        """Leave nothing behind: neither the rank nor a process that it started."""
        pid = self.process.pid
        if pid is not None:
            self.process.kill()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            self.process.join()
        self.connection.close()

    def _read_dump(self) -> str:
        return self.dump.read_text(errors="replace").strip() if self.dump.exists() else ""


def _start(
    number: int,
    environ: dict[str, str],
    payload: bytes,
    backend: str | None,
    timeout_s: float,
    dump: Path,
) -> _Rank:
    context = _process_context()
    here, there = context.Pipe(duplex=False)
    process = context.Process(
        target=_run_rank,
        args=(there, payload, backend, timeout_s, str(dump), {**os.environ, **environ}),
        name=f"rank-{number}",
    )
    # Set before the interpreter starts as well: torch reads some of them when it is imported.
    with _environment({"OMP_NUM_THREADS": environ["OMP_NUM_THREADS"]}):
        process.start()
    there.close()
    return _Rank(number, process, here, dump)


def _process_context() -> Any:
    """Where it can be, ranks are forked from a server that has imported torch once for all."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _watch(ranks: list[_Rank], timeout_s: float) -> None:
    """Return when every rank has ended well; raise when one has not, or the time is over."""
    limit_s = max(_START_LIMIT_S, timeout_s)
    deadline = time.monotonic() + limit_s
    all_ready = False
    while not all(rank.over for rank in ranks):
        _read_all(ranks)
        if any(rank.failed for rank in ranks):
            _await_victims(ranks)
            raise _find_culprit(ranks)
        if not all_ready and all(rank.ready for rank in ranks):
            all_ready, limit_s = True, timeout_s
            deadline = time.monotonic() + timeout_s
        if time.monotonic() >= deadline:
            # A rank that returned only waits for the others at the exit; it is not the hang.
            running = [rank for rank in ranks if not rank.returned] or ranks
            stacks = {rank.number: rank.dump_stack() for rank in running}
            raise RankTimeout(limit_s, len(ranks), stacks)


def _read_all(ranks: list[_Rank]) -> None:
    wait(
        [rank.connection for rank in ranks if not rank.messages_over]
        + [rank.process.sentinel for rank in ranks if rank.process.exitcode is None],
        timeout=0.1,
    )
    for rank in ranks:
        rank.read()


def _await_victims(ranks: list[_Rank]) -> None:
    # The parent may learn of a victim first: its report can overtake the death of the culprit.
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and not all(rank.over for rank in ranks):
        _read_all(ranks)


def _find_culprit(ranks: list[_Rank]) -> RankFailure:
    failed = sorted(
        (rank for rank in ranks if rank.failed),
        key=lambda rank: (_lost_its_peer(rank), rank.failed_at),
    )
    first, *others = failed
    # The report of a failed rank is read a moment before the process is gone.
    first.process.join(_GRACE_S)
    return RankFailure(
        first.number,
        len(ranks),
        first.process.exitcode,
        first.text,
        sorted(rank.number for rank in others),
    )


def _lost_its_peer(rank: _Rank) -> bool:
    last_line = rank.text.rstrip().rpartition("\n")[2]
    return any(phrase in last_line for phrase in _PEER_LOST)


def _describe_exit(exitcode: int | None) -> str:
    if exitcode is None:
        return "still running when it was ended"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return f"killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"killed by signal {-exitcode}"


def _describe_ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _run_rank(
    connection: Connection,
    payload: bytes,
    backend: str | None,
    timeout_s: float,
    dump: str,
    environ: dict[str, str],
) -> None:
    """The life of one rank, in its own process."""
    # The process may come from a server that was started long before, in another environment.
    os.environ.clear()
    os.environ.update(environ)
    # Else what the rank starts, such as loader workers, would be started as it was.
    multiprocessing.set_start_method(None, force=True)
    # A process group of its own, so that the parent can end what the rank itself started.
    os.setpgrp()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    # Stays open to the end: the fault handler writes to its descriptor from a signal handler.
    dump_file = open(dump, "w")  # noqa: SIM115
    faulthandler.enable(dump_file)
    faulthandler.register(_DUMP_SIGNAL, dump_file)
    connection.send(("listening",))
    try:
        fn, args, kwargs = pickle.loads(payload)
        _join_group(backend, timeout_s)
        connection.send(("ready",))
        connection.send(("result", pickle.dumps(fn(*args, **kwargs))))
        _leave_group()
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = RuntimeError("the function called sys.exit() instead of returning")
        text = "".join(traceback.format_exception(error))
        connection.send(("failed", time.monotonic(), text))
        # Not an orderly exit: taking down a group in use can hang or abort.
        os._exit(1)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _join_group(backend: str | None, timeout_s: float) -> None:
    import torch

    torch.set_num_threads(1)
    if backend is None:
        return
    if "nccl" in backend:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Longer than the parent waits, so that a hang is reported with stacks, not by the backend.
    limit = datetime.timedelta(seconds=timeout_s + _START_LIMIT_S)
    torch.distributed.init_process_group(backend, timeout=limit)


def _leave_group() -> None:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        # Without the barrier a rank that ends early aborts others inside the backend.
        distributed.barrier()
        distributed.destroy_process_group()
