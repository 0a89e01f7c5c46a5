"""Several files written at once.

Owns: a handful of threads for the length of one save. Does not own: what a job does.
`concurrent.futures` is not used: its threads take no work once the interpreter has begun to exit,
and that is when the last save of a process may still be under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Below this, threads cost more than they bring.
_WORTH_THREADS_BYTES = 16 * 2**20


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
    if num_threads <= 1 or sum(job.num_bytes for job in jobs) < _WORTH_THREADS_BYTES:
        for job in jobs:
            job.run()
        return
    queue = sorted(jobs, key=lambda job: -job.num_bytes)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while True:
            with lock:
                if errors or not queue:
                    return
                job = queue.pop(0)
            try:
                job.run()
            except BaseException as error:
                with lock:
                    errors.append(error)

    threads = []
    for number in range(min(num_threads, len(jobs)) - 1):
        thread = threading.Thread(target=work, name=f"headway-write-{number}")
        try:
            thread.start()
        except RuntimeError:
            break  # the interpreter is exiting and starts no more threads: write with those at hand
        threads.append(thread)
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
