"""Proof that workers that really train live through the death of their server.

Owns: a server in a child that is killed from outside at moments that chance chooses and started
again at its address, while `headway diloco worker` goes on in other children. Does not own: those
(diloco_training_kills.py), kills at chosen places of a commit (diloco_server_kills.py), what a
ledger must say (diloco_books.py).
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

from headway.checkpoint.manifest import committed
from headway.diloco.ledger import LEDGER_NAME, Ledger
from headway.diloco.server import DiLoCoServer
from headway.testing.forkserver import ForkServer
from headway.testing.proofs.diloco_books import check_ledger
from headway.testing.proofs.diloco_training_kills import (
    FOREVER,
    HEARTBEAT_S,
    PRELOAD,
    RESUMED_S,
    RUN,
    name_of,
)
from headway.testing.proofs.outcome import Outcome, memory_folder

NUM_WORKERS = 2
_LONGEST_LIFE_S = 1.0
_LIMIT_S = 60.0
_TURN_S = 0.01
_CHILD = "headway.testing.proofs.diloco_training_kills:train_child"
_STOPPED = (0, 128 + signal.SIGTERM)


def serve_child(folder: str, port: int) -> None:
    """A child: serves at a port, 0 for any, until it is killed."""
    server = DiLoCoServer(
        output_dir=f"{folder}/run", num_workers=NUM_WORKERS, disable_auth=True, port=port,
        keep_submissions=True, accumulate="float64", heartbeat_s=HEARTBEAT_S,
    )  # fmt: skip
    server.start()
    beside = Path(folder, "port.new")
    beside.write_text(f"{os.getpid()} {server.port}")
    beside.rename(Path(folder, "port"))
    while True:
        signal.pause()


def prove_outages(num_kills: int, seed: int, resumed_s: float = RESUMED_S) -> Outcome:
    """One run of two workers whose server is killed so often."""
    outcome = Outcome("kills of a DiLoCo server under workers that train", seed)
    chance = random.Random(seed)
    preload = (*PRELOAD, __name__)
    with memory_folder() as folder, ForkServer(log=folder / "log", preload=preload) as forks:
        (folder / "run.yaml").write_text(RUN)
        trial = _Trial(folder, forks, outcome, resumed_s)
        if trial.run(num_kills, chance):
            trial.look()
        elif outcome.failures:
            outcome.failures[-1] += f"\n{(folder / 'log').read_text()[-3000:]}"
    return outcome


class _Trial:
    """The server and the workers of one proof."""

    def __init__(self, folder: Path, forks: ForkServer, outcome: Outcome, resumed_s: float) -> None:
        self._folder, self._forks = folder, forks
        self._outcome, self._resumed_s = outcome, resumed_s
        self._workers: list[int] = []
        self._port = 0

    def run(self, num_kills: int, chance: random.Random) -> bool:
        """Whether it came to its end."""
        server = self._serve()
        for number in range(NUM_WORKERS):
            child = self._forks.start(
                _CHILD, folder=str(self._folder), address=f"127.0.0.1:{self._port}",
                number=number, max_steps=FOREVER,
            )  # fmt: skip
            self._workers.append(child)
        if not self._await_round(time.monotonic(), measured=False):
            return False
        for _ in range(num_kills):
            time.sleep(chance.uniform(0, _LONGEST_LIFE_S))
            self._forks.kill(server)
            if (code := self._forks.wait(server)) != -signal.SIGKILL:
                self._outcome.fail(f"the server ended with {code} before it was killed")
                return False
            self._outcome.counts["kills"] += 1
            server = self._serve()
            # One life in two is long enough for a round whatever chance says.
            if chance.random() < 0.5 and not self._await_round(time.monotonic()):
                return False
        if not self._await_round(time.monotonic()):
            return False
        for worker in self._workers:
            self._forks.kill(worker, signal.SIGTERM)
            if (code := self._forks.wait(worker)) not in _STOPPED:
                self._outcome.fail(f"a worker ended with {code}")
                return False
        self._forks.kill(server)
        self._forks.wait(server)
        return True

    def _serve(self) -> int:
        """Start the server; returns when it listens."""
        folder = str(self._folder)
        child = self._forks.start(f"{__name__}:serve_child", folder=folder, port=self._port)
        file, limit = self._folder / "port", time.monotonic() + _LIMIT_S
        while time.monotonic() < limit:
            if file.exists():
                who, port = map(int, file.read_text().split())
                if who == child:
                    self._port = port
                    return child
            time.sleep(_TURN_S)
        raise TimeoutError(f"no server: {(self._folder / 'log').read_text()[-2000:]}")

    def _num_lines(self) -> int:
        file = self._folder / "run" / LEDGER_NAME
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def _await_round(self, began: float, *, measured: bool = True) -> bool:
        """Wait for the next round."""
        before, limit = self._num_lines(), began + _LIMIT_S
        while time.monotonic() < limit:
            if self._num_lines() > before:
                if measured:
                    self._note(time.monotonic() - began)
                return True
            if ended := self._forks.wait_any(_TURN_S):
                self._outcome.fail(f"processes {ended} ended by themselves")
                return False
        self._outcome.fail(f"no round within {_LIMIT_S:g} s")
        return False

    def _note(self, took_s: float) -> None:
        counts, most = self._outcome.counts, "most ms from a restart to a round"
        counts["measured: a restart to a round"] += 1
        counts[most] = max(counts[most], int(1000 * took_s))
        if took_s > self._resumed_s:
            self._outcome.fail(f"it took {took_s:.2f} s from a restart to a round")

    def look(self) -> None:
        """The ledger, the state on the disk, and what workers were told are one story."""
        run = self._folder / "run"
        ledger = Ledger(run, keep_submissions=True)
        ledger.open()
        state, _ = ledger.resume()
        ledger.close()
        check_ledger(run, self._outcome, state.hash)
        for number in range(NUM_WORKERS):
            newest = committed(self._folder / name_of(number))[-1]
            text = json.loads((newest.path / "state" / "callbacks.json").read_text())
            said = text["DiLoCoCallback"]
            (round_id,) = said["rounds"]
            if int(round_id.split("-")[1]) > state.commit + 1:
                self._outcome.fail(f"{name_of(number)} was told of {round_id}, which is not there")
            self._outcome.counts["reconnections"] += said["reconnections"]
