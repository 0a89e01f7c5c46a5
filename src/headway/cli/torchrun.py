"""torchrun as `headway train --nproc` runs it: it leaves word of how each process ended.

Owns: nothing but that note. torchrun alone is the parent of the ranks, so that it alone is told
which signal ended one; it prints that, in a report for people, and returns 1.
"""

from __future__ import annotations

from headway.dist.exits import Death, note_deaths


def main() -> None:
    """Run torchrun with this process's command line."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main()
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        note_deaths([Death(rank, failure.pid, failure.exitcode) for rank, failure in failures])
        raise


if __name__ == "__main__":
    main()
