"""Proof that an error of the disk fails the save that met it, and nothing else.

Owns: errors at every operation of the scenarios, alone and through training, and a disk that is
really full. Does not own: the scenarios.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
from pathlib import Path
from typing import Any

from headway.checkpoint import CheckpointManager, verify
from headway.checkpoint.manifest import committed
from headway.testing.faults import ERRNOS, Fault, FaultyStorage, enumerate_operations
from headway.testing.proofs.crashes import Wrong, newest_digest, quiet
from headway.testing.proofs.outcome import Outcome, memory_folder
from headway.testing.proofs.scenarios import Scenario, make_scenarios

# After these the new checkpoint is in place; what fails then is only tidying.
_TIDYING = ("unlink", "remove_dir")


def prove_io_errors(num_injections: int, seed: int) -> Outcome:
    """At least `num_injections` errors, over all operations of the scenarios and all errors.

    Every other one lasts: all operations after it fail as well, as on a full disk.
    """
    outcome = Outcome("I/O errors", seed)
    kinds = itertools.cycle([*ERRNOS.items(), ("short write", 0), ("lost write", 0)])
    lasting = itertools.cycle((False, True, False))
    sweep = 0
    with memory_folder() as folder, quiet():
        while outcome.counts["injections"] < num_injections:
            for scenario in make_scenarios(seed + sweep):
                _break_scenario(scenario, folder, outcome, seed + sweep, kinds, lasting)
                if outcome.counts["injections"] >= num_injections:
                    break
            sweep += 1
    return outcome


def _break_scenario(
    scenario: Scenario, folder: Path, outcome: Outcome, seed: int, kinds: Any, lasting: Any
) -> None:
    source = folder / "source" / "run"
    shutil.rmtree(source.parent, ignore_errors=True)
    source.parent.mkdir()
    scenario.prepare(source)
    old = newest_digest(source)
    counted = folder / "counted" / "run"
    shutil.rmtree(counted.parent, ignore_errors=True)
    shutil.copytree(source.parent, counted.parent)
    operations = enumerate_operations(scenario.save, counted)
    for at in range(1, len(operations) + 1):
        name, number = next(kinds)
        if name.endswith("write"):
            num_writes = sum(o.kind == "write" for o in operations)
            fault = Fault(
                "short_write" if name == "short write" else "truncate",
                1 + at % num_writes,
                operation="write",
            )
        else:
            fault = Fault("error", at, errno=number, lasting=next(lasting))
        root = folder / "broken" / "run"
        shutil.rmtree(root.parent, ignore_errors=True)
        shutil.copytree(source.parent, root.parent)
        outcome.counts["injections"] += 1
        outcome.counts[name] += 1
        outcome.counts["lasting"] += fault.lasting
        try:
            _break_once(scenario, root, fault, old, outcome)
        except Exception as error:
            outcome.fail(f"seed {seed}, {scenario.name}, {fault}: {type(error).__name__}: {error}")


def _break_once(
    scenario: Scenario, root: Path, fault: Fault, old: str | None, outcome: Outcome
) -> None:
    storage = FaultyStorage(root, fault)
    raised: OSError | None = None
    seen: list[str] = []
    storage._on_operation = lambda o: seen.append(o.kind)
    try:
        scenario.save(storage)
    except OSError as error:
        raised = error
    if not storage.struck:
        raise Wrong("the fault did not happen")
    found = newest_digest(root) if root.exists() else None
    struck_at = _kind_at(seen, fault)
    if raised is None:
        outcome.counts["saved all the same"] += 1
        if fault.action != "short_write" and struck_at not in (*_TIDYING, "sync_dir"):
            raise Wrong(f"no error was raised for {struck_at}")
        if found == old:
            raise Wrong("no error was raised, but the new checkpoint is not found")
    else:
        outcome.counts["errors raised"] += 1
        expected = errno.EIO if fault.action == "truncate" else fault.errno
        if raised.errno != expected:
            raise Wrong(f"{raised!r} is raised instead")
    for checkpoint in committed(root) if root.exists() else []:
        problems = verify(checkpoint.path)
        if problems:
            raise Wrong(f"listed but not whole: {problems}")
    if old is not None and found is None:
        raise Wrong("the old checkpoint is gone")
    left = [p.name for p in root.glob("*.tmp-*")]
    if left and not fault.lasting:
        raise Wrong(f"left behind: {left}")
    _require_next_save(root)


def _kind_at(seen: list[str], fault: Fault) -> str:
    if fault.operation is not None:
        return fault.operation
    return seen[fault.at - 1]


def _require_next_save(root: Path) -> None:
    """The same process, once the disk works again."""
    from headway.testing.contents import make_contents

    manager = CheckpointManager(root)
    path = manager.save(make_contents(97, 97), 97)
    if manager.resolve(True) != path:
        raise Wrong("the next save is not found")


def prove_training_errors(num_runs: int, seed: int) -> Outcome:
    """Training whose disk fails in the middle: the error ends it, and the last good save stays."""
    from headway.testing.trainer import tiny_trainer

    outcome = Outcome("I/O errors in training", seed)
    for number in range(seed, seed + num_runs):
        chance = random.Random(f"training/{number}")
        name, code = chance.choice(list(ERRNOS.items()))
        background = chance.random() < 0.7
        # A save takes some 130 operations: the error comes in one of the first three.
        at = chance.randint(1, 400)
        fault = Fault("error", at, errno=code, lasting=chance.random() < 0.5)
        outcome.counts["runs"] += 1
        outcome.counts[name] += 1
        with memory_folder() as folder, quiet():
            watch = _Watch()
            trainer = tiny_trainer(
                folder,
                [watch],
                max_steps=20,
                save_strategy="steps",
                save_steps=2,
                save_async=background,
            )
            storage = FaultyStorage(folder / "out", fault)
            try:
                with _StorageOfManagers(storage):
                    trainer.train()
                raised = None
            except OSError as error:
                raised = error
            problem = _judge_training(folder / "out", storage, raised, code, watch, background)
            if problem:
                outcome.fail(f"seed {number}, {fault}, background={background}: {problem}")
            outcome.counts["errors raised"] += raised is not None
    return outcome


class _Watch:
    """Which steps were begun and which saves were announced."""

    def __init__(self) -> None:
        self.step = 0
        self.saved = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step

    def on_save(self, args: Any, state: Any, control: Any, step: int, **kwargs: Any) -> None:
        self.saved = step


class _StorageOfManagers:
    """Managers made inside use a given storage."""

    def __init__(self, storage: FaultyStorage) -> None:
        self._storage = storage
        self._init = CheckpointManager.__init__

    def __enter__(self) -> None:
        init, storage = self._init, self._storage

        def faulty(manager: Any, output_dir: Any, **options: Any) -> None:
            init(manager, output_dir, **{**options, "storage": storage})

        CheckpointManager.__init__ = faulty  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        CheckpointManager.__init__ = self._init  # type: ignore[method-assign, assignment]


def _judge_training(
    root: Path,
    storage: FaultyStorage,
    raised: OSError | None,
    code: int,
    watch: _Watch,
    background: bool,
) -> str | None:
    listed = [c for c in committed(root) if not verify(c.path)]
    if not storage.struck:
        return "the fault did not happen"
    if raised is None:
        return None if listed and listed[-1].step == 20 else "no error and no last checkpoint"
    if raised.errno != code:
        return f"{raised!r} was raised instead"
    newest = listed[-1].step if listed else 0
    if newest < watch.saved:
        return f"the save of step {watch.saved} was announced and is gone"
    # A save every two steps: the failed one was begun two steps after the last good one.
    if watch.step - newest > 4:
        return f"training went on to step {watch.step}; the last good save is of {newest}"
    return None


def fill_disk(mount: Path, seed: int) -> Outcome:
    """On a small file system of its own: save until it is full, free it, and save again."""
    from headway.testing.contents import make_contents

    outcome = Outcome("a full disk", seed)
    root = mount / "run"
    manager = CheckpointManager(root, save_total_limit=None)
    with quiet():
        step = 0
        while True:
            step += 1
            try:
                manager.save(make_contents(step, step, width=32), step)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                break
        outcome.counts["saves until full"] = step - 1
        if step < 3:
            outcome.fail("the file system is too small for this test")
        for checkpoint in committed(root):
            for problem in verify(checkpoint.path):
                outcome.fail(problem)
        if [c.step for c in committed(root)] != list(range(1, step)):
            outcome.fail("checkpoints are gone")
        left = [name for name in os.listdir(root) if not name.startswith("checkpoint-")]
        left += [name for name in os.listdir(root) if ".tmp-" in name]
        if left:
            outcome.fail(f"left behind: {left}")
        shutil.rmtree(root / "checkpoint-1")
        path = manager.save(make_contents(step, step, width=32), step)
        if manager.resolve(True) != path:
            outcome.fail("the save after room was made is not found")
    return outcome
