"""Proof that when one rank fails, all end in time, name it, and lose nothing.

Owns: the choice of faults, on one rank at a random step and place, and what must hold after each.
Does not own: the ranks (rank_training.py), kills inside saves again and again (rank_kills.py).
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.testing.forkedranks import ForkedJob, ForkedRanks
from headway.testing.proofs.crashes import quiet
from headway.testing.proofs.outcome import Outcome, memory_folder
from headway.testing.proofs.rank_training import (
    ERRORS,
    EVENTS,
    FUNCTION,
    MAX_STEPS,
    PRELOAD,
    SAVE_STEPS,
    VARIANTS,
    Plan,
)
from headway.testing.proofs.remains import Ending, Shared, find_loss, newest_step, read_ending

LIMIT_S = 10.0
"""How long the other ranks may live after one has failed."""
FROZEN_LIMIT_S = 30.0
SHORT_FROZEN_AFTER_S, REAL_FROZEN_AFTER_S = 5.0, 20.0
# A job that has not come so far by then never will.
_START_LIMIT_S = 300.0
_FAULTS = ("kill", "raise", "kill", "raise", "stop", "kill", "raise", "uneven")
_USUAL = ("ddp2", "ddp2-own", "fsdp2", "fsdp2-own", "pp2")
_LARGE = ("ddp4", "fsdp4", "pp4", "dp2pp2")
# One frozen rank in so many is waited for as long as in real life.
_REAL_EVERY = 5
# Load per core from which on a late end says more of the machine than of the code.
_OVERLOAD = 3.0
_BLAMED = re.compile(r"rank (\d+) of \d+ (?:was lost|failed)")


@dataclass(frozen=True)
class Trial:
    """A plan, and how long a rank may be silent in it."""

    plan: Plan
    frozen_after_s: float = REAL_FROZEN_AFTER_S

    @property
    def num_ranks(self) -> int:
        return VARIANTS[self.plan.variant].num_ranks

    @property
    def limit_s(self) -> float:
        if self.plan.action != "stop":
            return LIMIT_S
        return self.frozen_after_s + FROZEN_LIMIT_S - REAL_FROZEN_AFTER_S


def choose_trial(seed: int, number: int) -> Trial:
    """A trial, the same for the same numbers."""
    chance = random.Random(f"{seed}/{number}")
    fault = _FAULTS[number % len(_FAULTS)]
    name = chance.choice(_LARGE if chance.random() < 0.2 else _USUAL)
    life = chance.choice(("cleanup", "bare", "command"))
    if fault == "uneven":
        name = chance.choice(("ddp2-own", "fsdp2-own", "ddp4", "fsdp4"))
        num_ranks = VARIANTS[name].num_ranks
        most = chance.randint(2, 9)
        counts = [chance.randint(1, most) for _ in range(num_ranks)]
        counts[chance.randrange(num_ranks)] = most + 1
        return Trial(Plan(name, chance.random() < 0.7, life, counts=tuple(counts)))
    places = [*EVENTS, "dataset", "forward", *(["storage"] if fault == "raise" else ["moment"] * 3)]
    place = chance.choice(places)
    rank = chance.randrange(VARIANTS[name].num_ranks)
    if place == "dataset" and VARIANTS[name].arguments.get("dispatch_batches", True):
        rank = rank if VARIANTS[name].kind == "pipeline" else 0  # who reads for all
    plan = Plan(
        name,
        chance.random() < 0.7,
        life,
        action=fault,
        rank=rank,
        place=place,
        # Early enough that every place comes once more.
        step=chance.randint(0, MAX_STEPS - 5),
        delay_s=chance.random() * 0.06,
        error=chance.randrange(len(ERRORS)),
        operation=chance.randint(1, 16),
    )
    frozen_after_s = REAL_FROZEN_AFTER_S
    if fault == "stop" and number // len(_FAULTS) % _REAL_EVERY:
        frozen_after_s = SHORT_FROZEN_AFTER_S
    return Trial(plan, frozen_after_s)


class Arena:
    """Runs attempts at jobs in a folder each, and knows how undisturbed ones end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ranks = ForkedRanks(PRELOAD, log=folder / "log")
        self._endings: dict[tuple[str, int], Ending] = {}

    def close(self) -> None:
        self._ranks.close()

    def make_store(self) -> Any:
        return self._ranks.make_store()

    def job(self, place: Path, plan: Plan, store: Any, **variables: str) -> Any:
        """A context with the ranks of one attempt."""
        num_ranks = VARIANTS[plan.variant].num_ranks
        for rank in range(num_ranks):
            Shared(place / f"numbers-{rank}", create=True)
        return self._ranks.job(
            FUNCTION,
            num_ranks,
            store=store,
            environ=variables,
            folder=str(place),
            plan=plan.to_json(),
        )

    def finish(self, place: Path, plan: Plan, store: Any, **variables: str) -> str | None:
        """Let a job run to its end; what went wrong, if anything."""
        with self.job(place, plan, store, **variables) as job:
            job.wait(_START_LIMIT_S)
            codes = job.codes
        if any(codes):
            return f"ended with {codes}: {tail(place)}"
        return None

    def undisturbed(self, variant: str, max_steps: int = MAX_STEPS) -> Ending:
        """How a run ends that nobody disturbs."""
        if (variant, max_steps) not in self._endings:
            place = self.folder / f"undisturbed-{variant}-{max_steps}"
            place.mkdir()
            plan = Plan(variant, max_steps=max_steps)
            problem = self.finish(place, plan, self.make_store())
            if problem:
                raise RuntimeError(f"the undisturbed run of {variant} {problem}")
            ending = read_ending(place / "out")
            assert len(ending.losses) == max_steps
            self._endings[variant, max_steps] = ending
        return self._endings[variant, max_steps]


