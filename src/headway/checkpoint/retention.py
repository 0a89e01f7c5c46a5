"""Which checkpoints may go, as a pure function of the committed list.

Owns: the rule. Does not own: the deletion (manager.py), where a pin is noted (pins.py) or what
makes a metric better (best.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headway.checkpoint.best import lookup_metric
from headway.checkpoint.manifest import CommittedCheckpoint
from headway.errors import ConfigError


@dataclass(frozen=True)
class Entry:
    """One committed checkpoint as retention sees it."""

    id: str
    save_counter: int
    step: int
    metric: float | None = None
    permanent: bool = False
    pinned: bool = False
    kind: str = "training"
    ephemeral: bool = False
    """Made only to lose little work when the job is killed: goes when a newer one is there."""


def entry_of(
    checkpoint: CommittedCheckpoint, *, pinned: bool, metric_name: str | None = None
) -> Entry:
    """A checkpoint as retention sees it; its metric is the one of that name, else the ranked one.

    A run may rank by another metric than the one that a checkpoint was saved under.
    """
    manifest = checkpoint.manifest
    metric = manifest.metric
    if metric_name is not None and manifest.metrics is not None:
        metric = lookup_metric(manifest.metrics, metric_name)
    return Entry(
        id=checkpoint.path.name,
        save_counter=checkpoint.save_counter,
        step=checkpoint.step,
        metric=metric,
        permanent=bool(manifest.metadata.get("permanent")),
        pinned=pinned,
        kind=checkpoint.kind,
        ephemeral=bool(manifest.metadata.get("ephemeral")),
    )


def _age(entry: Entry) -> tuple[int, int, str]:
    return (entry.save_counter, entry.step, entry.id)


def rank_by_metric(checkpoints: Sequence[Entry], *, greater_is_better: bool) -> list[Entry]:
    """Training checkpoints that have a metric, best first; of equals the earlier save first."""
    sign = -1.0 if greater_is_better else 1.0
    scored = [
        (sign * entry.metric, entry.save_counter, entry)
        for entry in checkpoints
        if entry.kind == "training" and entry.metric is not None and not math.isnan(entry.metric)
    ]
    return [entry for _, _, entry in sorted(scored, key=lambda item: item[:2])]


def choose_deletions(
    checkpoints: Sequence[Entry],
    *,
    limit: int | None,
    num_best: int = 0,
    greater_is_better: bool = False,
    keep_every_n_steps: int | None = None,
    keep_ephemeral: bool = False,
    drop_ordinary: bool = False,
) -> list[str]:
    """Ids to delete, oldest first.

    Set aside what is not of kind training, the permanent, the pinned, the `num_best` best by
    metric and the multiples of `keep_every_n_steps`. Of the rest the newest save stays whatever it
    is, other ephemeral ones go (unless `keep_ephemeral`), and of the ordinary ones the `limit`
    newest by save counter stay (`None`: all, or none with `drop_ordinary`). So the newest training
    checkpoint is never deleted.
    """
    _check(limit, num_best, keep_every_n_steps)
    training = sorted((entry for entry in checkpoints if entry.kind == "training"), key=_age)
    best = rank_by_metric(training, greater_is_better=greater_is_better)[:num_best]
    best_ids = {entry.id for entry in best}
    free = [
        entry
        for entry in training
        if not (entry.permanent or entry.pinned or entry.id in best_ids)
        and (keep_every_n_steps is None or entry.step % keep_every_n_steps != 0)
    ]
    ordinary = [entry for entry in free if not entry.ephemeral]
    if limit is not None:
        ordinary = ordinary[-limit:]
    elif drop_ordinary:
        ordinary = []
    stay = {entry.id for entry in ordinary}
    if keep_ephemeral:
        stay.update(entry.id for entry in free if entry.ephemeral)
    stay.update(entry.id for entry in training[-1:])
    return [entry.id for entry in free if entry.id not in stay]


def _check(limit: int | None, num_best: int, keep_every_n_steps: int | None) -> None:
    if limit is not None and limit < 1:
        raise ConfigError(f"save_total_limit is {limit}; allowed: None (keep all) or at least 1")
    if num_best < 0:
        raise ConfigError(f"preserve_n_best is {num_best}; allowed: 0 or more")
    if keep_every_n_steps is not None and keep_every_n_steps < 1:
        raise ConfigError(
            f"keep_every_n_steps is {keep_every_n_steps}; allowed: None (off) or at least 1"
        )
