"""A rank that raises, dies or stops ends all ranks soon; the message says which one, and why."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from headway.dist import guard_run, init_distributed, watch
from headway.testing import RankFailure, run_ranks

PROGRAM = Path(__file__).with_name("rank_program.py")
# What the promise is (10 s), and 5 s for a busy machine to schedule the processes at all.
LIMIT_S = 15.0
FROZEN_AFTER_S = 3.0


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has torch imported and forks ranks."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    yield process
    process.kill()
    process.communicate()


class Job:
    """Ranks as processes: what they say, and how they end."""

    def __init__(self, nursery: subprocess.Popen[bytes], folder: Path, size: int) -> None:
        self.nursery, self.folder, self.size = nursery, folder, size
        self.codes: dict[int, int] = {}
        self.pids: list[int] = []
        for rank in range(size):
            os.mkfifo(folder / f"ready-{rank}")
            os.mkfifo(folder / f"gate-{rank}")

    def start(self, environ: Mapping[str, str], words: tuple[str, int, str]) -> None:
        request = {"folder": str(self.folder), "size": self.size, "words": words}
        assert self.nursery.stdin is not None
        self.nursery.stdin.write(json.dumps({**request, "environ": dict(environ)}).encode() + b"\n")
        self.pids = self._read()["pids"]

    def _read(self, limit_s: float = 90) -> dict[str, object]:
        assert self.nursery.stdout is not None
        assert select.select([self.nursery.stdout], [], [], limit_s)[0], self.stderr()
        found: dict[str, object] = json.loads(self.nursery.stdout.readline())
        return found

    def wait_until_ready(self) -> None:
        for rank in range(self.size):
            assert (self.folder / f"ready-{rank}").read_text() == "ready", self.stderr()

    def tell(self, rank: int) -> float:
        (self.folder / f"gate-{rank}").write_text("now")
        return time.monotonic()

    def wait(self, rank: int) -> int:
        while rank not in self.codes:
            found = self._read()
            self.codes[found["rank"]] = found["code"]
        return self.codes[rank]

    def stderr(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("stderr-*")))

    def errors(self) -> list[str]:
        return [line for line in self.stderr().splitlines() if line.startswith("error: ")]

    def end(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                # It may have ended by itself just now, and its line not be read yet.
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for rank in range(len(self.pids)):
            self.wait(rank)


@contextmanager
def job(
    nursery: subprocess.Popen[bytes],
    folder: Path,
    *words: object,
    size: int = 3,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Job]:
    """Ranks under a launcher's store, which outlives each of them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "HEADWAY_FROZEN_AFTER_S": str(FROZEN_AFTER_S),
        **(environ or {}),
    }
    folder.mkdir(exist_ok=True)
    ranks = Job(nursery, folder, size)
    ranks.start(given, words)
    try:
        yield ranks
    finally:
        ranks.end()
        del store


CASES = {
    # what rank 1 does: its own exit code, what is said of it
    "raise": (1, "rank 1 of 3 failed: ValueError: the shape is wrong"),
    "kill": (-signal.SIGKILL, "rank 1 of 3 was lost: its process is gone: killed"),
    "leave": (0, "rank 1 of 3 was lost: its process is gone: killed, or ended at once"),
}


@pytest.mark.parametrize("others", ["wait", "compute"])
@pytest.mark.parametrize("deed", CASES)
def test_a_rank_that_fails_ends_the_others_and_is_named(
    deed: str, others: str, tmp_path: Path, nursery: subprocess.Popen[bytes]
) -> None:
    code, told = CASES[deed]
    with job(nursery, tmp_path, deed, 1, others) as ranks:
        ranks.wait_until_ready()
        began = ranks.tell(1)
        assert (ranks.wait(0), ranks.wait(2)) == (1, 1), ranks.stderr()
        took_s = time.monotonic() - began
        assert ranks.wait(1) == code
        (line,) = ranks.errors()
        assert line.startswith(f"error: {told}")
        if others == "wait":
            assert f"PeerFailure: {told}" in ranks.stderr()
        assert took_s < LIMIT_S


