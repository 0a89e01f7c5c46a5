"""Saves to break: what is in the run directory before, and what is saved.

Owns: the list of scenarios and how a seed varies them. Does not own: the breaking.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint import CheckpointManager
from headway.checkpoint.pins import pin
from headway.checkpoint.storage import Storage
from headway.testing.contents import make_contents, train


@dataclass(frozen=True)
class Scenario:
    """A save into a run directory in a certain state."""

    name: str
    prepare: Callable[[Path], None]
    """Makes the run directory as it is before."""
    save: Callable[[Storage], None]
    """The save; its checkpoint counts from `final` on."""
    final: str = "checkpoint-5"


def _contents(value: int, width: int) -> Any:
    contents = make_contents(value, value, width)
    contents.model.train()
    train(contents, 1)
    return contents


def _save(
    value: int, step: int, width: int = 4, *, kind: str = "training", **options: Any
) -> Callable[[Storage], None]:
    """A function that saves one checkpoint into a storage."""
    extra = options.pop("before_commit", None)
    metric = options.pop("metric", None)

    def save(storage: Storage) -> None:
        manager = CheckpointManager(storage.root, storage=storage, **options)
        manager.save(_contents(value, width), step, kind=kind, metric=metric, before_commit=extra)

    return save


def _before(*steps: int, width: int = 4, **options: Any) -> Callable[[Path], None]:
    """A function that fills a run directory with checkpoints of these steps."""

    def prepare(root: Path) -> None:
        manager = CheckpointManager(root, save_total_limit=None, **options)
        for number, step in enumerate(steps):
            manager.save(_contents(10 + number, width), step, metric=1.0 / (1 + number))

    return prepare


def _add_files(directory: Path) -> None:
    (directory / "tokenizer.json").write_text('{"made": "by hand"}')
    (directory / "notes").mkdir()
    (directory / "notes" / "why.txt").write_text("because")


def _foreign(root: Path) -> None:
    _before(3)(root)
    (root / "checkpoint-5").mkdir()
    (root / "checkpoint-5" / "mine.txt").write_text("not Headway's")


def _pinned(root: Path) -> None:
    _before(3, 5)(root)
    pin(root / "checkpoint-5")


def make_scenarios(seed: int) -> list[Scenario]:
    """The scenarios, in sizes chosen by the seed."""
    chance = random.Random(f"scenarios/{seed}")
    width = chance.choice((2, 3, 4, 6, 8))
    shard = chance.choice((32, 64, 100, 200, 2**20))
    small: dict[str, Any] = {"width": width, "max_shard_bytes": shard}
    number = chance.randrange(1000)
    return [
        Scenario("first save, no directory", lambda root: None, _save(number, 5, **small)),
        Scenario("next step", _before(3, width=width), _save(number, 5, **small)),
        Scenario("same step again", _before(3, 5, width=width), _save(number, 5, **small)),
        Scenario("an earlier step after a rollback", _before(5, 9), _save(number, 5, **small)),
        Scenario(
            "retention of one",
            _before(2, 3, width=width),
            _save(number, 5, save_total_limit=1, **small),
        ),
        Scenario(
            "retention with the best",
            _before(1, 2, 3, 4, width=width),
            _save(number, 5, save_total_limit=2, preserve_n_best=1, metric=0.7, **small),
        ),
        Scenario(
            "same step and retention",
            _before(3, 5, width=width),
            _save(number, 5, save_total_limit=1, **small),
        ),
        Scenario("files added", _before(3), _save(number, 5, before_commit=_add_files, **small)),
        Scenario("a foreign directory", _foreign, _save(number, 5, **small)),
        Scenario("a pinned checkpoint", _pinned, _save(number, 5, save_total_limit=1, **small)),
    ]
