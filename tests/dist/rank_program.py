"""Ranks that fail on command, forked from a process that has imported torch once.

Not a test. As a program it reads requests from its standard input, one JSON object a line, and
answers on its standard output: the process numbers of the ranks, then how each of them ended.
A rank writes `ready` to a pipe of its own; the culprit acts when a line comes through its other
pipe, while the others sit in a collective, or compute, until something ends them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headway.dist import cleanup_distributed, guard_run, init_distributed
from headway.errors import ConfigError


def act(deed: str, gate: Path) -> None:
    gate.read_text()
    if deed == "raise":
        raise ValueError("the shape is wrong")
    if deed == "mistake":
        raise ConfigError("learning_rate: -1 given; allowed: 0 and up")
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if deed == "leave":
        os._exit(0)


def run_rank(folder: Path, deed: str, culprit: int, others: str) -> None:
    try:
        context = init_distributed(use_cpu=True, rendezvous_s=60, timeout_s=60)
        dist.all_reduce(torch.ones(1))
    except BaseException:
        (folder / f"ready-{os.environ['RANK']}").write_text("failed")
        raise
    try:
        with guard_run():
            (folder / f"ready-{context.rank}").write_text("ready")
            if context.rank == culprit:
                act(deed, folder / f"gate-{context.rank}")
            elif others == "compute":
                # Far beyond the limit of the test: only the watch can end it.
                deadline = time.monotonic() + 300
                while time.monotonic() < deadline:
                    torch.ones(100, 100).sum()
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == context.world_size
    finally:
        cleanup_distributed(context)


def become_rank(rank: int, request: dict[str, Any]) -> None:
    """The life of a forked child: it must not return into the loop of the parent."""
    folder = Path(request["folder"])
    stderr = os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stderr, 2)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    size = request["size"]
    os.environ.update(request["environ"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    code = 0
    try:
        run_rank(folder, *request["words"])
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    # As at the end of a program, less the time that taking down an interpreter takes.
    os._exit(code)


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        ranks = {}
        for rank in range(request["size"]):
            pid = os.fork()
            if pid == 0:
                become_rank(rank, request)
            ranks[pid] = rank
        print(json.dumps({"pids": list(ranks)}), flush=True)
        while ranks:
            pid, status = os.wait()
            code = os.waitstatus_to_exitcode(status)
            print(json.dumps({"rank": ranks.pop(pid), "code": code}), flush=True)


if __name__ == "__main__":
    serve()
