"""Proof that a DiLoCo server that is killed at any moment loses no round and counts none twice.

Owns: a server in a child that gets SIGKILL at a chosen place of a round, two workers that go on
with whatever server there is next, and what is found on the disk at the end. Does not own: the
children (forkserver.py), kills of workers, faults of the network (proxy.py).
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from headway.diloco.client import DiLoCoClient
from headway.diloco.compression import decode, encode
from headway.diloco.faults import RoundOver, UnknownSession, Unreachable
from headway.diloco.ledger import LEDGER_NAME, Ledger, replay
from headway.diloco.server import DiLoCoServer
from headway.diloco.specification import Specification
from headway.diloco.wire import compose
from headway.testing.faults import Fault, FaultyStorage
from headway.testing.forkserver import ForkServer
from headway.testing.proofs.outcome import Outcome, memory_folder

TOKEN = "proof-" + "t" * 32
WORKERS = ("a", "b")
PHASES = (
    "upload",
    "measure",
    "accepted",
    "apply",
    "storage",
    "line",
    "line_sync",
    "committed",
    "outside",
)
"""While a body comes; while it is looked at; when it has been accepted; while a round is applied;
at an operation on the disk; inside the line of the ledger; before it is on the disk; after the
commit, before anybody is told; at any moment, by somebody else."""
_LIMIT_S = 60.0


def make_model() -> dict[str, torch.Tensor]:
    return {f"layers.{n}.w": torch.linspace(-1, 1, 24).reshape(4, 6) * (n + 1) for n in range(3)}


# -- the server ---------------------------------------------------------------------------------


def serve_child(folder: str, mode: str, num_fragments: int, phase: str, at: int) -> None:
    """A child: serves until it dies at the `at`-th passage of that phase, or is killed."""
    server = DiLoCoServer(
        make_model(), output_dir=f"{folder}/run", num_workers=len(WORKERS), mode=mode,
        num_fragments=num_fragments, token=TOKEN, keep_submissions=True, heartbeat_s=1.0,
        deadline_s=60.0,
    )  # fmt: skip
    fault = Fault("kill", at) if phase == "storage" else None
    storage = FaultyStorage(f"{folder}/run", fault)
    if phase == "storage":
        # Counted from the first round on: the start is proven by dying in it, too, but not only.
        storage.fault = None
    server.core.ledger = Ledger(f"{folder}/run", keep_submissions=True, storage=storage)
    _set_trap(server, storage, fault, phase, at)
    server.start()
    port_file = Path(folder, "port")
    port_file.with_suffix(".new").write_text(f"{os.getpid()} {server.port}")
    port_file.with_suffix(".new").rename(port_file)
    while True:
        time.sleep(60)


def _set_trap(
    server: DiLoCoServer, storage: FaultyStorage, fault: Fault | None, phase: str, at: int
) -> None:
    core = server.core
    num_passed = 0

    def pass_by() -> None:
        nonlocal num_passed
        num_passed += 1
        if num_passed == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(owner: Any, name: str, *, after: bool = False) -> None:
        real = getattr(owner, name)

        def trapped(*args: Any, **kwargs: Any) -> Any:
            if not after:
                pass_by()
            result = real(*args, **kwargs)
            if after:
                pass_by()
            return result

        setattr(owner, name, trapped)

    if phase == "upload":
        from headway.diloco.intake import Spool

        write = Spool.write

        def torn(self: Any, data: Any) -> None:
            write(self, bytes(data)[: len(data) // 2])
            pass_by()
            write(self, bytes(data)[len(data) // 2 :])

        Spool.write = torn  # type: ignore[method-assign]
    elif phase == "measure":
        before(core, "measure")
    elif phase == "accepted":
        before(core, "start_round")
    elif phase == "apply":
        before(core.ledger, "commit")
    elif phase == "committed":
        before(core, "carry_out", after=True)
    elif phase == "storage":
        start = core.start_round

        def arm(fragment: int) -> Any:
            if storage.fault is None:
                storage.fault = fault
            return start(fragment)

        core.start_round = arm  # type: ignore[method-assign]
    elif phase in ("line", "line_sync"):
        _trap_line(phase, pass_by)


def _trap_line(phase: str, pass_by: Any) -> None:
    name = "write" if phase == "line" else "fsync"
    real = getattr(os, name)

    def trapped(descriptor: int, *rest: Any) -> Any:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(LEDGER_NAME):
            if phase == "line":
                real(descriptor, bytes(rest[0])[: len(rest[0]) // 2])
                pass_by()
                return real(descriptor, bytes(rest[0])[len(rest[0]) // 2 :]) + len(rest[0]) // 2
            pass_by()
        return real(descriptor, *rest)

    setattr(os, name, trapped)


# -- the workers --------------------------------------------------------------------------------


class Player:
    """A worker that only plays the protocol, in the caller's thread, a move at a time."""

    def __init__(self, name: str, num_fragments: int) -> None:
        self.name, self.num_fragments = name, num_fragments
        self.spec = Specification.of(make_model())
        self.fragments = self.spec.cut(num_fragments)
        self.client: DiLoCoClient | None = None
        self.session: str | None = None
        self.sent: dict[str, Any] | None = None
        """The submission under way: round, fragment, body."""
        self.num_done = 0
        self.settled: list[tuple[str, int, str]] = []
        """Round, fragment and digest of what the server has said to be committed."""

    def connect(self, port: int) -> None:
        self.client = DiLoCoClient(f"127.0.0.1:{port}", TOKEN, timeout_s=10.0, connect_s=5.0)

    def move(self) -> None:
        """One request; trouble with the server is no trouble."""
        try:
            self._move()
        except UnknownSession:
            self.session = None
        except Unreachable:
            time.sleep(0.01)

    def _move(self) -> None:
        client = self.client
        assert client is not None
        if self.session is None:
            model = {"fingerprint": self.spec.fingerprint, "layout": self.spec.layout}
            said = client.register(
                {"worker_id": self.name, "model": model, "sync_every": 1, "comm": "bf16",
                 "num_fragments": self.num_fragments, "step": self.num_done}
            )  # fmt: skip
            self.session = said["session"]
            self.accepted = False
        elif self.sent is None:
            self.sent = self._compute(client)
            self.accepted = False
        elif not self.accepted:
            self._submit(client, self.sent)
        else:
            self._ask(client, self.sent)

    def _compute(self, client: DiLoCoClient) -> dict[str, Any]:
        fragment = self.num_done % self.num_fragments
        shapes = self.spec.select(self.fragments[fragment])
        header, payloads = client.fetch(fragment, shapes, worker=self.name, session=self.session)
        scale = 0.1 if self.name == "a" else -0.05
        gradient = {n: decode(p) * scale + self.num_done for n, p in payloads.items()}
        message = compose({}, encode(gradient, "bf16").payloads)
        return {"round": header.meta["round_id"], "fragment": fragment, "message": message}

    def _submit(self, client: DiLoCoClient, sent: dict[str, Any]) -> None:
        try:
            client.submit(
                sent["message"], worker=self.name, session=self.session, round=sent["round"],
                fragment=sent["fragment"], local_steps=1,
            )  # fmt: skip
        except RoundOver:
            pass  # with it or without it: that is asked next
        self.accepted = True

    def _ask(self, client: DiLoCoClient, sent: dict[str, Any]) -> None:
        answer = client.ask_round(
            sent["round"], sent["fragment"], self.name, self.session or "", wait_s=0.05
        )
        if answer["state"] == "committed":
            if answer["counted"]:
                self.settled.append((sent["round"], sent["fragment"], sent["message"].digest))
            self.sent = None
            self.num_done += 1
        elif not answer["submitted"]:
            self.accepted = False


