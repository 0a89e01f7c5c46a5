"""Proof that real training workers that are killed at any moment come back and count once.

Owns: three children that each run `headway diloco worker`, SIGKILL from outside at moments that
chance chooses, their restarts, and how soon a round is made again. Does not own: the children
(forkserver.py), kills at chosen places of an exchange (diloco_worker_kills.py), what a ledger must
say (diloco_books.py).
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from headway.checkpoint.manifest import committed
from headway.checkpoint.tensors import read_shards
from headway.diloco.server import DiLoCoServer
from headway.testing.diloco import serving
from headway.testing.forkserver import ForkServer
from headway.testing.proofs.diloco_books import check_ledger
from headway.testing.proofs.outcome import Outcome, memory_folder

NUM_WORKERS = 3
HEARTBEAT_S = 1.0
RESUMED_S = HEARTBEAT_S + 1.0
"""How soon after a killed worker is back a round must be made again."""
SYNC_EVERY, SAVE_STEPS = 3, 2
FOREVER = 1 << 30
_LONGEST_LIFE_S = 1.2
_LIMIT_S = 60.0
_TURN_S = 0.005
RUN = f"""\
model: {{vocab_size: 64, hidden_size: 16, num_layers: 2, num_heads: 2, max_seq_len: 16}}
data:
  train:
    class_path: SyntheticDataset
    init_args: {{num_samples: 64, sequence_length: 8, vocab_size: 64}}
callbacks:
  - class_path: DiLoCoCallback
    init_args: {{comm: float32, timeout: 30, max_sync_retries: 50, first_retry_s: 0.02,
                heartbeat_interval: {HEARTBEAT_S / 4}}}
args:
  per_device_train_batch_size: 2
  use_cpu: true
  lr_scheduler_type: constant
  learning_rate: 0.01
  save_strategy: steps
  save_steps: {SAVE_STEPS}
  save_total_limit: 2
  output_dir: out
  seed: 1
