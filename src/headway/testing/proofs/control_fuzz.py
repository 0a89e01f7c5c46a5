"""Proof that nobody hurts a run over its control server: fuzzed requests, and a flood of them.

Owns: sending requests by number to a server beside a training loop, judging every answer and every
command that reaches the run, memory, and the time of steps in a flood. Does not own: the requests
(control_requests.py), the process (controlled.py).

The fuzz lifts the limits on requests per second, for it would otherwise take an hour; the flood
holds the server as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headway.control.listener import ACCEPT_BURST
from headway.testing.controlled import ControlledProcess, Options
from headway.testing.proofs.control_requests import ALLOWED, FORBIDDEN, Facts, Maker, Request
from headway.testing.proofs.outcome import Outcome

MOST_GROWTH_BYTES = 10 << 20
_NUM_CLIENTS = 24
_STRETCH_S = 3.0
_PATIENCE_S = 1.0
_RECV_S = 0.3
_WARM_UP = 0.1
_ANSWER = re.compile(rb"HTTP/1\.[01] ([0-9]{3}) ")
_REFUSALS = {400, 401, 403, 404, 405, 408, 409, 411, 413, 414, 415, 417, 421, 429, 431, 503}


@dataclass
class _Tally:
    """What all clients saw."""

    outcome: Outcome
    accepted: set[str] = field(default_factory=set)
    num_unanswered: int = 0
    """Of requests that may act and whose answer was not seen."""
    lock: threading.Lock = field(default_factory=threading.Lock)


def prove_control_fuzz(num_requests: int, seed: int, *, with_torch: bool = True) -> Outcome:
    """So many requests at a server beside training: no effect that nobody may have, no crash, no
    growth. `requests to repeat` of a failure are `Maker(facts, seed).make(number)`."""
    outcome = Outcome("fuzzed requests to a control server", seed)
    with _served(limited=False, torch=with_torch, patience_s=_PATIENCE_S) as (target, log):
        maker, tally = Maker(_facts(target), seed), _Tally(outcome)
        warm_up = int(num_requests * _WARM_UP)
        taken = _fuzz(target, maker, tally, range(warm_up))
        before = target.look()
        taken += _fuzz(target, maker, tally, range(warm_up, num_requests))
        taken += target.take()
        after = target.look()
        _judge_commands(taken, tally)
        growth = after["rss_bytes"] - before["rss_bytes"]
        outcome.counts["growth in KiB"] = growth >> 10
        if growth > MOST_GROWTH_BYTES:
            outcome.fail(f"memory grew by {growth:,} bytes after {warm_up} requests")
        if after["num_descriptors"] > before["num_descriptors"] + _NUM_CLIENTS:
            outcome.fail(f"descriptors: {before['num_descriptors']} -> {after['num_descriptors']}")
        _judge_end(target, log, outcome)
    return outcome


def _facts(target: ControlledProcess) -> Facts:
    return Facts(target.host, target.job_id, str(target.run_id), target.routes, target.tokens)


@contextlib.contextmanager
def _served(**options: Any) -> Iterator[tuple[ControlledProcess, Path]]:
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        log, run = Path(folder, "log"), Path(folder, "run")
        run.mkdir()
        lines = ({"type": "train", "global_step": s, "loss": 1.0} for s in range(1, 100))
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run / "trainer_logs.jsonl").write_text(text)
        made = Options(root=f"{folder}/jobs", log=str(log), output_dir=str(run), **options)
        with ControlledProcess(made) as target:
            yield target, log


def _fuzz(
    target: ControlledProcess, maker: Maker, tally: _Tally, numbers: range
) -> list[dict[str, Any]]:
    """Send the requests of these numbers, in parallel, while the process trains."""
    waiting = iter(numbers)

    def work() -> None:
        while True:
            with tally.lock:
                number = next(waiting, None)
            if number is None:
                return
            try:
                request = maker.make(number)
                _judge(request, _send(target, request), tally, maker.facts)
            except Exception as error:
                with tally.lock:
                    tally.outcome.fail(f"request {number}: {type(error).__name__}: {error}")

    clients = [threading.Thread(target=work) for _ in range(_NUM_CLIENTS)]
    for client in clients:
        client.start()
    taken: list[dict[str, Any]] = []
    while any(client.is_alive() for client in clients):
        tally.outcome.counts["steps meanwhile"] += target.begin_steps(_STRETCH_S)()["steps"]
        taken += target.take()
    return taken


def _send(target: ControlledProcess, request: Request) -> bytes | None:
    """All that comes back; None where it was not waited for, or did not come in time."""
    with target.connect() as mine:
        try:
            if request.how == "pieces":
                chance = random.Random(request.number)
                cut = chance.randint(0, len(request.data))
                mine.sendall(request.data[:cut])
                time.sleep(0.005)
                mine.sendall(request.data[cut:])
            else:
                mine.sendall(request.data)
            if request.how == "close":
                return None
            if request.how == "reset":
                mine.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return None
            return _receive(mine)
        except ConnectionError:
            return None


def _receive(mine: socket.socket) -> bytes | None:
    received = b""
    mine.settimeout(_RECV_S)
    try:
        while block := mine.recv(65536):
            received += block
    except TimeoutError:
        # A request that goes on: told that nothing follows, the server ends it.
        mine.settimeout(30.0)
        mine.shutdown(socket.SHUT_WR)
        while block := mine.recv(65536):
            received += block
    return received or None


def _judge(request: Request, answer: bytes | None, tally: _Tally, facts: Facts) -> None:
    with tally.lock:
        counts, fail = tally.outcome.counts, tally.outcome.fail
        counts["requests"] += 1
        if answer is None:
            counts["unanswered"] += 1
            tally.num_unanswered += request.may_act
            return
        about = f"request {request.number} ({request.data[:60]!r}...)"
        found = _ANSWER.match(answer)
        status = int(found[1]) if found else 0
        counts[f"answers {status // 100}xx"] += 1
        if status not in (200, 304) and status not in _REFUSALS:
            fail(f"{about}: answered {status}: {answer[:200]!r}")
        if b"\r\nServer: headway\r\n" not in answer or answer.count(b"\r\nServer:") != 1:
            fail(f"{about}: not one answer of ours: {answer[:300]!r}")
        if any(token.encode() in answer for token in facts.tokens.values()):
            fail(f"{about}: a token was in the answer")
        if request.must_succeed and status not in (200, 429):
            fail(f"{about}: valid, but answered {status}: {answer[:300]!r}")
        receipt = _read_receipt(answer) if status == 200 and request.data[:4] == b"POST" else None
        if receipt is not None:
            counts["commands accepted"] += 1
            if not request.may_act or facts.tokens["control"].encode() not in request.data:
                fail(f"{about}: accepted without the right to it")
            tally.accepted.add(receipt)


def _read_receipt(answer: bytes) -> str | None:
    """The id of the command that an answer says was accepted."""
    said = json.loads(answer.partition(b"\r\n\r\n")[2])
    return str(said["id"]) if isinstance(said, dict) and "accepted_at" in said else None


def _judge_commands(taken: list[dict[str, Any]], tally: _Tally) -> None:
    """Everything that reached the run was asked for by somebody who may."""
    outcome, unknown = tally.outcome, 0
    outcome.counts["commands that reached the run"] = len(taken)
    for command_id, times in Counter(command["id"] for command in taken).items():
        if times > 1:
            outcome.fail(f"the command {command_id} reached the run {times} times")
        if FORBIDDEN[:6] in command_id:
            outcome.fail(f"a command that nobody may give reached the run: {command_id}")
        elif command_id not in tally.accepted and not command_id.startswith(ALLOWED):
            unknown += 1
    if unknown > tally.num_unanswered:
        outcome.fail(f"{unknown} commands of nobody reached the run")
    missing = tally.accepted - {command["id"] for command in taken}
    if missing:
        outcome.fail(f"{len(missing)} accepted commands did not reach the run: {min(missing)}")


def _judge_end(target: ControlledProcess, log: Path, outcome: Outcome) -> None:
    text = log.read_text(errors="replace")
    for word in ("Traceback", "ERROR", *target.tokens.values()):
        if word in text:
            at = text.index(word)
            outcome.fail(f"the log says: {text[max(0, at - 300) : at + 1500]}")
            break
    code = target.end()
    if code:
        outcome.fail(f"the process ended with {code}")


@dataclass(frozen=True)
class FloodResult:
    """Steps in quiet and in flooded stretches, in turn."""

    ratios: tuple[float, ...]
    """Mean step time of each flooded stretch over that of the quiet ones around it."""
    median_ratio: float
    server_share: float
    """Seconds of a core that the rest of the process used in the flood, for each second."""
    num_requests: int
    answer_s: tuple[float, float]
    """How long the run's owner waited for an answer in the flood: median and longest."""
    growth_bytes: int
    pinned: bool
    load: float
    """Of the machine by others and all of this, as the system tells it."""


