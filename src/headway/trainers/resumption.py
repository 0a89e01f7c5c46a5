"""Going on from a checkpoint, with a report of what is not as it was.

Owns: the comparison of the run that starts with the one that saved. Does not own: the load itself
(saving.py), the form of the report (resume.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint import CheckpointManager, LoadedCheckpoint
from headway.checkpoint.contents import OPTIMIZER_STATE_NAME
from headway.checkpoint.errors import DamagedError
from headway.checkpoint.jsonfile import read_json_object
from headway.checkpoint.model import collect_model
from headway.checkpoint.optimizer import find_regrouped
from headway.optim.in_force import InForce
from headway.optim.rate_scaling import scale_rates
from headway.trainers.best_model import keep_chosen
from headway.trainers.overruled import Overruled, find_overruled, join_overruled
from headway.trainers.resume import (
    Found,
    ResumeReport,
    find_older,
    make_report,
    wanted_components,
)

if TYPE_CHECKING:
    from headway.data.loader import WindowLoader
    from headway.trainers.trainer import Trainer

logger = logging.getLogger(__name__)


def resume_run(
    trainer: Trainer,
    found: Found,
    load: Callable[[Path, set[str] | None], LoadedCheckpoint],
    others: CheckpointManager | None,
    *,
    config: dict[str, Any],
    fingerprints: dict[str, Any],
    loader: WindowLoader,
) -> ResumeReport:
    """Load what was found; tell, log, write and return what differs from the run that saved it.

    If its weights or optimizer turn out damaged, an older one of the `others` is loaded instead.
    """
    wanted = wanted_components(trainer.args)
    configured = InForce.read(trainer.optimizer, trainer.lr_scheduler)
    loaded = None
    while loaded is None:
        try:
            loaded = load(found.path, wanted)
        except DamagedError as error:
            if others is None:
                raise
            seed = trainer.state.seed if "trainer" in wanted else None
            found = find_older(others, trainer.args, seed, error)
            logger.info("resuming from %s", found.told)
    if {"optimizer", "scheduler"} & wanted:
        _take_back_rates(trainer, float(loaded.trainer_state.get("temporary_rate_factor", 1.0)))
    if "trainer" in wanted:
        keep_chosen(trainer.state, trainer._manager())
    in_force = InForce.read(trainer.optimizer, trainer.lr_scheduler)
    report = make_report(
        found,
        loaded.manifest,
        loaded.trainer_state,
        config=config,
        fingerprints=fingerprints,
        loaded=wanted,
        schedule=getattr(trainer.lr_scheduler, "changes", ()) if "scheduler" in wanted else (),
        overruled=_join(trainer, find_overruled(configured, in_force)),
        regrouped=_find_regrouped(trainer, loaded.path) if "optimizer" in wanted else (),
        in_force=in_force,
        left_out_by=(
            "checkpoint_components" if trainer.args.load_components is None else "load_components"
        ),
    )
    report.log()
    # Not earlier: with what was loaded a schedule may have changed the batch.
    now = loader.deal.window_samples
    _compare_steps(trainer, loaded.trainer_state.get("samples_per_step"), now)
    if trainer.env.rank == 0:
        report.write(trainer.args.output_dir)
    return report


def _take_back_rates(trainer: Trainer, factor: float) -> None:
    """Undo what was commanded for the run that saved alone."""
    trainer.state.temporary_rate_factor = 1.0
    if factor == 1.0 or trainer.optimizer is None:
        return
    trainer.state.rate_factor /= factor
    scale_rates(trainer.optimizer, trainer.lr_scheduler, 1.0 / factor)
    logger.info(
        "the learning rates were multiplied by %g in the run that saved, until it ends; that is "
        "undone",
        factor,
    )


def _join(trainer: Trainer, own: list[Overruled]) -> list[Overruled]:
    """What all ranks found: those of a pipeline have groups of their own."""
    return join_overruled(trainer._ranks().exchange([vars(item) for item in own]))


def _find_regrouped(trainer: Trainer, path: Path) -> list[str]:
    assert trainer.optimizer is not None and trainer.strategy is not None
    names = collect_model(trainer.strategy.unwrap()).names_by_id()
    saved = read_json_object(path / OPTIMIZER_STATE_NAME)
    own = find_regrouped(trainer.optimizer, names, saved)
    told = trainer._ranks().exchange(own)
    return list(dict.fromkeys(line for lines in told for line in lines))


def _compare_steps(trainer: Trainer, before: Any, now: int) -> None:
    """Another number of ranks makes another step of the same options."""
    if isinstance(before, int) and before != now and trainer.env.rank == 0:
        logger.warning(
            "an optimizer step takes %d samples now, it took %d in the run that saved the "
            "checkpoint; set global_batch_size to keep it whatever the number of ranks",
            now,
            before,
        )