# -- the proof ----------------------------------------------------------------------------------


def prove_server_kills(
    num_kills: int, seed: int, phases: tuple[str, ...] = PHASES, mode: str = "sync"
) -> Outcome:
    """One run whose server is killed so often, each phase in its turn, and then let go on."""
    outcome = Outcome(f"kills of a DiLoCo server ({mode})", seed)
    chance = random.Random(seed)
    num_fragments = 1 + seed % 2
    preload = ("torch", "headway.diloco.server", __name__)
    with memory_folder() as folder, ForkServer(log=folder / "log", preload=preload) as forks:
        players = [Player(name, num_fragments) for name in WORKERS]
        for number in range(num_kills + 1):
            phase = phases[number % len(phases)] if number < num_kills else "never"
            at = chance.randint(1, 40 if phase == "storage" else 3)
            pid = forks.start(
                f"{__name__}:serve_child", folder=str(folder), mode=mode,
                num_fragments=num_fragments, phase=phase, at=at,
            )  # fmt: skip
            code, resumed_s = _play(forks, pid, folder, players, phase, chance)
            slowest = "most ms from a restart to a round"
            outcome.counts[slowest] = max(outcome.counts[slowest], int(1000 * resumed_s))
            if code != -signal.SIGKILL:
                log = (folder / "log").read_text()[-2000:]
                outcome.fail(f"kill {number} ({phase} {at}): the server ended with {code}: {log}")
                break
            outcome.counts["kills"] += phase != "never"
            outcome.counts[f"kills: {phase}"] += phase != "never"
        if not outcome.failures:
            _look(folder / "run", players, outcome)
    return outcome