def test_a_rank_that_is_stopped_ends_the_others_and_then_itself(
    tmp_path: Path, nursery: subprocess.Popen[bytes]
) -> None:
    with job(nursery, tmp_path, "stop", 1, "wait") as ranks:
        ranks.wait_until_ready()
        began = ranks.tell(1)
        assert (ranks.wait(0), ranks.wait(2)) == (1, 1), ranks.stderr()
        assert time.monotonic() - began < LIMIT_S + FROZEN_AFTER_S
        (line,) = ranks.errors()
        assert line.startswith("error: rank 1 of 3 was lost: it is stopped (SIGSTOP)")
        # Were it to go on, it would train alone.
        os.kill(ranks.pids[1], signal.SIGCONT)
        assert ranks.wait(1) == 1


def test_a_mistake_of_the_user_s_ends_the_others_with_its_own_exit_code(
    tmp_path: Path, nursery: subprocess.Popen[bytes]
) -> None:
    with job(nursery, tmp_path, "mistake", 1, "compute") as ranks:
        ranks.wait_until_ready()
        ranks.tell(1)
        assert (ranks.wait(0), ranks.wait(2)) == (2, 2), ranks.stderr()


@pytest.mark.parametrize("deed", ["raise", "kill", "stop"])
def test_rank_0_is_named_too_when_it_keeps_the_store_itself(
    deed: str, tmp_path: Path, nursery: subprocess.Popen[bytes]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    with job(nursery, tmp_path, deed, 0, "wait", environ=environ) as ranks:
        ranks.wait_until_ready()
        began = ranks.tell(0)
        assert (ranks.wait(1), ranks.wait(2)) == (1, 1), ranks.stderr()
        assert time.monotonic() - began < LIMIT_S + (FROZEN_AFTER_S if deed == "stop" else 0)
        said = ranks.errors()
        assert said and all("rank 0 of 3" in line for line in said), ranks.stderr()
        if deed == "raise":
            assert said == ["error: rank 0 of 3 failed: ValueError: the shape is wrong"]


def test_ranks_that_do_not_fail_end_well_without_a_word(
    tmp_path: Path, nursery: subprocess.Popen[bytes]
) -> None:
    with job(nursery, tmp_path, "nothing", 1, "wait") as ranks:
        ranks.wait_until_ready()
        ranks.tell(1)
        assert [ranks.wait(rank) for rank in range(3)] == [0, 0, 0]
        assert ranks.stderr() == ""


def test_a_restart_on_the_same_store_does_not_meet_the_attempt_before(
    tmp_path: Path, nursery: subprocess.Popen[bytes]
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_PORT": str(store.port)}
    with job(nursery, tmp_path / "0", "kill", 1, "wait", environ=where) as ranks:
        ranks.wait_until_ready()
        ranks.tell(1)
        assert (ranks.wait(0), ranks.wait(2)) == (1, 1)
    # A machine that joins or leaves starts all ranks again without a restart being counted.
    for attempt, count in (("1", "1"), ("2", "1")):
        again = {**where, "TORCHELASTIC_RESTART_COUNT": count}
        with job(nursery, tmp_path / attempt, "nothing", 0, "wait", environ=again) as ranks:
            ranks.wait_until_ready()
            ranks.tell(0)
            assert [ranks.wait(rank) for rank in range(3)] == [0, 0, 0], ranks.stderr()


def hold_every_thread(how: str) -> float:
    """Rank 1 makes one call in which no other thread of its process gets a turn."""
    watch.BEAT_S = 0.1
    context = init_distributed(use_cpu=True)
    with guard_run():
        began = time.monotonic()
        if context.rank == 1 and how == "computes":
            before_s = time.thread_time()
            sum(range(10**7))
            sum(range(int(8 * 10**7 / (time.thread_time() - before_s))))
        elif context.rank == 1:
            ctypes.PyDLL(None).sleep(60)
        context.barrier()
        return time.monotonic() - began


def test_a_rank_that_computes_is_not_lost_though_it_gives_no_sign() -> None:
    limits = {"HEADWAY_FROZEN_AFTER_S": "1"}
    took_s = run_ranks(hold_every_thread, 2, "computes", timeout_s=120, env=limits)
    assert min(took_s) > 3.5, "longer than a rank that does nothing may be silent"


def test_a_rank_that_gives_no_sign_and_does_nothing_is_lost() -> None:
    limits = {"HEADWAY_FROZEN_AFTER_S": "1"}
    with pytest.raises(RankFailure) as caught:
        run_ranks(hold_every_thread, 2, "sleeps", timeout_s=50, env=limits)
    assert caught.value.rank == 0, "the one that goes by itself"
