"""Proof that training survives SIGKILL at any time, inside a save or elsewhere.

Owns: runs that are killed again and again until they are done, what must hold after each kill,
and the comparison with a run that nobody disturbed. Does not own: the processes (forkserver.py).

A run directory goes from child to child: each resumes by itself from what the one before left.
Half of the kills are put at an operation of a save (by the storage, in the thread that writes),
half come from outside at a random moment.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.testing.forkserver import ForkServer
from headway.testing.proofs.crashes import quiet
from headway.testing.proofs.outcome import Outcome, memory_folder
from headway.testing.proofs.remains import Ending, Shared, find_loss, newest_step, read_ending

MAX_STEPS, SAVE_STEPS = 90, 3
# Operations of about one save of the tiny trainer, with the deletion of an older checkpoint.
_SAVE_OPERATIONS = 100
_MOST_KILLS_A_RUN = 40
_LIMIT_S = 120.0


def train_child(folder: str, shared: str, save_async: bool, kill_at: int, max_steps: int) -> None:
    """A child: trains, resuming from what is there; killed at an operation, or not at all (0)."""
    from headway.checkpoint import CheckpointManager
    from headway.testing.faults import Fault, FaultyStorage
    from headway.testing.trainer import tiny_trainer

    numbers = Shared(Path(shared))
    fault = Fault("kill", kill_at) if kill_at else None
    init, write = CheckpointManager.__init__, CheckpointManager.write

    def faulty(self: Any, output_dir: Any, **options: Any) -> None:
        init(self, output_dir, **{**options, "storage": FaultyStorage(output_dir, fault)})

    def watched(self: Any, pending: Any) -> Any:
        numbers.begin_save(pending.step)
        try:
            return write(self, pending)
        finally:
            numbers.put("in_save", 0)

    CheckpointManager.__init__ = faulty  # type: ignore[method-assign]
    CheckpointManager.write = watched  # type: ignore[method-assign]
    trainer = tiny_trainer(
        folder,
        [_Reporter(numbers)],
        num_samples=16,
        max_steps=max_steps,
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        save_async=save_async,
        save_total_limit=2,
        resume_from_checkpoint=True,
    )
    trainer.train()


class _Reporter:
    def __init__(self, numbers: Shared) -> None:
        self._numbers = numbers

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._numbers.put("step", state.global_step)
        self._numbers.put("trained", self._numbers.get("trained") + 1)

    def on_save(self, args: Any, state: Any, control: Any, step: int, **kwargs: Any) -> None:
        self._numbers.put("saved", step)


def _check_after_kill(
    root: Path, numbers: Shared, newest_before: int, outcome: Outcome
) -> str | None:
    """What is wrong with the directory that a killed child left, if anything."""
    problem = find_loss(root, [numbers], newest_before, SAVE_STEPS)
    if problem is None:
        step, newest, counts = numbers.get("step"), newest_step(root), outcome.counts
        counts["most steps lost"] = max(counts["most steps lost"], step - newest)
        counts["most steps since the last save begun"] = max(
            counts["most steps since the last save begun"], step - max(numbers.get("begun"), newest)
        )
    return problem


@dataclass
class _Run:
    """One run directory and the numbers of its kills."""

    server: ForkServer
    folder: Path
    chance: random.Random
    outcome: Outcome
    seed: str
    save_async: bool
    window_s: float
    max_steps: int
    newest: int = 0

    def finish(self, reference: Ending) -> None:
        """Kill children until one gets to the end; then compare."""
        kills = 0
        while True:
            kill_at, delay_s = 0, _LIMIT_S
            if kills < _MOST_KILLS_A_RUN:
                if self.chance.random() < 0.5:
                    # Up to two saves' worth, so that every other child makes progress.
                    kill_at = self.chance.randint(1, 2 * _SAVE_OPERATIONS)
                else:
                    delay_s = self.chance.random() * self.window_s
            exit_code = self._run_child(kill_at, delay_s)
            if exit_code == 0:
                break
            if exit_code != -signal.SIGKILL:
                log = _tail(self.folder.parent / "log")
                self.outcome.fail(f"seed {self.seed}: a child ended with {exit_code}: {log}")
                return
            kills += 1
            if not self._judge(kills, kill_at):
                return
        if read_ending(self.folder / "out") != reference:
            self.outcome.fail(f"seed {self.seed}: ended differently after {kills} kills")
        self.outcome.counts["runs finished as undisturbed"] += 1

    def _run_child(self, kill_at: int, delay_s: float) -> int:
        shared = self.folder / "shared"
        Shared(shared, create=True)
        self.server.start(
            "headway.testing.proofs.kills:train_child",
            folder=str(self.folder),
            shared=str(shared),
            save_async=self.save_async,
            kill_at=kill_at,
            max_steps=self.max_steps,
        )
        if delay_s < _LIMIT_S:
            time.sleep(delay_s)
            self.server.kill()
        return self.server.wait()

    def _judge(self, kills: int, kill_at: int) -> bool:
        counts = self.outcome.counts
        numbers = Shared(self.folder / "shared")
        counts["kills"] += 1
        counts["kills inside a save"] += numbers.get("in_save")
        counts["kills before the first step"] += numbers.get("trained") == 0
        counts["kills with background saves"] += self.save_async
        root = self.folder / "out"
        problem = _check_after_kill(root, numbers, self.newest, self.outcome)
        self.newest = newest_step(root)
        if problem:
            where = f"operation {kill_at}" if kill_at else "a random moment"
            self.outcome.fail(f"seed {self.seed}, kill {kills} at {where}: {problem}")
        return problem is None


def prove_kills(
    num_kills: int, seed: int, *, limit_s: float | None = None, max_steps: int = MAX_STEPS
) -> Outcome:
    """At least `num_kills` kills over as many runs as it takes, or as many as `limit_s` allows."""
    outcome = Outcome("kills of training", seed)
    began = time.monotonic()
    with memory_folder() as folder, quiet(), ForkServer(log=folder / "log") as server:
        reference, window_s = _train_undisturbed(server, folder, max_steps)
        number = 0
        while outcome.counts["kills"] < num_kills and not outcome.failures:
            if limit_s is not None and time.monotonic() - began > limit_s:
                break
            place = folder / f"run-{number}"
            place.mkdir()
            name = f"{seed}/{number}"
            chance = random.Random(name)
            background = chance.random() < 0.7
            run = _Run(server, place, chance, outcome, name, background, window_s, max_steps)
            run.finish(reference)
            shutil.rmtree(place)
            number += 1
    outcome.counts["runs"] = number
    return outcome


def _train_undisturbed(server: ForkServer, folder: Path, max_steps: int) -> tuple[Ending, float]:
    """How a run ends; and how long a child takes to start and to do a few saves."""
    endings = []
    for save_async in (True, False):
        place = folder / f"undisturbed-{save_async}"
        place.mkdir()
        duration_s = _time_child(server, place, save_async, max_steps)
        endings.append(read_ending(place / "out"))
        # Once more: there is nothing left to train, so this is the start alone.
        start_s = _time_child(server, place, save_async, max_steps)
    assert endings[0] == endings[1], "background saves change nothing"
    assert len(endings[0].losses) == max_steps
    return endings[0], start_s + max(0.0, duration_s - start_s) / 4


def _time_child(server: ForkServer, place: Path, save_async: bool, max_steps: int) -> float:
    Shared(place / "shared", create=True)
    began = time.monotonic()
    server.start(
        "headway.testing.proofs.kills:train_child",
        folder=str(place),
        shared=str(place / "shared"),
        save_async=save_async,
        kill_at=0,
        max_steps=max_steps,
    )
    code = server.wait()
    if code:
        log = _tail(place.parent / "log")
        raise RuntimeError(f"the undisturbed run ended with {code}: {log}")
    return time.monotonic() - began


def _tail(log: Path) -> str:
    return log.read_text()[-2000:] if log.exists() else ""
