"""The weights that a run ends with under `load_best_model_at_end`.

Owns: which checkpoint has them. Does not own: which evaluation was the best (engine/best.py), which
checkpoints stay (checkpoint/retention.py), loading (checkpoint).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from headway.checkpoint import CheckpointError, CheckpointManager, read_manifest
from headway.checkpoint.best import lookup_metric
from headway.engine.state import TrainerState
from headway.trainers.resume import ResumeReport

if TYPE_CHECKING:
    from headway.trainers.trainer import Trainer

logger = logging.getLogger(__name__)


_RANKED_BY = {"args.metric_for_best_model", "args.greater_is_better"}


def rank_anew(
    trainer: Trainer, manager: CheckpointManager, metric_name: str, report: ResumeReport
) -> None:
    """Where a resumed run ranks by another metric: the best so far is the best of its folder.

    `metric_name` is what the manager ranks by, which may be another one than the evaluations'.
    """
    changed = sorted(one.key for one in report.differences if one.key in _RANKED_BY)
    if not changed or "trainer" not in report.loaded:
        return
    state, of_both = trainer.state, metric_name == trainer.args.metric_for_best_model
    best = manager.best() if of_both else None
    found = None if best is None else read_manifest(best)
    state.best_metric = None if best is None else _metric(best, metric_name)
    state.best_global_step = None if found is None else found.step
    state.best_model_checkpoint = None if best is None else str(best)
    logger.warning(
        "%s changed: the best evaluation so far is now %s (%s)",
        " and ".join(changed),
        state.best_metric,
        best,
    )


def find_best(manager: CheckpointManager, state: TrainerState, metric_name: str) -> Path | None:
    """The checkpoint of the run's best evaluation, else the best one of its folder.

    They are not the same where a run went on from another folder, or from an earlier checkpoint of
    its own: what the folder holds of a time that did not happen is not this run's.
    """
    best, recorded, metric = manager.best(), state.best_model_checkpoint, state.best_metric
    if recorded is not None and metric is not None and _metric(recorded, metric_name) == metric:
        return Path(recorded).absolute()
    if best is None:
        logger.warning("load_best_model_at_end: no checkpoint was evaluated; the last one stays")
    elif metric is not None and _metric(best, metric_name) != metric:
        logger.warning(
            "load_best_model_at_end: the best evaluation, %s at step %s, has no checkpoint; of "
            "those that are there the best is taken, %s (%s)",
            metric,
            state.best_global_step,
            best,
            _metric(best, metric_name),
        )
    return best


def _metric(path: str | Path, name: str) -> float | None:
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return None
    return manifest.metric if manifest.metrics is None else lookup_metric(manifest.metrics, name)
