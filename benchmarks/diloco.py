"""What a DiLoCo server costs: memory, time and bytes per round, by model size and workers.

A real server in a process of its own, clients as threads of this one, real sockets on one machine.
A round has three phases, one after the other: all workers submit, the server applies and commits,
all workers fetch. From the largest model's figures follow constants, and from these, by the
formulas that are printed, what larger models and slower networks would need.

    python benchmarks/diloco.py [--sizes 1 10 100] [--workers 1 2 4 8] [--rounds 3]
        [--limit-s 600] [--write]

Sizes are millions of parameters. The state is kept in a folder under TMPDIR: its disk is measured.
Server and clients share the machine's cores, and whatever else runs there: the calculation goes by
the server's processor time, which does not depend on that.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from diloco_calculation import (
    FORMULAS,
    FUTURE,
    GB,
    MILLION,
    SENT_BYTES,
    USABLE,
    Constants,
    describe_constants,
    describe_future,
)

from headway.diloco import DiLoCoClient, DiLoCoServer, Specification, core, ledger
from headway.diloco.compression import COMMS, encode
from headway.diloco.wire import Message, compose

MIB = 1 << 20
LARGE = 50 * MILLION
"""From here on, two rounds are enough: they take seconds, not moments."""


@dataclass
class Case:
    """One size, number of workers and way to communicate; seconds are of the quickest round."""

    size: int
    workers: int
    comm: str
    round_s: float
    submit_s: float
    commit_s: float
    apply_s: float
    """The arithmetic of the commit; the rest of it is the disk's."""
    fetch_s: float
    submit_cpu_s: float
    commit_cpu_s: float
    fetch_cpu_s: float
    encode_s: float
    """On the worker's side, before it sends."""
    received_bytes: int
    sent_bytes: int
    peak_bytes: int
    """Growth of the server's resident memory since before it had a model."""
    anonymous_bytes: int
    """Of it, what is not pages of files, which the system takes back when it needs them."""


