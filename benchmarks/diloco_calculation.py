"""What a DiLoCo server would need for other models and networks, from measured constants.

Not a benchmark of its own: diloco.py measures, prints these formulas and what follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

if TYPE_CHECKING:
    from diloco import Case

MILLION, GB = 10**6, 1e9
SENT_BYTES = {"float32": 4, "bf16": 2, "int8": 1}
"""Of one parameter on the way to the server; on the way back it is 4."""
STATE_BYTES = 8
"""Of one parameter on the disk after each round: the parameter and its momentum."""
LINKS_MBIT = {"100 Mbit/s": 100, "1 Gbit/s": 1_000, "10 Gbit/s": 10_000}
MANY_WORKERS = (8, 64, 512)
USABLE = 0.94
"""Of a link's bits, after the headers of Ethernet, IP and TCP."""
FUTURE = 10**9
INTERVAL_S = 1000.0
"""Training between two exchanges: 500 steps of 2 s."""


def find_own(cases: list[Case], comm: str) -> list[Case]:
    """Of the largest model that was measured with several numbers of workers, fewest first."""
    own = [case for case in cases if case.comm == comm]
    sizes = sorted({case.size for case in own})
    several = [x for x in sizes if len([case for case in own if case.size == x]) > 1]
    size = (several or sizes)[-1]
    return sorted((case for case in own if case.size == size), key=lambda case: case.workers)


@dataclass
class Constants:
    """Of the largest model with one way to communicate."""

    comm: str
    size: int
    most: int
    """The number of workers that the rates are of."""
    in_rate: float
    out_rate: float
    """Bytes per second of one core: a busy machine takes longer, but no more processor time."""
    commit_s: float
    """Of the processor per parameter, whatever the number of workers."""
    worker_s: float
    """Per parameter and worker."""
    disk_rate: float
    memory_bytes: float
    """Per parameter, without pages of files."""

    @classmethod
    def of(cls, cases: list[Case], comm: str, disk_rate: float) -> Constants:
        own = find_own(cases, comm)
        size = own[-1].size
        most = own[-1]
        slope, start = (
            numpy.polyfit([c.workers for c in own], [c.commit_cpu_s / size for c in own], 1)
            if len(own) > 1
            else (0.0, most.commit_cpu_s / size)
        )
        return cls(
            comm=comm,
            size=size,
            most=most.workers,
            in_rate=most.received_bytes / max(0.01, most.submit_cpu_s),
            out_rate=most.sent_bytes / max(0.01, most.fetch_cpu_s),
            commit_s=max(0.0, float(start)),
            worker_s=max(0.0, float(slope)),
            disk_rate=disk_rate,
            memory_bytes=max(c.anonymous_bytes for c in own) / size,
        )

    @property
    def fixed_s(self) -> float:
        """Of a commit, per parameter: the processor's part and the disk's."""
        return self.commit_s + STATE_BYTES / self.disk_rate

    def phases(self, size: float, workers: int, link: float) -> tuple[float, float, float]:
        """Seconds to submit, to commit and to fetch; `link` is the server's, in bytes a second."""
        sent, fetched = workers * SENT_BYTES[self.comm] * size, workers * 4 * size
        return (
            sent / min(link, self.in_rate),
            size * (self.fixed_s + self.worker_s * workers),
            fetched / min(link, self.out_rate),
        )

    def most_workers(self, size: float, link: float, limit_s: float) -> int:
        """The largest number of workers whose exchange ends within the limit."""
        up, down = min(link, self.in_rate), min(link, self.out_rate)
        each = size * (SENT_BYTES[self.comm] / up + self.worker_s + 4 / down)
        return max(0, int((limit_s - size * self.fixed_s) / each))


FORMULAS = """\
```text
P parameters, N workers, s bytes per parameter sent (float32 4, bf16 2, int8 1), 4 received
in, out, c0, c1: of one core that the server has for itself; disk: bytes/s
L    bytes/s of the server's link: bits/s / 8 x {usable}; each worker's link is assumed to be no
     slower than L / N, and the two directions not to disturb each other
submit = N s P / min(L, in)    commit = P (c0 + 8 / disk + c1 N)    fetch = N 4 P / min(L, out)
round  = submit + commit + fetch
most N = (limit - P (c0 + 8 / disk)) / (P (s / min(L, in) + c1 + 4 / min(L, out)))
```
"""


def describe_constants(constants: list[Constants]) -> list[str]:
    lines = [
        "| comm | of | in, MB/s | out, MB/s | c0, s per 10^9 parameters | "
        "c1, s per 10^9 and worker | memory, bytes per parameter |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in constants:
        figures = [c.in_rate / 1e6, c.out_rate / 1e6, c.commit_s * GB, c.worker_s * GB]
        places = (0, 0, 1, 2, 1)
        cells = [f"{x:.{p}f}" for x, p in zip([*figures, c.memory_bytes], places, strict=True)]
        of = f"{c.size / MILLION:g} M, {c.most} workers"
        lines.append(f"| {c.comm} | {of} | {' | '.join(cells)} |")
    lines += [
        "",
        f"The disk took {constants[0].disk_rate / 1e6:.0f} MB/s (512 MiB in one file, synced).",
    ]
    return lines


def describe_future(c: Constants) -> list[str]:
    """A model of 10^9 parameters, by calculation."""
    lines = [
        f"| workers | server's link | submit, s | commit, s | fetch, s | round, s | of a "
        f"{INTERVAL_S:,.0f} s interval | submit and fetch bound by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for workers in MANY_WORKERS:
        for name, mbit in LINKS_MBIT.items():
            link = mbit * 1e6 / 8 * USABLE
            phases = c.phases(FUTURE, workers, link)
            total = sum(phases)
            bound = ", ".join(
                "the network" if link <= rate else "the server" for rate in (c.in_rate, c.out_rate)
            )
            cells = [f"{x:,.0f}" for x in (*phases, total)] + [f"{100 * total / INTERVAL_S:,.0f} %"]
            lines.append(f"| {workers} | {name} | {' | '.join(cells)} | {bound} |")
    lines += [
        "",
        f"Most workers of one server, 10^9 parameters, {c.comm}:",
        "",
        "| server's link | exchange at most 10 % of the interval | as long as the interval |",
        "|---|---|---|",
    ]
    links = {**LINKS_MBIT, "without limit": 10**9}
    for name, mbit in links.items():
        link = mbit * 1e6 / 8 * USABLE
        cells = [f"{c.most_workers(FUTURE, link, share * INTERVAL_S):,}" for share in (0.1, 1.0)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines
