"""Returning to an earlier checkpoint in the middle of a run.

Owns: which checkpoint that is, and what is not as it was there: the data position, the learning
rate. Does not own: who asks for it (callbacks), loading and saving (saving.py).

Newer checkpoints are of a time that did not happen. Where the run goes on otherwise than it did,
the state is therefore saved again under its step at once: a resume takes the newest save, and so
goes on from here, and not from what was given up.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.callbacks.guard.recovery import Recovery
from headway.checkpoint import CheckpointError, CheckpointManager, LoadedCheckpoint
from headway.checkpoint.ranks import Ranks
from headway.data.loader import WindowLoader
from headway.engine.rollback import RollbackRequest
from headway.errors import ConfigError
from headway.optim.rate_scaling import scale_rates

if TYPE_CHECKING:
    from headway.trainers.saving import Saver
    from headway.trainers.trainer import Trainer

logger = logging.getLogger(__name__)


def roll_back(
    trainer: Trainer, saver: Saver, loader: WindowLoader, request: RollbackRequest
) -> None:
    """Go back as the ranks ask for; all of them call this."""
    ranks, state = trainer._ranks(), trainer.state
    left_out = {name: one.skip_steps for name, one in _recoveries(trainer).items()}
    said = ranks.exchange([request.to_dict(), left_out])
    _require_same_steps([steps for _, steps in said])
    request = RollbackRequest.join(wish for wish, _ in said)
    path = _find_target(saver.manager, ranks, request.before_step)
    position, step, factor = loader.state_dict(), state.global_step, state.rate_factor
    epoch, raw_epoch, in_epoch = state.epoch, state.raw_epoch, step - state.epoch_start_step
    temporary, lengths = state.temporary_rate_factor, state.lengths
    # Also where no factor is asked for: an earlier rollback's outlives a return to before it.
    factor *= 1.0 if request.rate_factor is None else request.rate_factor

    def change(loaded: LoadedCheckpoint) -> None:
        # What was commanded meanwhile still holds.
        state.temporary_rate_factor, state.lengths = temporary, lengths
        if request.skip_data:
            loader.load_state_dict(position)
            # Epochs are those of the data, and so go on where the data do.
            state.epoch, state.raw_epoch = epoch, raw_epoch
            state.epoch_start_step = state.global_step - in_epoch
            # Steps to leave out are told by their number, and come with other data now.
            for recovery in _recoveries(trainer).values():
                recovery.skip_steps = []
        notes = ", keeping the data position" if request.skip_data else ""
        times = factor / float(loaded.trainer_state.get("rate_factor", 1.0))
        if times != 1.0:
            assert trainer.optimizer is not None
            scale_rates(trainer.optimizer, trainer.lr_scheduler, times)
            notes += f", base learning rates times {times:g}"
        state.rate_factor = factor
        logger.warning("rolled back from step %d to step %d%s", step, state.global_step, notes)

    loaded = saver.load(path, change=change)
    if request.changes_the_run:
        ephemeral = bool(loaded.manifest.metadata.get("ephemeral"))
        saver.save(loaded.manifest.metrics, "ephemeral" if ephemeral else "regular")


def _recoveries(trainer: Trainer) -> dict[str, Recovery]:
    """What guards of the run leave steps out by."""
    found = {name: getattr(one, "recovery", None) for name, one in trainer.bus.callbacks.items()}
    return {name: one for name, one in found.items() if isinstance(one, Recovery)}


def _require_same_steps(said: list[dict[str, Any]]) -> None:
    """A step that some ranks alone leave out would be waited for for ever."""
    for name, spans in said[0].items():
        for rank, other in enumerate(said):
            if other.get(name) != spans:
                raise RuntimeError(
                    f"a rollback was asked for, but {name} would leave out steps {spans} on rank 0 "
                    f"and {other.get(name)} on rank {rank} (each with its end exclusive)"
                )


def _find_target(manager: CheckpointManager, ranks: Ranks, before_step: int | None) -> Path:
    """The newest intact checkpoint, of a step that is not too late."""
    if before_step is None:
        path = manager.resolve(True)
        if path is None:
            raise RuntimeError("a rollback was asked for, but there is no checkpoint to return to")
        return path
    there = [c for c in reversed(manager.list()) if c.kind == "training"]
    names = ranks.share([c.path.name for c in there if c.step <= before_step])
    for name in names:
        try:
            found = manager.resolve(manager.output_dir / name)
        except (CheckpointError, ConfigError) as error:
            logger.warning("passing over a checkpoint: %s", error)
            continue
        assert found is not None, "a path was given"
        return found
    known = ", ".join(c.path.name for c in reversed(there)) or "none"
    raise RuntimeError(
        f"a rollback to step {before_step} or an earlier one was asked for, but there is no intact "
        f"checkpoint of such a step (there: {known})"
    )