def measure_flood(
    seed: int, *, num_pairs: int = 12, stretch_s: float = 4.0, with_torch: bool = True
) -> FloodResult:
    """The cost of a flood to training, with all limits of the server in place."""
    cores = sorted(os.sched_getaffinity(0))
    pinned = len(cores) > 1
    with _served(limited=True, torch=with_torch) as (target, _):
        if pinned:
            os.sched_setaffinity(0, set(cores[1:]))
        try:
            return _measure(target, seed, num_pairs, stretch_s, cores[0] if pinned else None)
        finally:
            os.sched_setaffinity(0, set(cores))


def _measure(
    target: ControlledProcess, seed: int, num_pairs: int, stretch_s: float, core: int | None
) -> FloodResult:
    # Strangers: their tokens are random ones.
    maker = Maker(replace(_facts(target), tokens={}), seed)
    target.begin_steps(2.0, core)()
    # The burst that is allowed at first is not what a flood costs.
    counter = _Flood(target, maker)
    with counter:
        while counter.num_sent < 1.5 * ACCEPT_BURST:
            target.begin_steps(stretch_s, core)()
    before = target.look()
    quiet, flooded, shares, answers = [_steps(target, stretch_s, core)], [], [], []
    for _ in range(num_pairs):
        with counter:
            began, done = _cpu_s(target.pid), target.begin_steps(stretch_s, core)
            answers.append(_time_owner(target))
            facts = done()
            shares.append((_cpu_s(target.pid) - began - facts["cpu_s"]) / stretch_s)
        flooded.append(facts["mean_s"])
        target.take()
        quiet.append(_steps(target, stretch_s, core))
    after = target.look()
    ratios = tuple(f / (0.5 * (quiet[i] + quiet[i + 1])) for i, f in enumerate(flooded))
    return FloodResult(
        ratios=ratios,
        median_ratio=statistics.median(ratios),
        server_share=statistics.fmean(shares),
        num_requests=counter.num_sent,
        answer_s=(statistics.median(answers), max(answers)),
        growth_bytes=after["rss_bytes"] - before["rss_bytes"],
        pinned=core is not None,
        load=os.getloadavg()[0],
    )


