"""Proof that DiLoCo workers that are killed at any moment come back and count once.

Owns: a worker in a child that gets SIGKILL at a chosen place of its exchange, another that lives, a
server for both. Does not own: the children (forkserver.py), kills of workers that really train
(diloco_training_kills.py), of servers (diloco_server_kills.py), what a ledger must say
(diloco_books.py), faults of the network (proxy.py).
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch

from headway.testing.diloco import ToyWorker, serving
from headway.testing.forkserver import ForkServer
from headway.testing.proofs.diloco_books import check_ledger
from headway.testing.proofs.outcome import Outcome, memory_folder

PHASES = (
    "step",
    "before_submit",
    "half_submitted",
    "submitted",
    "asked",
    "before_fetch",
    "fetched",
    "written",
    "saving",
    "registered",
    "beaten",
)
"""After a local step; around handing in, and in the middle of it; after a question about the round;
around fetching; when the new parameters are in the model but in no checkpoint; while one is
written; after a registration; after a sign of life."""
_LIMIT_S = 60.0
_STEPS_PER_LIFE = 4


# -- a worker -----------------------------------------------------------------------------------


def work_child(folder: str, address: str, number: int, goal: int, phase: str, at: int) -> None:
    """A child: trains from its last checkpoint to a step, and saves after every one."""
    place = Path(folder)
    worker = ToyWorker(
        address,
        number,
        sync_every=3,
        timeout=20.0,
        max_sync_retries=50,
        first_pause_s=0.02,
        session_file=place / f"session-{number}.json",
    )
    trap = _Trap(phase, at)
    trap.set(worker)
    file = place / f"worker-{number}.json"
    if file.exists():
        worker.resume(_decode(json.loads(file.read_text())))
    else:
        worker.start()
    while worker.step < goal:
        worker.train(1)
        beside = file.with_suffix(".new")
        beside.write_text(json.dumps(_encode(worker.save())))
        trap.pass_by("saving")
        beside.rename(file)
    worker.worker.stop()


class _Trap:
    """Kills this process at the so-manieth passage of a place."""

    def __init__(self, phase: str, at: int) -> None:
        self._phase, self._left = phase, at

    def pass_by(self, phase: str) -> None:
        if phase == self._phase:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)

    def set(self, worker: ToyWorker) -> None:
        client: Any = worker.worker._session.client
        self._wrap(client, "submit", "before_submit", "submitted")
        self._wrap(client, "ask_round", None, "asked")
        self._wrap(client, "fetch", "before_fetch", "fetched")
        self._wrap(client, "register", None, "registered")
        self._wrap(client, "heartbeat", None, "beaten")
        self._wrap(worker.view, "write_from_leader", None, "written")
        self._wrap(worker.worker, "after_step", "step", None)
        count = client._count_sent

        def torn(message: Any) -> Any:
            for chunk in count(message):
                half = len(chunk) // 2
                yield bytes(chunk)[:half]
                self.pass_by("half_submitted")
                yield bytes(chunk)[half:]

        client._count_sent = torn

    def _wrap(self, owner: Any, name: str, before: str | None, after: str | None) -> None:
        real = getattr(owner, name)

        def trapped(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                self.pass_by(before)
            result = real(*args, **kwargs)
            if after is not None:
                self.pass_by(after)
            return result

        setattr(owner, name, trapped)


def _encode(saved: dict[str, Any]) -> dict[str, Any]:
    def spell(values: dict[str, Any]) -> dict[str, Any]:
        return {name: tensor.tolist() for name, tensor in values.items()}

    slots = {slot: spell(values) for slot, values in saved["slots"].items()}
    return {**saved, "weights": spell(saved["weights"]), "slots": slots}


def _decode(saved: dict[str, Any]) -> dict[str, Any]:
    def read(values: dict[str, Any]) -> dict[str, Any]:
        return {name: torch.tensor(numbers) for name, numbers in values.items()}

    slots = {slot: read(values) for slot, values in saved["slots"].items()}
    return {**saved, "weights": read(saved["weights"]), "slots": slots}


# -- the proof ----------------------------------------------------------------------------------


def prove_worker_kills(num_kills: int, seed: int, phases: tuple[str, ...] = PHASES) -> Outcome:
    """One run in which a worker is killed so often, at each place in its turn."""
    outcome = Outcome("kills of a DiLoCo worker", seed)
    chance = random.Random(seed)
    preload = ("torch", "headway.testing.diloco", __name__)
    with memory_folder() as folder, ForkServer(log=folder / "log", preload=preload) as forks:
        options = {"min_workers": 1, "heartbeat_s": 1.0, "deadline_s": 60.0}
        with serving(
            folder / "run", num_workers=2, keep_submissions=True, accumulate="float64", **options
        ) as server:

            def start(number: int, goal: int, phase: str, at: int) -> int:
                return forks.start(
                    f"{__name__}:work_child", folder=str(folder), address=server.address,
                    number=number, goal=goal, phase=phase, at=at,
                )  # fmt: skip

            other = start(1, 1 << 30, "never", 0)
            for number in range(num_kills + 1):
                last = number == num_kills
                phase = "never" if last else phases[number % len(phases)]
                at = chance.randint(1, 2 if phase in ("registered", "beaten") else 3)
                # A sign of life or a registration may never come a second time.
                at = 1 if phase == "registered" else at
                goal = _step_of(folder) + _STEPS_PER_LIFE * 3 if last else 1 << 30
                began, rounds = time.monotonic(), server.core.totals.num_rounds
                pid = start(0, goal, phase, at)
                code = _await(forks, pid)
                if code != (0 if last else -signal.SIGKILL):
                    log = (folder / "log").read_text()[-2000:]
                    outcome.fail(f"life {number} ({phase} {at}) ended with {code}: {log}")
                    break
                outcome.counts["kills"] += not last
                outcome.counts[f"kills: {phase}"] += not last
                if server.core.totals.num_rounds > rounds:
                    slowest, took = "most ms of a life with a round", time.monotonic() - began
                    outcome.counts[slowest] = max(outcome.counts[slowest], int(1000 * took))
            forks.kill(other)
            forks.wait(other)
        if not outcome.failures:
            check_ledger(folder / "run", outcome, server.state_hash)
    return outcome


def _step_of(folder: Path) -> int:
    file = folder / "worker-0.json"
    return int(json.loads(file.read_text())["step"]) if file.exists() else 0


def _await(forks: ForkServer, pid: int) -> int:
    limit = time.monotonic() + _LIMIT_S
    while pid not in forks.wait_any(0.05):
        if time.monotonic() > limit:
            forks.kill(pid)
            forks.wait(pid)
            return -999
    return forks.wait(pid)