def read_numbers(place: Path, plan: Plan) -> list[Shared]:
    """What the ranks of the last attempt noted."""
    num_ranks = VARIANTS[plan.variant].num_ranks
    return [Shared(place / f"numbers-{rank}") for rank in range(num_ranks)]


def read_output(place: Path) -> str:
    """What the ranks of the last attempt printed."""
    return "".join(path.read_text(errors="replace") for path in sorted(place.glob("output-*")))


def tail(place: Path) -> str:
    """The last words of the ranks, for a report."""
    said = [path.read_text(errors="replace")[-700:] for path in sorted(place.glob("output-*"))]
    return f"(load {os.getloadavg()[0]:.0f}) " + " || ".join(said)


def is_late(took_s: float, limit_s: float, outcome: Outcome) -> bool:
    """Whether ranks ended too late; on an overloaded machine that is counted, and no failure."""
    if took_s <= limit_s:
        return False
    if os.getloadavg()[0] < _OVERLOAD * (os.cpu_count() or 1):
        return True
    outcome.counts["later than promised, on an overloaded machine"] += 1
    return False


class Fault:
    """One trial under way, and what was seen of it."""

    def __init__(self, arena: Arena, place: Path, trial: Trial, outcome: Outcome) -> None:
        self._arena, self._place, self._trial = arena, place, trial
        self._outcome, self._plan = outcome, trial.plan

    def run(self) -> str | None:
        """What was wrong with it, if anything."""
        plan, place = self._plan, self._place
        store = self._arena.make_store()
        environ = {"HEADWAY_FROZEN_AFTER_S": f"{self._trial.frozen_after_s:g}"}
        with self._arena.job(place, plan, store, **environ) as job:
            problem = self._await_ends(job)
        problem = problem or find_loss(place / "out", read_numbers(place, plan), 0, SAVE_STEPS)
        if problem:
            return f"{problem}: {tail(place)}"
        resumes = newest_step(place / "out") > 0
        # Every other time as a launcher's restart, at the store of the attempt before.
        count = "1"
        if plan.step % 2:
            store, count = self._arena.make_store(), "0"
        again = replace(plan, action="none")
        problem = self._arena.finish(place, again, store, TORCHELASTIC_RESTART_COUNT=count)
        if problem:
            return f"the next start {problem}"
        if read_ending(place / "out") != self._arena.undisturbed(plan.variant):
            return "the run that resumed ended differently from an undisturbed one"
        self._outcome.counts["ended as undisturbed at the next start"] += 1
        self._outcome.counts["of these, from a checkpoint"] += resumes
        return None

    def _await_ends(self, job: ForkedJob) -> str | None:
        plan = self._plan
        numbers = read_numbers(self._place, plan)[plan.rank]
        job.wait(_START_LIMIT_S, until=lambda: numbers.get("struck_ns") > 0)
        struck_s = numbers.get("struck_ns") / 1e9
        if not struck_s and plan.place == "moment" and not any(job.codes):
            self._outcome.counts["came when all was done"] += 1
            return None
        if not struck_s:
            return f"the fault did not happen: codes {job.codes}"
        others = [rank for rank in range(len(job.pids)) if rank != plan.rank]
        awaited = others if plan.action == "stop" else None
        job.wait(struck_s + 3 * self._trial.limit_s - time.monotonic(), awaited)
        if any(rank not in job.ends for rank in others):
            return f"still running {3 * self._trial.limit_s:g} s after the fault: {job.codes}"
        took_s = max(job.ends[rank].at for rank in others) - struck_s
        if plan.action == "stop":
            # Were it to go on, it would train alone.
            job.send(signal.SIGCONT, [plan.rank])
            if not job.wait(3 * LIMIT_S):
                return "the stopped rank went on after the others had ended"
        return self._judge(job, took_s)

    def _judge(self, job: ForkedJob, took_s: float) -> str | None:
        plan, counts = self._plan, self._outcome.counts
        most = f"most ms from a {plan.action} to the last end"
        if self._trial.frozen_after_s != REAL_FROZEN_AFTER_S:
            most += f", frozen after {SHORT_FROZEN_AFTER_S:g} s"
        counts[most] = max(counts[most], int(1000 * took_s))
        if is_late(took_s, self._trial.limit_s, self._outcome):
            return f"the last rank ended {took_s:.1f} s after the fault"
        wanted = -signal.SIGKILL if plan.action == "kill" else None
        for rank, code in enumerate(job.codes):
            fine = code == wanted if rank == plan.rank and wanted else (code or 0) > 0
            if not fine:
                return f"rank {rank} ended with {code}"
        return self._judge_words(read_output(self._place))

    def _judge_words(self, said: str) -> str | None:
        plan = self._plan
        if not re.search(describe_fault(plan), said):
            return f"no rank said {describe_fault(plan)!r}"
        blamed = {int(found[1]) for found in _BLAMED.finditer(said)}
        if blamed != {plan.rank}:
            return f"ranks {sorted(blamed)} were blamed"
        return None


