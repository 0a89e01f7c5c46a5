"""Proof that a crash of one rank or of all leaves the old or the new checkpoint, whole.

Owns: saves by several ranks (threads that share a disk), broken at every operation and meeting.
Does not own: judging a state (crashes.py).
"""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path
from typing import Any

from headway.checkpoint import CheckpointManager
from headway.testing.contents import make_contents, train
from headway.testing.faults import Died, Fault, FaultyStorage
from headway.testing.powercut import CrashState, Disk, Journal, crash_states
from headway.testing.proofs.crashes import (
    ROOT,
    Expectation,
    Wrong,
    expect,
    judge,
    list_digests,
    newest_digest,
    quiet,
)
from headway.testing.proofs.outcome import Outcome, memory_folder
from headway.testing.threadranks import ThreadRanks, run_thread_ranks


def _save(
    storages: list[FaultyStorage], value: int, step: int, **options: Any
) -> list[BaseException | None]:
    # Made here and not in the threads: the generators of torch are the process's.
    contents = []
    for _ in storages:
        contents.append(make_contents(value, value))
        train(contents[-1], 1)

    def act(ranks: ThreadRanks) -> None:
        storage = storages[ranks.rank]
        CheckpointManager(
            storage.root, storage=storage, ranks=ranks, max_shard_bytes=100, **options
        ).save(contents[ranks.rank], step)

    return run_thread_ranks(act, storages)


def prove_rank_crash_points(
    num_points: int, seed: int, num_ranks: int = 2, *, stride: int = 1
) -> Outcome:
    """At least `num_points`: all ranks lost at once at every point, or one at each of its own.

    With `stride`, only every so many of them.
    """
    outcome = Outcome(f"crash points with {num_ranks} ranks", seed)
    sweep = 0
    with memory_folder() as folder, quiet():
        while outcome.counts["points"] < num_points:
            chance = random.Random(f"ranks/{seed + sweep}")
            step = chance.choice((3, 5))
            options = {"save_total_limit": chance.choice((1, 2))}
            place = folder / str(sweep)
            _break_save(place, outcome, seed + sweep, step, options, num_ranks, stride)
            shutil.rmtree(place)
            sweep += 1
    return outcome


def _break_save(
    place: Path,
    outcome: Outcome,
    seed: int,
    step: int,
    options: dict[str, Any],
    num_ranks: int,
    stride: int,
) -> None:
    source = place / "source"
    root = source / ROOT
    source.mkdir(parents=True)
    ends = _save([FaultyStorage(root, rank=r) for r in range(num_ranks)], 10, 3)
    assert not any(ends), ends
    old, before = newest_digest(root), list_digests(root)
    recorded = place / "recorded"
    shutil.copytree(source, recorded)
    journal = Journal(recorded)
    storages = [FaultyStorage(recorded / ROOT, rank=r, journal=journal) for r in range(num_ranks)]
    ends = _save(storages, seed, step, **options)
    assert not any(ends), ends
    outcome.counts["operations"] += len(journal.operations)
    expected = expect(journal, recorded / ROOT, f"checkpoint-{step}", old, before)
    states = crash_states(journal, seed=seed, num_cuts=2, num_torn=2)
    for state in itertools.islice(states, 0, None, stride):
        outcome.counts["points"] += 1
        outcome.counts["points with loss of unsynced data"] += state.loses_unsynced
        state.directory.write_to(place / "crashed")
        _judge(place / "crashed" / ROOT, state, expected, outcome, seed)
    for rank in range(num_ranks):
        for at in range(1, storages[rank].num_operations + 1, stride):
            outcome.counts["points"] += 1
            outcome.counts["deaths of one rank"] += 1
            root = place / "lost" / ROOT
            shutil.rmtree(root.parent, ignore_errors=True)
            shutil.copytree(source, root.parent)
            fault = Fault("die", at, rank=rank)
            broken = [FaultyStorage(root, fault, rank=r) for r in range(num_ranks)]
            ends = _save(broken, seed, step, **options)
            try:
                _judge_survivors(place, ends, rank, expected)
            except Exception as error:
                outcome.fail(f"seed {seed}, {fault}: {type(error).__name__}: {error}")


def _judge(
    root: Path, state: CrashState, expected: Expectation, outcome: Outcome, seed: int
) -> None:
    try:
        judge(root, state, expected)
    except Exception as error:
        outcome.fail(f"seed {seed}, {state}: {type(error).__name__}: {error}")


def _judge_survivors(
    place: Path, ends: list[BaseException | None], lost: int, expected: Expectation
) -> None:
    """One rank died; the others must have noticed, and what is on the disk must be whole."""
    dead = [rank for rank, end in enumerate(ends) if isinstance(end, Died)]
    if dead != [lost]:
        raise Wrong(f"the ranks ended with {ends}")
    Disk.read(place / "lost").seen().write_to(place / "crashed")
    found = newest_digest(place / "crashed" / ROOT)
    # The new one has another digest than the recorded: it holds the time of the save.
    new = found if found != expected.old else None
    either = Expectation(expected.old, new, 0, 1, frozenset())
    judge(place / "crashed" / ROOT, CrashState(0, None, "safe", Disk().seen()), either)
