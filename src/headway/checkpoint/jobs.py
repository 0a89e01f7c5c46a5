"""Work on the files of a checkpoint, shared among a few threads.

Owns: a handful of threads for the length of one save or load. Does not own: what they do.
`concurrent.futures` is not used: its threads take no work once the interpreter has begun to exit,
and that is when the last save of a process may still be under way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Below this, threads cost more than they bring.
_WORTH_THREADS_BYTES = 16 * 2**20
# Beyond this, they only wait for memory and for the interpreter.
_MOST_READERS = 4

Take = Callable[[int], Callable[[], None] | None]


def num_readers(num_processes: int = 1) -> int:
    """How many threads read files, for each of so many processes on this machine."""
    try:
        num_cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        num_cores = os.cpu_count() or 1
    return max(1, min(_MOST_READERS, num_cores // num_processes))


def worth_threads(num_bytes: int) -> bool:
    """Whether so much is done sooner by several threads."""
    return num_bytes >= _WORTH_THREADS_BYTES


def share_work(take: Take, num_threads: int, name: str) -> None:
    """Have threads do what `take` gives them until it gives None; the caller is one of them.

    `take` gets the number of the asking thread and is called by one at a time. The first error
    stops all of them and is raised.
    """
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        while True:
            try:
                with lock:
                    task = None if errors else take(number)
                if task is None:
                    return
                task()
            except BaseException as error:
                errors.append(error)

    threads = []
    for number in range(1, num_threads):
        thread = threading.Thread(target=work, args=(number,), name=f"headway-{name}-{number}")
        try:
            thread.start()
        except RuntimeError:
            break  # the interpreter is exiting and starts no more threads: do with those at hand
        threads.append(thread)
    work(0)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@dataclass(frozen=True)
class Job:
    """One file to write, and how large it is about."""

    num_bytes: int
    run: Callable[[], None]


def run_jobs(jobs: Sequence[Job], num_threads: int) -> None:
    """Run every job; the first error stops those not yet begun and is raised.

    Little work is done in the calling thread in the order given; much is shared among
    `num_threads` threads, the largest first.
    """
    if num_threads <= 1 or not worth_threads(sum(job.num_bytes for job in jobs)):
        for job in jobs:
            job.run()
        return
    queue = sorted(jobs, key=lambda job: -job.num_bytes)
    share_work(lambda _: queue.pop(0).run if queue else None, min(num_threads, len(jobs)), "write")
