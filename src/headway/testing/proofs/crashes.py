"""Proof that a crash at any operation of a save leaves the old or the new checkpoint, whole.

Owns: making the states and judging each as the next start would. Does not own: which states a
crash may leave (powercut.py).
"""

from __future__ import annotations

import itertools
import logging
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headway.checkpoint import CheckpointManager, verify
from headway.checkpoint.manifest import committed
from headway.testing.contents import make_contents
from headway.testing.faults import FaultyStorage
from headway.testing.powercut import CrashState, Journal, crash_states
from headway.testing.proofs.outcome import Outcome, memory_folder
from headway.testing.proofs.scenarios import Scenario, make_scenarios

ROOT = "run"
# One state in so many is also loaded, saved into, and crashed again while it is cleaned up.
_LOAD_EVERY, _SAVE_EVERY, _AGAIN_EVERY = 20, 60, 40


class Wrong(Exception):
    """A state was left that must not be."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the checkpoint room's warnings, which are expected here, to itself."""
    log = logging.getLogger("headway")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@dataclass(frozen=True)
class Expectation:
    """What may be found after a crash, by the digest of the manifest."""

    old: str | None
    new: str | None
    published_after: int
    """Operations after which the new one may be found."""
    safe_after: int
    """Operations after which it must be."""
    kept: frozenset[str]
    """Checkpoints that are there before and after."""

    def allowed(self, state: CrashState) -> set[str | None]:
        """The newest checkpoint that the next start may find."""
        if state.number < self.published_after:
            return {self.old}
        if state.loses_unsynced and state.number < self.safe_after:
            return {self.old, self.new}
        return {self.new}


def newest_digest(root: Path) -> str | None:
    """What the next start resumes from."""
    path = CheckpointManager(root).resolve(True)
    if path is None:
        return None
    return next(c.manifest.digest for c in committed(root) if c.path == path)


def list_digests(root: Path) -> frozenset[str]:
    """All committed checkpoints."""
    return frozenset(c.manifest.digest for c in committed(root))


def record(scenario: Scenario, folder: Path) -> tuple[Journal, Expectation]:
    """Carry out a scenario once; returns its operations and what crashes in it may leave."""
    folder.mkdir()
    root = folder / ROOT
    scenario.prepare(root)
    old, before = newest_digest(root), list_digests(root)
    journal = Journal(folder)
    scenario.save(FaultyStorage(root, journal=journal))
    return journal, expect(journal, root, scenario.final, old, before)


def expect(
    journal: Journal, root: Path, final: str, old: str | None, before: frozenset[str]
) -> Expectation:
    """What crashes may leave of a save that has been carried out and recorded."""
    kinds = [(o.kind, o.target or o.path) for o in journal.operations]
    # The last one: an earlier checkpoint of that name may have got it back before.
    published = len(kinds) - kinds[::-1].index(("rename", f"{ROOT}/{final}"))
    safe = kinds.index(("sync_dir", ROOT), published) + 1
    return Expectation(old, newest_digest(root), published, safe, before & list_digests(root))


def judge(root: Path, state: CrashState, expected: Expectation) -> None:
    """Start as after a crash; raises `Wrong` with what is not as it must be."""
    allowed = expected.allowed(state)
    found = newest_digest(root)
    if found not in allowed:
        which = {expected.old: "the old one", expected.new: "the new one", None: "none"}
        raise Wrong(f"found {which.get(found, found)}")
    _check_whole(root)
    if CheckpointManager(root).clean_leftovers():
        if newest_digest(root) != found:
            raise Wrong("another checkpoint is found after the clean-up")
        _check_whole(root)
    lost = expected.kept - list_digests(root)
    if lost:
        raise Wrong(f"{len(lost)} checkpoints that were to be kept are gone")
    left = [p.name for p in root.glob("*") if ".tmp-" in p.name or p.name.startswith(".trash")]
    if left:
        raise Wrong(f"left behind: {', '.join(left)}")


def _check_whole(root: Path) -> None:
    for checkpoint in committed(root):
        problems = verify(checkpoint.path)
        if problems:
            raise Wrong(f"listed but not whole: {'; '.join(problems)}")