def _play(
    forks: ForkServer, pid: int, folder: Path, players: list[Player], phase: str, chance: Any
) -> tuple[int, float]:
    """Let the workers work until the server is dead; kill it if it is not meant to die itself.

    Returns how it ended, and how long it took from its start to the end of a round.
    """
    began, num_before, resumed_s = 0.0, sum(p.num_done for p in players), 0.0
    limit = time.monotonic() + _LIMIT_S
    port_file, connected = folder / "port", False
    goal = max(p.num_done for p in players) + chance.randint(2, 5)
    moves_left = chance.randint(5, 60) if phase == "outside" else None
    while pid not in forks.wait_any(0.0):
        if not connected and port_file.exists():
            who, port = map(int, port_file.read_text().split())
            if who == pid:
                connected, began = True, time.monotonic()
                for player in players:
                    player.connect(port)
        if not connected:
            time.sleep(0.005)
        for player in players if connected else ():
            player.move()
        if not resumed_s and sum(p.num_done for p in players) > num_before:
            resumed_s = time.monotonic() - began
        if moves_left is not None and connected:
            moves_left -= 1
        done = phase == "never" and all(p.num_done >= goal and p.sent is None for p in players)
        if done or (moves_left is not None and moves_left <= 0) or time.monotonic() > limit:
            forks.kill(pid)
            code = forks.wait(pid)
            return (code if done or moves_left is not None else -999), resumed_s
    return forks.wait(pid), resumed_s


def _look(run: Path, players: list[Player], outcome: Outcome) -> None:
    """What the ledger, the state and the workers say must be one story."""
    ledger = [json.loads(line) for line in (run / LEDGER_NAME).read_text().splitlines()]
    rounds = [record for record in ledger if record["kind"] == "round"]
    if [r["commit"] for r in rounds] != list(range(1, len(rounds) + 1)):
        outcome.fail(f"the rounds of the ledger are {[r['commit'] for r in rounds]}")
    applied = Counter(
        (part["worker"], part["base_number"], record["fragment"])
        for record in rounds
        for part in record["submissions"]
    )
    if doubles := [key for key, times in applied.items() if times > 1]:
        outcome.fail(f"applied more than once: {doubles}")
    parts = {
        (part["worker"], record["fragment"], part["digest"])
        for record in rounds
        for part in record["submissions"]
    }
    for player in players:
        lost = [s for s in player.settled if (player.name, s[1], s[2]) not in parts]
        if lost:
            outcome.fail(f"{player.name} was told of {lost}, which are not in the ledger")
    again = replay(run)
    core_hash = rounds[-1]["state_hash"]
    if again.hash != core_hash:
        outcome.fail(f"the replay leads to {again.hash}, the ledger to {core_hash}")
    ledger_again = Ledger(run, keep_submissions=True)
    ledger_again.open()
    state, _ = ledger_again.resume()
    ledger_again.close()
    same = all(torch.equal(state.parameters[n], t) for n, t in again.parameters.items())
    if state.hash != again.hash or not same:
        outcome.fail("the state on the disk is not what the ledger leads to")
    outcome.counts["rounds"] += len(rounds)
    outcome.counts["submissions applied"] += sum(applied.values())
