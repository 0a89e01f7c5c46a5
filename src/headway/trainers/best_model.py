"""The weights that a run ends with under `load_best_model_at_end`.

Owns: which checkpoint has them. Does not own: which evaluation was the best (engine/best.py), which
checkpoints stay (checkpoint/retention.py), loading (checkpoint).
"""

from __future__ import annotations

import logging
from pathlib import Path

from headway.checkpoint import CheckpointError, CheckpointManager, read_manifest
from headway.engine.state import TrainerState

logger = logging.getLogger(__name__)


def find_best(manager: CheckpointManager, state: TrainerState) -> Path | None:
    """The checkpoint of the run's best evaluation, else the best one of its folder.

    They are not the same where a run went on from another folder, or from an earlier checkpoint of
    its own: what the folder holds of a time that did not happen is not this run's.
    """
    best, recorded, metric = manager.best(), state.best_model_checkpoint, state.best_metric
    if recorded is not None and metric is not None and _metric(recorded) == metric:
        return Path(recorded).absolute()
    if best is None:
        logger.warning("load_best_model_at_end: no checkpoint was evaluated; the last one stays")
    elif metric is not None and _metric(best) != metric:
        logger.warning(
            "load_best_model_at_end: the best evaluation, %s at step %s, has no checkpoint; of "
            "those that are there the best is taken, %s (%s)",
            metric,
            state.best_global_step,
            best,
            _metric(best),
        )
    return best


def _metric(path: str | Path) -> float | None:
    try:
        return read_manifest(path).metric
    except CheckpointError:
        return None
