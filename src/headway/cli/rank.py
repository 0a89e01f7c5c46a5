"""A verb as one rank of several: it joins the others, says nothing twice, and leaves in order.

Owns: the life of a rank process around what a verb does. Does not own: starting ranks (launch.py),
process groups (dist/).
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from headway.cli.main import explain
from headway.cli.messages import say_error
from headway.dist.env import detect_env
from headway.dist.exits import code_for_torchrun, is_launched, note_exit, note_start
from headway.dist.forced_end import end_process, say
from headway.errors import OUT_OF_PLACE, ConfigError, problems_of

if TYPE_CHECKING:
    from headway.args import TrainingArguments
    from headway.dist.group import DistributedContext

# How soon a rank misses the process that started it, and how long it then leaves it to the watch
# over the store, which says more of what became of the launcher.
_LOOK_S, _LEFT_TO_WATCH_S = 1.0, 5.0
_ENDS = (signal.SIGTERM, signal.SIGINT)

Job = TypeVar("Job")

logger = logging.getLogger("headway.cli")


def run_as_rank(load: Callable[[], tuple[Job, dict[str, Any]]], work: Callable[[Job], int]) -> int:
    """Read a job, do it, return the exit code; together with other ranks where there are some,
    and then the process ends here.

    `load` also returns what `init_distributed` is to be given. What is wrong with the job on any
    rank is told once, and ends all of them.
    """
    env = detect_env(use_cpu=True)
    if not env.is_distributed and not is_launched():
        return work(load()[0])
    stops: list[int] = []
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, functools.partial(_stop_early, stops))
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # requests to a run that has begun
            signal.signal(number, signal.SIG_IGN)
    reason, victim, is_answer = "", False, False
    try:
        code, is_answer = _work(load, work, env.rank), True
    except BaseException as error:
        # What was under way may have made another error of the end that was asked for.
        code, reason, victim = (stops[0], "", False) if stops else _tell(error, env.rank)
    return _end(code, reason, victim, is_answer)


def group_options(args: TrainingArguments) -> dict[str, Any]:
    """What `init_distributed` is to be given for a run with these arguments."""
    options: dict[str, Any] = {"use_cpu": args.use_cpu, "device": args.device}
    if args.ddp_timeout is not None:
        options["timeout_s"] = args.ddp_timeout
    return options


def _watch_launcher(rank: int) -> None:
    """End with torchrun: a rank that outlives it would train on with nobody to stop it.

    Most ranks notice by the store, which goes with torchrun; a rank that is alone, or whose store
    is kept on another machine, does not.
    """
    if not os.environ.get("TORCHELASTIC_RUN_ID"):
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_LOOK_S)
        time.sleep(_LEFT_TO_WATCH_S)
        reason = f"rank {rank}: torchrun, which started it (process {launcher}), is gone"
        say(reason)
        end_process(1, reason, victim=True)

    threading.Thread(target=watch, name="headway-launcher", daemon=True).start()


def _work(
    load: Callable[[], tuple[Job, dict[str, Any]]], work: Callable[[Job], int], rank: int
) -> int:
    with _ending_at_once():
        note_start()
        _watch_launcher(rank)
        _lower_voice(rank)
        job, context = _join(load)
    from headway.dist.failure import guard_run
    from headway.dist.group import cleanup_distributed

    with guard_run():
        code = work(job)
    cleanup_distributed(context)
    return code


def _join(load: Callable[[], tuple[Job, dict[str, Any]]]) -> tuple[Job, DistributedContext]:
    """Read the job, and meet the other ranks; they end together if it is wrong on one of them."""
    problems: list[str] = []
    options: dict[str, Any] = {"use_cpu": True}
    job: Job | None = None
    try:
        job, options = load()
    except (ConfigError, *OUT_OF_PLACE) as error:
        problems = problems_of(error) or [str(error)]

    from headway.dist.group import init_distributed

    context = init_distributed(**options, problems=problems)
    assert job is not None, "problems are raised"
    return job, context


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """Inside, SIGTERM and Ctrl-C end the process from a thread: there is nothing to undo.

    An exception would come out of the middle of imports, which may swallow it or make another of
    it; and none comes while the main thread waits for other ranks, in code that is not Python.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    threading.Thread(target=_end_on, args=(reading,), name="headway-early-end", daemon=True).start()
    # The bytes are written for signals with a handler of Python's alone.
    found = {number: signal.signal(number, lambda *_: None) for number in _ENDS}
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(writing)


def _end_on(reading: int) -> None:
    with open(reading, "rb", buffering=0) as numbers:
        while byte := numbers.read(1):
            if byte[0] in _ENDS:
                end_process(128 + byte[0], "", victim=False)


def _tell(error: BaseException, rank: int) -> tuple[int, str, bool]:
    """Say what went wrong unless another rank does: the exit code, one line, whose fault it is."""
    from headway.dist.agreement import CommonMistake
    from headway.dist.failure import PeerFailure, current_watch, first_to_say
    from headway.dist.rendezvous import RendezvousError

    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1, "", False
    if isinstance(error, PeerFailure):
        if error.kind == "mistake":
            return 2, str(error), True  # told by the rank that made it
        if first_to_say(str(error)):
            say_error([str(error)])
        return 1, str(error), True
    problems, code = ([str(error)], 1) if isinstance(error, RendezvousError) else explain(error)
    if problems is not None:
        logger.debug("the error in full", exc_info=error)
        common = isinstance(error, CommonMistake)
        if rank == 0 if common else first_to_say("\n".join(problems)):
            # Machines differ in their files.
            where = f" (rank {rank} on {socket.gethostname()})"
            say_error([p + where * isinstance(error, OUT_OF_PLACE) for p in problems])
        return code, problems[0], False
    line = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    watch = current_watch()
    if watch is None or watch.failure is None:
        traceback.print_exception(error)
        return code, f"rank {rank} failed: {line}", False
    # Only the first to fail shows where: what others met after it, or with it, is one line.
    if watch.failure.rank == rank:
        traceback.print_exception(error)
    elif line != watch.failure.reason and first_to_say(line):
        say_error([f"rank {rank} failed as well: {line}"])
    return code, watch.failure.describe(watch.world_size), watch.failure.rank != rank


def _end(code: int, reason: str, victim: bool, is_answer: bool) -> NoReturn:
    from headway.dist.failure import current_watch
    from headway.dist.group import current_context

    note_exit(code, reason, victim=victim, is_answer=is_answer)
    told = code_for_torchrun(code, is_answer=is_answer)
    watch = current_watch()
    if current_context() is None:
        _close()
    elif watch is not None:
        # A group with a rank missing cannot be taken down: it may wait, and abort, without end.
        watch.wait_until_known()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter: in a few of a hundred runs a thread of torch's outlives what
    # it stands on and aborts the process, and a run that is done would count as failed.
    os._exit(told)


def _close() -> None:
    """What an interpreter does at its end before it takes itself down."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()


def _stop_early(stops: list[int], number: int, frame: FrameType | None) -> None:
    """SIGTERM outside of training: nothing to save, so the process just ends."""
    from headway.dist.failure import current_watch

    watch = current_watch()
    if watch is None or not watch.ending:
        stops.append(128 + number)
        raise SystemExit(128 + number)


def _lower_voice(rank: int) -> None:
    """What all ranks would log, rank 0 logs; with --verbose every rank does, by name."""
    logger = logging.getLogger("headway")
    if logger.level <= logging.DEBUG:
        for handler in logger.handlers:
            handler.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s"))
    elif rank > 0:
        logger.setLevel(logging.ERROR)
