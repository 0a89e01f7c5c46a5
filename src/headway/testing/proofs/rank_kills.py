"""Proof that training on several ranks survives SIGKILL of one rank or of all, again and again.

Owns: runs whose ranks are killed, most of the times inside a save, until the run is done; what must
hold after each kill; the comparison with a run that nobody disturbed. Does not own: the ranks
(rank_training.py), other faults (rank_faults.py).
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from headway.testing.forkedranks import ForkedJob
from headway.testing.proofs.crashes import quiet
from headway.testing.proofs.outcome import Outcome, memory_folder
from headway.testing.proofs.rank_faults import LIMIT_S, Arena, is_late, read_numbers, tail
from headway.testing.proofs.rank_training import SAVE_STEPS, VARIANTS, Plan
from headway.testing.proofs.remains import find_loss, newest_step, read_ending

MAX_STEPS = 30
_VARIANTS = ("ddp2", "ddp2", "fsdp2", "pp2", "fsdp4")
# Operations that one rank makes in about two saves, so that every other attempt gets further.
_OPERATIONS = 120
MOST_KILLS = 12
_START_LIMIT_S = 300.0


@dataclass
class _Run:
    """One run directory, from kill to kill."""

    arena: Arena
    folder: Path
    chance: random.Random
    outcome: Outcome
    plan: Plan
    most_kills: int
    newest: int = 0
    kills: int = 0

    def finish(self) -> str | None:
        """Kill ranks until an attempt gets to the end; what went wrong, if anything."""
        while self.kills < self.most_kills:
            done, problem = self._attempt()
            if problem or done:
                break
        else:
            problem = self.arena.finish(self.folder, self.plan, self.arena.make_store())
        if problem:
            return problem
        ending = self.arena.undisturbed(self.plan.variant, self.plan.max_steps)
        if read_ending(self.folder / "out") != ending:
            return f"ended differently after {self.kills} kills"
        self.outcome.counts["runs finished as undisturbed"] += 1
        return None

    def _attempt(self) -> tuple[bool, str | None]:
        """Whether the run is done, and what was wrong."""
        chance, num_ranks = self.chance, VARIANTS[self.plan.variant].num_ranks
        everyone, inside = chance.random() < 0.4, chance.random() < 0.7
        action = "none"
        if inside:
            action = "kill_all_at_save" if everyone else "kill_at_save"
        rank, operation = chance.randrange(num_ranks), chance.randint(1, _OPERATIONS)
        steps = chance.randint(0, 2 * SAVE_STEPS)
        delay_s = chance.random() * 0.1
        plan = Plan(
            self.plan.variant,
            self.plan.save_async,
            chance.choice(("cleanup", "bare", "command")),
            self.plan.max_steps,
            action=action,
            rank=rank,
            operation=operation,
        )
        with self.arena.job(self.folder, plan, self.arena.make_store()) as job:
            numbers = read_numbers(self.folder, plan)
            if not inside:
                # From outside: so many steps after all ranks met, and a moment more. A rank that
                # dies before it came is for whoever started it to notice: the others cannot tell
                # it from one that is slow.
                job.wait(_START_LIMIT_S, until=lambda: all(own.get("met") for own in numbers))
                job.wait(_START_LIMIT_S, until=lambda: numbers[rank].get("trained") >= steps)
                time.sleep(delay_s)
                in_save = any(own.get("in_save") for own in numbers)
                struck_s = time.monotonic()
                job.send(signal.SIGKILL, None if everyone else [rank])
            else:
                job.wait(_START_LIMIT_S, until=lambda: numbers[rank].get("struck_ns") > 0)
                struck_s = numbers[rank].get("struck_ns") / 1e9
                in_save = bool(struck_s)
            job.wait(_START_LIMIT_S if not struck_s else 3 * LIMIT_S)
            if all(code == 0 for code in job.codes):
                return True, None
            if all(own.get("finished") for own in numbers):
                # Killed on the way out, with nothing left to do.
                self.outcome.counts["kills after the end"] += 1
                return True, None
            problem = self._judge(job, rank, everyone, struck_s, in_save)
        where = f"operation {operation}" if inside else f"{steps} steps and {delay_s:.3f} s"
        whom = "all ranks" if everyone else f"rank {rank}"
        if problem:
            problem = f"kill {self.kills} of {whom} at {where}: {problem}: {tail(self.folder)}"
        return False, problem

    def _judge(
        self, job: ForkedJob, rank: int, everyone: bool, struck_s: float, in_save: bool
    ) -> str | None:
        self.kills += 1
        counts = self.outcome.counts
        counts["kills"] += 1
        counts["kills of all ranks" if everyone else "kills of one rank"] += 1
        counts["kills inside a save"] += in_save
        counts[f"kills under {VARIANTS[self.plan.variant].kind}"] += 1
        counts["kills with background saves"] += self.plan.save_async
        if None in job.codes:
            return f"still running {3 * LIMIT_S:g} s after the kill: {job.codes}"
        took_s = max(end.at for end in job.ends.values()) - struck_s
        most = "most ms from a kill to the last end"
        counts[most] = max(counts[most], int(1000 * took_s))
        if is_late(took_s, LIMIT_S, self.outcome):
            return f"the last rank ended {took_s:.1f} s after the kill"
        for number, code in enumerate(job.codes):
            killed = everyone or number == rank
            if (code != -signal.SIGKILL) if killed else (code or 0) <= 0:
                return f"rank {number} ended with {code}"
        numbers = read_numbers(self.folder, self.plan)
        problem = find_loss(self.folder / "out", numbers, self.newest, SAVE_STEPS)
        self.newest = newest_step(self.folder / "out")
        lost = max(own.get("step") for own in numbers) - self.newest
        counts["most steps lost"] = max(counts["most steps lost"], lost)
        return problem


def prove_rank_kills(
    num_kills: int, seed: int, *, max_steps: int = MAX_STEPS, most_kills: int = MOST_KILLS
) -> Outcome:
    """At least `num_kills`, and at most `most_kills` in a run, over as many runs as it takes."""
    outcome = Outcome("kills of ranks", seed)
    with memory_folder() as folder, quiet():
        arena = Arena(folder)
        try:
            number = 0
            while outcome.counts["kills"] < num_kills and not outcome.failures:
                name = f"{seed}/{number}"
                chance = random.Random(name)
                place = folder / f"run-{number}"
                place.mkdir()
                variant = _VARIANTS[number % len(_VARIANTS)]
                plan = Plan(variant, chance.random() < 0.7, max_steps=max_steps)
                problem = _Run(arena, place, chance, outcome, plan, most_kills).finish()
                if problem:
                    outcome.fail(f"seed {name}, {variant}: {problem}")
                shutil.rmtree(place)
                number += 1
        finally:
            arena.close()
    outcome.counts["runs"] = number
    return outcome