def describe_fault(plan: Plan) -> str:
    """What must be said of a fault, as a pattern."""
    who = f"rank {plan.rank} of {VARIANTS[plan.variant].num_ranks}"
    if plan.action == "kill":
        return f"{who} was lost: its process is gone"
    if plan.action == "stop":
        return rf"{who} was lost: it (is stopped \(SIGSTOP\)|does not answer)"
    if plan.place == "storage":
        return f"{who} failed: .*No space left on device"
    error = ERRORS[plan.error]
    line = re.escape(type(error).__name__)
    if str(error):
        # The callback is told in the words of the error: behind its number, inside a key's quotes.
        number, words = "", str(error.args[0])
        if isinstance(error, OSError):
            number, words = f"[Errno {error.errno}] ", str(error.strerror)
        line += rf""": {re.escape(number)}["']?(callback '\w+', \w+: )?{re.escape(words)}"""
    return rf"{who} (failed|was lost): (it could not read the data: )?{line}"


def _run_uneven(arena: Arena, place: Path, plan: Plan) -> str | None:
    """Data that ends early on some ranks: all go on together, with the same epochs."""
    problem = arena.finish(place, plan, arena.make_store())
    if problem:
        return problem
    variant = VARIANTS[plan.variant]
    batch = 4 // variant.num_ranks
    windows = max(-(-count // batch) for count in plan.counts)
    ends = [*range(windows, plan.max_steps, windows), plan.max_steps]
    wanted = [f"epoch over at step {step}" for step in ends]
    for rank in range(variant.num_ranks):
        text = (place / f"output-{rank}").read_text()
        told = [line for line in text.splitlines() if line.startswith("epoch over")]
        if told != wanted:
            return f"rank {rank} had {told} instead of {wanted}"
    steps = [numbers.get("step") for numbers in read_numbers(place, plan)]
    if steps != [plan.max_steps] * variant.num_ranks:
        return f"the ranks ended at steps {steps}"
    if len(read_ending(place / "out").losses) != plan.max_steps:
        return "losses are missing"
    return None


def prove_rank_faults(num_trials: int, seed: int, *, first: int = 0) -> Outcome:
    """So many trials: SIGKILL, SIGSTOP, an error, or data that ends early, on one rank."""
    outcome = Outcome("faults of one rank", seed)
    counts = outcome.counts
    with memory_folder() as folder, quiet():
        arena = Arena(folder)
        try:
            for number in range(first, first + num_trials):
                trial = choose_trial(seed, number)
                place = folder / f"trial-{number}"
                place.mkdir()
                if trial.plan.counts:
                    problem = _run_uneven(arena, place, trial.plan)
                else:
                    problem = Fault(arena, place, trial, outcome).run()
                counts["trials"] += 1
                counts["uneven data" if trial.plan.counts else trial.plan.action] += 1
                counts[f"under {VARIANTS[trial.plan.variant].kind}"] += 1
                counts["on 4 ranks"] += trial.num_ranks == 4
                counts["frozen for real"] += (
                    trial.plan.action == "stop" and trial.frozen_after_s == REAL_FROZEN_AFTER_S
                )
                if problem:
                    outcome.fail(f"seed {seed}/{number}, {trial.plan}: {problem}")
                shutil.rmtree(place)
        finally:
            arena.close()
    return outcome
