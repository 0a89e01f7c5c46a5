"""The weights that a run ends with under `load_best_model_at_end`.

Owns: which checkpoint has them, and what follows if that is damaged. Does not own: which evaluation
was the best (engine/best.py), which checkpoints stay (retention.py), loading (checkpoint).
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headway.checkpoint import CheckpointError, CheckpointManager, DamagedError, read_manifest
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
    state.best_model_checkpoint = None if best is None else manager.storage.locate(best)
    logger.warning(
        "%s changed: the best evaluation so far is now %s (%s)",
        " and ".join(changed),
        state.best_metric,
        state.best_model_checkpoint,
    )


def keep_chosen(state: TrainerState, manager: CheckpointManager) -> None:
    """Retention leaves the checkpoint alone that `set_best_checkpoint` named, also if a later
    evaluation was better."""
    if state.chosen_checkpoint is None:
        return
    path = manager.storage.path_of(state.chosen_checkpoint).absolute()
    if path.parent == manager.output_dir:
        manager.pinned.add(path.name, "best")


def load_best(
    trainer: Trainer, manager: CheckpointManager, metric_name: str
) -> CheckpointError | None:
    """Give the model the weights of the best checkpoint; counters and optimizer stay as they are.

    A damaged one is named and the next best is taken; if there is none the last weights stay. The
    run is over and saved by then, so that nothing is raised here: what is to be raised once it has
    ended is returned, under `on_damaged_checkpoint="stop"` and where an address is out of reach.
    """
    try:
        return _load_whole(trainer, manager, metric_name)
    except _OutOfReachError as error:
        return error


class _OutOfReachError(CheckpointError):
    """Nobody could look for the best checkpoint, or fetch it; the model is as it was."""


@contextmanager
def _reaching(trainer: Trainer) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a network or its library raises
        address = trainer.args.checkpoint_address
        if address is None:
            raise
        raise _OutOfReachError(
            f"load_best_model_at_end: the best checkpoint could not be fetched from {address}: "
            f"{error}. {_state_of(trainer)}; the same run loads it when it is started again"
        ) from error


def _load_whole(
    trainer: Trainer, manager: CheckpointManager, metric_name: str
) -> CheckpointError | None:
    assert trainer.strategy is not None
    damaged: set[str] = set()
    if trainer.args.on_damaged_checkpoint == "stop":
        with _reaching(trainer):
            own = _unreadable_best(manager, trainer.state, metric_name)
        unreadable = trainer._ranks().share(own)
        if unreadable is not None:
            told, problem = unreadable
            return CheckpointError("\n".join([problem, _advice(trainer, told)]))
    while True:
        with _reaching(trainer):
            found = _find_best(manager, trainer.state, metric_name, damaged)
            if found is not None:
                manager.storage.fetch(found)
        best = trainer._ranks().share(None if found is None else str(found))
        if best is None:
            return None
        told = manager.storage.locate(Path(best))
        logger.info("loading the best model, %s", told)
        try:
            manager.load_model(trainer.strategy.unwrap(), best)
        except DamagedError as error:
            damaged.add(best)
            problems = error.problems
        else:
            _tell_loaded(trainer.state, manager, Path(best))
            trainer.bus.fire("on_load_model_weights", path=told)
            return None
        if trainer.args.on_damaged_checkpoint == "stop":
            return CheckpointError("\n".join([*problems, _advice(trainer, told)]))
        for problem in problems:
            logger.warning("load_best_model_at_end: passing over a damaged checkpoint: %s", problem)


def _tell_loaded(state: TrainerState, manager: CheckpointManager, best: Path) -> None:
    """The state names what was loaded, and not one that was deleted or is damaged."""
    recorded = state.best_model_checkpoint
    if recorded is None or manager.storage.path_of(recorded).absolute() != best.absolute():
        state.best_model_checkpoint = manager.storage.locate(best)


def _advice(trainer: Trainer, best: str) -> str:
    folder = trainer.args.checkpoint_place
    return (
        f"load_best_model_at_end (on_damaged_checkpoint): the best checkpoint, {best}, is damaged. "
        f"{_state_of(trainer)}. 'headway checkpoint verify {shlex.quote(str(folder))}' tells which "
        "checkpoints are whole; with on_damaged_checkpoint=fallback the same run loads the best of "
        "them"
    )


def _state_of(trainer: Trainer) -> str:
    return (
        "The run is complete: the model has the weights of its last step, "
        f"{trainer.state.global_step}, which {trainer.args.checkpoint_place} holds too"
    )


def _unreadable_best(
    manager: CheckpointManager, state: TrainerState, metric_name: str
) -> list[str] | None:
    """The checkpoint of the best evaluation and what is wrong with its manifest, where it is there
    and not to be read: it would be passed over as if it had never been."""
    recorded = state.best_model_checkpoint
    if recorded is None:
        return None
    place = manager.storage.path_of(recorded).absolute()
    if not place.is_dir():
        return None
    try:
        read_manifest(place)
    except CheckpointError as error:
        best = None if place.parent == manager.output_dir else manager.best()
        if best is not None and _metric(best, metric_name) == state.best_metric:
            return None  # the run was moved: what is left of it at its old place does not matter
        return [recorded, manager.storage.tell(str(error))]
    return None


def _find_best(
    manager: CheckpointManager, state: TrainerState, metric_name: str, damaged: Collection[str]
) -> Path | None:
    """The checkpoint of the run's best evaluation, else the best one of its folder.

    They are not the same where a run went on from another folder, or from an earlier checkpoint of
    its own: what the folder holds of a time that did not happen is not this run's.
    """
    best, recorded, metric = manager.best(), state.best_model_checkpoint, state.best_metric
    if recorded is not None and metric is not None:
        place = manager.storage.path_of(recorded).absolute()
        if _metric(place, metric_name) == metric and str(place) not in damaged:
            return place
    if best is None:
        counted = f"checkpoint has an evaluation with a number as {metric_name!r}"
        what = "evaluated one is whole" if damaged else counted
        logger.warning(
            "load_best_model_at_end: no %s; the model keeps the weights of the last step, %d",
            what,
            state.global_step,
        )
    elif metric is not None and _metric(best, metric_name) != metric:
        logger.warning(
            "load_best_model_at_end: the best evaluation, %s at step %s, has no %scheckpoint; of "
            "those that are there the best is taken, %s (%s)",
            metric,
            state.best_global_step,
            "whole " if damaged else "",
            manager.storage.locate(best),
            _metric(best, metric_name),
        )
    return best


def _metric(path: str | Path, name: str) -> float | None:
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return None
    return manifest.metric if manifest.metrics is None else lookup_metric(manifest.metrics, name)