def make_tensors(size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Layers of about a sixteenth of the model each."""
    rows = max(1, size // 16 // 1000)
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{k}.weight": torch.randn(rows, 1000, generator=generator) * 0.02 for k in range(16)
    }


# -- the server's process ---------------------------------------------------------------------


def serve(folder: str, workers: int, size: int) -> None:
    """Serve until standard input ends; tells its address, then the times of every commit."""
    torch.set_num_threads(1)
    (torch.ones(1000) * 2).sum().item()
    base = read_memory(os.getpid())
    core.apply_round = timed(core.apply_round, "apply_s")  # type: ignore[assignment]
    ledger.Ledger.commit = timed(ledger.Ledger.commit, "disk_s")  # type: ignore[method-assign]
    server = DiLoCoServer(
        make_tensors(size),
        output_dir=folder,
        num_workers=workers,
        disable_auth=True,
        max_norm_ratio=None,
        max_uploads=max(8, workers),
    )
    server.start()
    print(json.dumps({"address": server.address, "base": base}), flush=True)
    sys.stdin.read()
    server.stop()


def timed(act: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = act(*given, **named)
        print(json.dumps({name: time.perf_counter() - began}), flush=True)
        return result

    return run


def read_memory(pid: int) -> dict[str, int]:
    """Bytes, by the names of /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {n: int(v.split()[0]) * 1024 for n, v in (x.split(":", 1) for x in lines) if "kB" in v}


def read_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class ServerProcess:
    """The server's process, looked at from outside."""

    def __init__(self, folder: str, workers: int, size: int) -> None:
        words = [sys.executable, __file__, "--serve", folder, str(workers), str(size)]
        self.child = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        told = self.read()
        self.address, self.base = told["address"], told["base"]
        self.anonymous_bytes = 0
        self._watching = True
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()

    def read(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        found: dict[str, Any] = json.loads(self.child.stdout.readline())
        return found

    def _look(self) -> None:
        while self._watching:
            grown = read_memory(self.child.pid).get("RssAnon", 0) - self.base["RssAnon"]
            self.anonymous_bytes = max(self.anonymous_bytes, grown)
            time.sleep(0.02)

    def forget_peaks(self) -> None:
        Path(f"/proc/{self.child.pid}/clear_refs").write_text("5")
        self.anonymous_bytes = 0

    @property
    def peak_bytes(self) -> int:
        return read_memory(self.child.pid)["VmHWM"] - self.base["VmRSS"]

    @property
    def cpu_s(self) -> float:
        return read_cpu_s(self.child.pid)

    def stop(self) -> None:
        self._watching = False
        self._watch.join()
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait(60)


@contextmanager
def server_process(workers: int, size: int) -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory() as folder:
        process = ServerProcess(folder, workers, size)
        try:
            yield process
        finally:
            process.stop()


# -- rounds -----------------------------------------------------------------------------------


def together(workers: int, act: Callable[[int], Any]) -> tuple[list[Any], float]:
    """What all workers get, acting at one time, and the seconds until the last has it."""
    results: list[Any] = [None] * workers

    def run(number: int) -> None:
        try:
            results[number] = act(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(workers)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent_s = time.perf_counter() - began
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results, spent_s


class Workers:
    """The clients of one server."""

    def __init__(self, process: ServerProcess, workers: int, size: int, comm: str) -> None:
        self.process, self.num, self.size, self.comm = process, workers, size, comm
        self.tensors = make_tensors(size, seed=1)
        self.specification = Specification.of(self.tensors)
        self.clients = [DiLoCoClient(process.address) for _ in range(workers)]
        self.sessions = []
        for number, client in enumerate(self.clients):
            facts = {"worker_id": f"{comm}-{number}", "sync_every": 500, "comm": comm}
            facts["model"] = {
                "fingerprint": self.specification.fingerprint,
                "layout": self.specification.layout,
            }
            told = client.register(facts)
            self.sessions.append({"worker": facts["worker_id"], "session": told["session"]})
        self.round_id = told["round_id"][0]

    def leave(self) -> None:
        for client, me in zip(self.clients, self.sessions, strict=True):
            client.deregister({"worker_id": me["worker"], "session": me["session"]})

    def run_round(self) -> Case:
        process, client = self.process, self.clients[0]
        before = client.status()
        began = time.perf_counter()
        message = self._compose()
        encode_s = time.perf_counter() - began
        cpu = [process.cpu_s]
        _, submit_s = together(self.num, lambda number: self._submit(number, message))
        cpu.append(process.cpu_s)
        answers, _ = together(self.num, self._wait)
        cpu.append(process.cpu_s)
        _, fetch_s = together(self.num, self._fetch)
        cpu.append(process.cpu_s)
        assert all(answer["counted"] for answer in answers)
        self.round_id = answers[0]["next_round_id"]
        after = client.status()
        apply_s, disk_s = process.read()["apply_s"], process.read()["disk_s"]
        commit_s = max(after["last_commit_s"], apply_s + disk_s)
        return Case(
            *(self.size, self.num, self.comm),
            round_s=submit_s + commit_s + fetch_s,
            submit_s=submit_s,
            commit_s=commit_s,
            apply_s=commit_s - disk_s,
            fetch_s=fetch_s,
            submit_cpu_s=cpu[1] - cpu[0],
            commit_cpu_s=cpu[2] - cpu[1],
            fetch_cpu_s=cpu[3] - cpu[2],
            encode_s=encode_s,
            received_bytes=after["received_bytes"] - before["received_bytes"],
            sent_bytes=after["sent_bytes"] - before["sent_bytes"],
            peak_bytes=process.peak_bytes,
            anonymous_bytes=process.anonymous_bytes,
        )

    def _compose(self) -> Message:
        """As a worker does: float32 travels as the parameters themselves."""
        payload = "local" if self.comm == "float32" else "pseudo-gradient"
        meta = {"payload": payload, "base": self.round_id, "fragment": 0}
        return compose(meta, encode(self.tensors, self.comm).payloads)

    def _submit(self, number: int, message: Message) -> None:
        query = {"round": self.round_id, "fragment": 0, "local_steps": 500}
        self.clients[number].submit(message, **query, **self.sessions[number])

    def _wait(self, number: int) -> dict[str, Any]:
        me = self.sessions[number]
        while True:
            answer = self.clients[number].ask_round(
                self.round_id, 0, me["worker"], me["session"], wait_s=20
            )
            if answer["state"] == "committed":
                return answer

    def _fetch(self, number: int) -> None:
        self.clients[number].fetch(0, self.specification.shapes, **self.sessions[number])


def measure(options: argparse.Namespace) -> list[Case]:
    cases: list[Case] = []
    until = time.monotonic() + options.limit_s
    for size in (int(millions * MILLION) for millions in options.sizes):
        for workers in options.workers:
            if time.monotonic() > until:
                return cases
            with server_process(workers, size) as process:
                for comm in options.comm:
                    if time.monotonic() > until:
                        break
                    everyone = Workers(process, workers, size, comm)
                    process.forget_peaks()
                    times = options.rounds if size < LARGE else min(2, options.rounds)
                    rounds = [everyone.run_round() for _ in range(times)]
                    everyone.leave()
                    best = min(rounds, key=lambda case: case.round_s)
                    # Peaks are of all rounds: the state before stays until the new one is there.
                    best.peak_bytes = max(case.peak_bytes for case in rounds)
                    best.anonymous_bytes = max(case.anonymous_bytes for case in rounds)
                    cases.append(best)
                    print(f"{size / MILLION:g} M, {workers}, {comm}: {best.round_s:.2f} s")
                    sys.stdout.flush()
    return cases


def measure_disk(num_bytes: int = 512 * MIB) -> float:
    """Bytes per second of one file, until it is safe."""
    block = os.urandom(8 * MIB)
    with tempfile.NamedTemporaryFile() as file:
        began = time.perf_counter()
        for _ in range(num_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return num_bytes / (time.perf_counter() - began)


def report(cases: list[Case], constants: list[Constants]) -> str:
    lines = [
        f"# What a DiLoCo server costs, {datetime.datetime.now(datetime.UTC).date()}",
        "",
        f"`python benchmarks/diloco.py {' '.join(sys.argv[1:])}` on {platform.machine()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}. "
        "Server in one process, all workers as threads of another, on the same cores and disk.",
        "",
        "## Measured",
        "",
        "Seconds of the quickest of the rounds; memory is the growth of the server's process since "
        "before it had a model, and of that what is no page of a file.",
        "",
        "| parameters | workers | comm | round, s | submit | commit (arithmetic) | fetch | "
        "server's processor, s | worker encodes | in, MB | out, MB | peak, MiB | "
        "without file pages |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for c in cases:
        cells = [f"{c.size / MILLION:g} M", f"{c.workers}", c.comm, f"{c.round_s:.2f}"]
        cells += [f"{c.submit_s:.2f}", f"{c.commit_s:.2f} ({c.apply_s:.2f})", f"{c.fetch_s:.2f}"]
        cells += [f"{c.submit_cpu_s + c.commit_cpu_s + c.fetch_cpu_s:.2f}"]
        cells += [f"{c.encode_s:.2f}", f"{c.received_bytes / 1e6:.1f}", f"{c.sent_bytes / 1e6:.1f}"]
        cells += [f"{c.peak_bytes / MIB:.0f}", f"{c.anonymous_bytes / MIB:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Constants", ""]
    lines += [
        "Processor time of the server, which other work on the machine does not change: bytes"
    ]
    lines += ["per second of it with the most workers, c0 and c1 a line through all commits.", ""]
    lines += describe_constants(constants)
    lines += ["", "## By calculation: 10^9 parameters", "", FORMULAS.format(usable=USABLE)]
    for c in constants:
        if c.comm == "bf16" or len(constants) == 1:
            memory = c.memory_bytes * FUTURE / 2**30
            lines += [*describe_future(c), ""]
            lines += [
                f"Memory: {c.memory_bytes:.1f} bytes per parameter, {memory:.0f} GiB, as with the "
                "most workers measured; bodies wait on the disk, N s P bytes in a round (64 "
                f"workers: {64 * SENT_BYTES[c.comm] * FUTURE / GB:.0f} GB), beside 8 bytes per "
                "parameter and kept state.",
                "",
            ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 10, 100])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--comm", nargs="+", choices=COMMS, default=list(COMMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="begin nothing more after so long"
    )
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], int(options.serve[1]), int(options.serve[2]))
        return 0
    torch.set_num_threads(1)
    cases = measure(options)
    comms = [comm for comm in options.comm if any(case.comm == comm for case in cases)]
    disk_rate = measure_disk()
    text = report(cases, [Constants.of(cases, comm, disk_rate) for comm in comms])
    print(f"\n{text}")
    if options.write:
        today = datetime.datetime.now(datetime.UTC).date()
        path = Path(__file__).parent / "results" / f"diloco-{today}.md"
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
