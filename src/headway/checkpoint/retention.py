"""Which checkpoints may go, as a pure function of the committed list.

Owns: the rule. Does not own: the deletion (manager.py) or what makes a metric better (best.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
) -> list[str]:
    """Ids to delete, oldest first.

    The rule: set aside what is not of kind training, the permanent, the pinned and the `num_best`
    best by metric. Of the rest the `limit` newest by save counter stay and the others go. So up to
    `limit` + `num_best` ordinary checkpoints remain, the newest save is always among them, and
    `limit=None` deletes nothing.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"save_total_limit is {limit}; allowed: None (keep all) or at least 1")
    if num_best < 0:
        raise ConfigError(f"preserve_n_best is {num_best}; allowed: 0 or more")
    if limit is None:
        return []
    best = rank_by_metric(checkpoints, greater_is_better=greater_is_better)[:num_best]
    protected = {entry.id for entry in best}
    ordinary = [
        entry
        for entry in checkpoints
        if entry.kind == "training"
        and not entry.permanent
        and not entry.pinned
        and entry.id not in protected
    ]
    ordinary.sort(key=lambda entry: (entry.save_counter, entry.step, entry.id))
    return [entry.id for entry in ordinary[:-limit]]