def _check_load(root: Path) -> None:
    manager = CheckpointManager(root)
    path = manager.resolve(True)
    if path is None:
        return
    width = 0
    for width in (2, 3, 4, 6, 8):
        target = make_contents(99, -1, width)
        try:
            loaded = manager.load(target, path)
        except Exception as error:
            problem = error
            continue
        value = target.components[1].stateful.state_dict()["value"]
        if loaded.trainer_state["global_step"] != value:
            raise Wrong("the loaded parts are of different checkpoints")
        return
    raise Wrong(f"cannot be loaded: {problem}")


def _check_save(root: Path) -> None:
    CheckpointManager(root).save(make_contents(98, 98), 99)
    path = CheckpointManager(root).resolve(True)
    if path is None or path.name != "checkpoint-99":
        raise Wrong("the next save is not found")


def prove_crash_points(
    num_points: int, seed: int, *, num_cuts: int = 4, num_torn: int = 3, stride: int = 1
) -> Outcome:
    """At least `num_points` crash points over all scenarios; with `stride`, only every so many."""
    outcome = Outcome("crash points", seed)
    sweep = 0
    with memory_folder() as folder, quiet():
        while outcome.counts["points"] < num_points:
            for number, scenario in enumerate(make_scenarios(seed + sweep)):
                place = folder / f"{sweep}-{number}"
                place.mkdir()
                _prove_scenario(scenario, place, outcome, seed + sweep, num_cuts, num_torn, stride)
                shutil.rmtree(place)
            sweep += 1
    outcome.counts["sweeps"] = sweep
    return outcome


def _prove_scenario(
    scenario: Scenario,
    place: Path,
    outcome: Outcome,
    seed: int,
    num_cuts: int,
    num_torn: int,
    stride: int,
) -> None:
    journal, expected = record(scenario, place / "recorded")
    counts = outcome.counts
    counts["operations"] += len(journal.operations)
    judged: set[tuple[int, frozenset[str | None]]] = set()
    states = crash_states(journal, seed=seed, num_cuts=num_cuts, num_torn=num_torn)
    for index, state in enumerate(states):
        if index % stride:
            continue
        counts["points"] += 1
        counts["points with loss of unsynced data"] += state.loses_unsynced
        counts["points inside a write"] += state.variant.startswith("torn")
        key = (state.directory.key(), frozenset(expected.allowed(state)))
        if key in judged:
            continue
        judged.add(key)
        counts["distinct states"] += 1
        try:
            state.directory.write_to(place / "crashed")
            judge(place / "crashed" / ROOT, state, expected)
            if counts["distinct states"] % _LOAD_EVERY == 0:
                _check_load(place / "crashed" / ROOT)
                counts["states loaded"] += 1
            if counts["distinct states"] % _SAVE_EVERY == 0:
                _check_save(place / "crashed" / ROOT)
                counts["states saved into"] += 1
            if counts["distinct states"] % _AGAIN_EVERY == 0:
                _crash_again(state, place, expected, outcome, seed, stride)
        except Exception as error:
            outcome.fail(f"seed {seed}, {scenario.name}, {state}: {type(error).__name__}: {error}")


def _crash_again(
    state: CrashState, place: Path, expected: Expectation, outcome: Outcome, seed: int, stride: int
) -> None:
    """Crash once more, inside the clean-up of the next start."""
    folder = place / "again"
    state.directory.write_to(folder)
    journal = Journal(folder)
    if not (folder / ROOT).is_dir():
        return
    CheckpointManager(
        folder / ROOT, storage=FaultyStorage(folder / ROOT, journal=journal)
    ).clean_leftovers()
    found = newest_digest(folder / ROOT)
    again = Expectation(found, found, 0, 0, expected.kept)
    chance = random.Random(f"{seed}/{state}")
    states = crash_states(journal, seed=chance.randrange(2**32), num_cuts=1)
    for second in itertools.islice(states, 0, None, stride):
        outcome.counts["points"] += 1
        outcome.counts["points in a clean-up"] += 1
        second.directory.write_to(place / "second")
        try:
            judge(place / "second" / ROOT, second, again)
        except Wrong as error:
            raise Wrong(f"then {second}: {error}") from error
