"""Proof that a checkpoint changed after its save is never taken for a good one.

Owns: every bit of a small checkpoint flipped in turn, and coarser damage. Does not own: the check
itself (checkpoint/manifest.py).
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from headway.checkpoint import (
    CheckpointContents,
    CheckpointManager,
    SharingPattern,
    StateComponent,
    verify,
)
from headway.checkpoint.manifest import MANIFEST_NAME
from headway.checkpoint.storage import list_files
from headway.testing.contents import Counter, make_contents, train
from headway.testing.proofs.crashes import Wrong, quiet
from headway.testing.proofs.outcome import Outcome, memory_folder

# One flip in so many is also taken through the choice of what to resume from.
_RESOLVE_EVERY = 50


def _make_run(folder: Path, seed: int) -> tuple[Path, Path]:
    """A good checkpoint, and a newer one to damage."""
    manager = CheckpointManager(folder / "run", max_shard_bytes=2048)
    good = manager.save(_small_contents(seed, 1), 1)
    return good, manager.save(_small_contents(seed + 1, 2), 2, metric=0.1 + 0.2)


def _small_contents(seed: int, value: int) -> CheckpointContents:
    # Without the generators, whose state would be most of the bits.
    counter = StateComponent("counter", Counter(value), SharingPattern.GLOBAL)
    contents = make_contents(seed, value, width=20, components=[counter])
    train(contents, 1)
    return contents


def _require_found(newest: Path, name: str) -> None:
    problems = verify(newest)
    if not problems:
        raise Wrong("not detected")
    if not any(name in problem for problem in problems):
        raise Wrong(f"{name} is not named: {problems}")


def _require_fallback(newest: Path, good: Path, name: str) -> None:
    path, problems = CheckpointManager(newest.parent).find_intact()
    if path != good:
        raise Wrong(f"{path} is taken instead of the good one")
    if not any(name in problem for problem in problems):
        raise Wrong(f"{name} is not named: {problems}")


def prove_flips(num_flips: int | None, seed: int, *, part: tuple[int, int] = (0, 1)) -> Outcome:
    """Flip bits, one at a time: all of them, or `num_flips` chosen by the seed.

    `part` (k, n) takes the k-th of n parts of all bits.
    """
    outcome = Outcome("bit flips", seed)
    with memory_folder() as folder, quiet():
        good, newest = _make_run(folder, seed)
        bits = [
            (name, bit)
            for name in list_files(newest)
            for bit in range(8 * (newest / name).stat().st_size)
        ]
        outcome.counts["bits of the checkpoint"] = len(bits)
        if num_flips is not None:
            bits = random.Random(seed).sample(bits, min(num_flips, len(bits)))
        for number, (name, bit) in enumerate(bits[part[0] :: part[1]]):
            try:
                _flip(newest / name, bit)
                _require_found(newest, name)
                if number % _RESOLVE_EVERY == 0:
                    _require_fallback(newest, good, name)
                    outcome.counts["fallbacks taken"] += 1
            except Exception as error:
                outcome.fail(f"seed {seed}, bit {bit} of {name}: {error}")
            finally:
                _flip(newest / name, bit)
            outcome.counts["flips"] += 1
        if verify(newest):
            outcome.fail(f"seed {seed}: not whole again at the end: {verify(newest)}")
    return outcome


def _flip(path: Path, bit: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(descriptor, 1, bit // 8)[0]
        os.pwrite(descriptor, bytes([byte ^ 1 << bit % 8]), bit // 8)
    finally:
        os.close(descriptor)


def prove_damage(num_rounds: int, seed: int) -> Outcome:
    """Truncation, zero fill, swapped, missing, grown, replaced and linked files, of every file."""
    outcome = Outcome("damaged files", seed)
    with memory_folder() as folder, quiet():
        for number in range(seed, seed + num_rounds):
            shutil.rmtree(folder / "run", ignore_errors=True)
            good, newest = _make_run(folder, number)
            for name in list_files(newest):
                for what, harm in _harms(newest, good, name, random.Random(f"{number}/{name}")):
                    _try_harm(outcome, f"seed {number}, {what} {name}", harm, newest, good, name)
                    outcome.counts[what.split(":")[0]] += 1
    return outcome


def _try_harm(
    outcome: Outcome, label: str, harm: Callable[[], object], newest: Path, good: Path, name: str
) -> None:
    backup = newest.with_name("backup")
    shutil.copytree(newest, backup)
    try:
        harm()
        _require_found(newest, name)
        _require_fallback(newest, good, name)
    except Exception as error:
        outcome.fail(f"{label}: {type(error).__name__}: {error}")
    finally:
        shutil.rmtree(newest)
        backup.rename(newest)
    outcome.counts["damages"] += 1


def _harms(
    newest: Path, good: Path, name: str, chance: random.Random
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Ways to harm one file; each is carried out on a checkpoint that is whole."""
    path = newest / name
    data = path.read_bytes()

    def link() -> None:
        outside = newest.parent / "outside"
        outside.write_bytes(data)
        path.unlink()
        path.symlink_to(outside)

    def replace() -> None:
        path.unlink()
        path.mkdir()

    def swap(other: Path) -> None:
        theirs = other.read_bytes()
        other.write_bytes(data)
        path.write_bytes(theirs)

    yield "missing", path.unlink
    yield "linked out", link
    yield "replaced by a directory", replace
    yield "empty", lambda: os.truncate(path, 0)
    yield "grown", lambda: path.write_bytes(data + b"\0")
    yield "zeros", lambda: path.write_bytes(bytes(len(data)))
    for cut in {len(data) - 1, *(chance.randrange(len(data)) for _ in range(3))}:
        yield f"truncated:{cut}", partial(os.truncate, path, cut)
    start = chance.randrange(len(data))
    zeroed = data[:start] + bytes(min(64, len(data) - start)) + data[start + 64 :]
    if zeroed != data:
        yield "zeroed stretch", lambda: path.write_bytes(zeroed)
    if name == MANIFEST_NAME:
        return
    if (good / name).exists() and (good / name).read_bytes() != data:
        yield "of the other checkpoint", lambda: shutil.copyfile(good / name, path)
    others = [n for n in list_files(newest) if (newest / n).read_bytes() != data]
    # Without its manifest nothing can be said about the other files.
    other = newest / chance.choice([n for n in others if n != MANIFEST_NAME])
    yield f"swapped:{other.name}", lambda: swap(other)