def _steps(target: ControlledProcess, stretch_s: float, core: int | None) -> float:
    mean_s: float = target.begin_steps(stretch_s, core)()["mean_s"]
    return mean_s


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _time_owner(target: ControlledProcess) -> float:
    began = time.monotonic()
    head = f"GET /jobs/{target.job_id}/status HTTP/1.1\r\nHost: {target.host}\r\n"
    head += f"Authorization: Bearer {target.tokens['read']}\r\n\r\n"
    with target.connect(60.0) as mine:
        mine.sendall(head.encode())
        received = mine.recv(64)
    if not received.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"the owner was answered {received!r} in a flood")
    return time.monotonic() - began


class _Flood:
    """Requests of strangers, as many as the server takes, while it is entered."""

    def __init__(self, target: ControlledProcess, maker: Maker) -> None:
        self.num_sent = 0
        self._target, self._maker = target, maker
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> None:
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(i, self._over)) for i in range(_NUM_CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, index: int, over: threading.Event) -> None:
        number = index * 10_000_000 + self.num_sent
        while not over.is_set():
            number += 1
            request = self._maker.make(number)
            with contextlib.suppress(OSError), self._target.connect(1.0) as mine:
                mine.sendall(request.data)
                self.num_sent += 1
                mine.settimeout(0.2)
                mine.recv(65536)

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