"""
PRELOAD = (
    "torch",
    "headway.cli.main",
    "headway.cli.diloco",
    "headway.cli.train",
    "headway.trainers.from_config",
    "headway.trainers.trainer",
    "headway.callbacks.diloco.diloco_callback",
    "headway.diloco.worker",
    "headway.diloco.client",
    "headway.checkpoint.distributed",
    "headway.testing.diloco",
    __name__,
)


def train_child(folder: str, address: str, number: int, max_steps: int) -> None:
    """A child: the command, from its newest checkpoint to a step."""
    from headway.cli.main import main

    os.chdir(folder)
    words = ["diloco", "worker", "run.yaml", "--server", address, "--worker-id", name_of(number)]
    words += ["--sync-every", str(SYNC_EVERY), f"--args.max_steps={max_steps}", "-q"]
    words += [f"--args.output_dir={name_of(number)}", f"--args.seed={number}"]
    sys.exit(main(words))


def prove_training_kills(num_kills: int, seed: int, resumed_s: float = RESUMED_S) -> Outcome:
    """One run of several workers of which one after the other is killed, and comes back."""
    outcome = Outcome("kills of DiLoCo workers that train", seed)
    with memory_folder() as folder, ForkServer(log=folder / "log", preload=PRELOAD) as forks:
        (folder / "run.yaml").write_text(RUN)
        with serving(
            folder / "run",
            num_workers=NUM_WORKERS,
            heartbeat_s=HEARTBEAT_S,
            keep_submissions=True,
            accumulate="float64",
        ) as server:
            trial = _Trial(folder, forks, server, outcome, resumed_s)
            ran_through = trial.run(num_kills, random.Random(seed))
        if ran_through:  # also if something took too long: that does not excuse the books
            check_ledger(folder / "run", outcome, server.state_hash)
        elif outcome.failures:
            outcome.failures[-1] += f"\n{(folder / 'log').read_text()[-3000:]}"
    return outcome


class _Trial:
    """The workers of one proof, and the watch over them."""

    def __init__(
        self,
        folder: Path,
        forks: ForkServer,
        server: DiLoCoServer,
        outcome: Outcome,
        resumed_s: float,
    ) -> None:
        self._folder, self._forks, self._server = folder, forks, server
        self._outcome, self._resumed_s = outcome, resumed_s
        self._pids: dict[int, int] = {}
        self._sessions: dict[int, str | None] = {}
        """Each worker's session when its process began: it takes part with another one."""

    def run(self, num_kills: int, chance: random.Random) -> bool:
        """Whether it came to its end."""
        for number in range(NUM_WORKERS):
            self._start(number, FOREVER)
        if not self._await_round():
            return False
        for kill in range(num_kills):
            victim = chance.randrange(NUM_WORKERS)
            self._watch(chance.uniform(0, _LONGEST_LIFE_S))
            if not self._kill(victim):
                return False
            if kill % 10 == 9 and not self._await_round(without=victim):
                return False
            self._start(victim, FOREVER)
            # Now and then until the round: chance alone might let none come about.
            if kill % 3 == 2 and not self._await_round():
                return False
        return self._finish()

    # -- lives ------------------------------------------------------------------------------

    def _start(self, number: int, max_steps: int) -> None:
        known = self._server.core.book.workers.get(name_of(number))
        self._sessions[number] = known.session if known else None
        self._pids[number] = self._forks.start(
            f"{__name__}:train_child", folder=str(self._folder), number=number,
            address=self._server.address, max_steps=max_steps,
        )  # fmt: skip

    def _kill(self, number: int) -> bool:
        """SIGKILL, with a note of what it was about; False if it had ended by itself."""
        moment = self._tell_moment(number)
        self._forks.kill(self._pids[number])
        code = self._forks.wait(self._pids.pop(number))
        if code != -signal.SIGKILL:
            self._outcome.fail(f"{name_of(number)} ended with {code} before it was killed")
            return False
        self._outcome.counts["kills"] += 1
        self._outcome.counts[f"kills: {moment}"] += 1
        return True

    def _is_back(self, number: int) -> bool:
        known = self._server.core.book.workers.get(name_of(number))
        return known is not None and known.session != self._sessions[number]

    def _tell_moment(self, number: int) -> str:
        if not self._is_back(number):
            return "starting"
        place, name = self._server.core.book.rounds[0], name_of(number)
        if place.closed:
            return "a round is applied"
        return "handed in" if name in place.submissions else "in its steps"

    # -- rounds -----------------------------------------------------------------------------

    def _watch(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(_TURN_S)

    def _await_round(self, without: int | None = None) -> bool:
        """Wait for a round of all, or of the others; the time that it takes must be short."""
        limit, began = time.monotonic() + _LIMIT_S, time.monotonic()
        num_before: int | None = None
        while time.monotonic() < limit:
            num_rounds = self._server.core.totals.num_rounds
            there = [n for n in self._pids if self._is_back(n)]
            if len(there) == len(self._pids) and num_before is None:
                num_before = num_rounds
                began = began if without is not None else time.monotonic()
            num_workers = self._server.core.totals.last_num_workers
            enough = num_workers >= len(self._pids) or without is not None
            if num_before is not None and num_rounds > num_before and enough:
                self._note(time.monotonic() - began, without is not None)
                return True
            if ended := self._forks.wait_any(_TURN_S):
                self._outcome.fail(f"processes {ended} ended by themselves")
                return False
        self._outcome.fail(f"no round within {_LIMIT_S:g} s")
        return False

    def _note(self, took_s: float, without: bool) -> None:
        counts = self._outcome.counts
        kind = "a kill to a round without it" if without else "the return to a round with it"
        counts[f"measured: {kind}"] += 1
        most = f"most ms from {kind}"
        counts[most] = max(counts[most], int(1000 * took_s))
        # One that does not return is silent for some heartbeats before it is let go.
        num_more = self._server.options.missed_heartbeats - 1 if without else 0
        if took_s > self._resumed_s + num_more * HEARTBEAT_S:
            self._outcome.fail(f"it took {took_s:.2f} s from {kind}")

    # -- the end ----------------------------------------------------------------------------

    def _finish(self) -> bool:
        """All train to one step; who was in the last round began from the server's parameters."""
        for number in range(NUM_WORKERS):
            if not self._kill(number):
                return False
        steps = [self._newest(number)[0] for number in range(NUM_WORKERS)]
        goal = (max(steps) // SYNC_EVERY + 4) * SYNC_EVERY
        for number in range(NUM_WORKERS):
            self._start(number, goal)
        codes = [self._forks.wait(self._pids[number]) for number in range(NUM_WORKERS)]
        if any(codes):
            self._outcome.fail(f"the workers ended with {codes}")
            return False
        state, book = self._server.core.state, self._server.core.book
        assert state is not None
        last = [n for n in range(NUM_WORKERS) if _last_round(book.applied[0], n) == state.commit]
        for number in last:
            step, path = self._newest(number)
            stored = read_shards(path, "state/callback-DiLoCoCallback")
            if step != goal or not all(
                torch.equal(stored[f"snapshot.{name}"], value)
                for name, value in state.parameters.items()
            ):
                self._outcome.fail(f"{path} is not what the last round left")
        self._outcome.counts["workers in the last round"] += len(last)
        self._outcome.counts["steps of the longest run"] = goal
        return True

    def _newest(self, number: int) -> tuple[int, Path]:
        found = committed(self._folder / name_of(number))
        return (found[-1].step, found[-1].path) if found else (0, self._folder)


def _last_round(applied: dict[str, list[object]], number: int) -> object:
    return applied.get(name_of(number), [None])[0]


def name_of(number: int) -> str:
    """A worker's id, and its folder."""
    return f"worker-{number}"
