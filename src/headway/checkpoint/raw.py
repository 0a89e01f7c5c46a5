"""Training states that a script saved with `torch.save`, as checkpoints.

Owns: where such files and folders keep weights, optimizer, scheduler and counters, and naming what
of them has no place in a checkpoint. Does not own: unpickling (legacy.py), naming an optimizer's
parameters (foreign.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint import legacy
from headway.checkpoint.contents import TRAINER_STATE_NAME
from headway.checkpoint.draft import Draft
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.export import require_new
from headway.checkpoint.foreign import write_component, write_optimizer
from headway.checkpoint.jsonfile import read_json_object
from headway.models.ties import split_ties

PICKLED_WEIGHTS = "model.pt"
_METADATA = "metadata.json"
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_state")
_SCHEDULER_KEYS = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")
_STEP_KEYS = ("global_step", "step", "iteration", "iter_num", "num_steps")
_EPOCH_KEYS = ("epoch",)
# Entries of a state dict that are never parameters, so that an optimizer has no number for them.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")

logger = logging.getLogger(__name__)


@dataclass
class RawState:
    """What a file or folder held, by what it is."""

    path: Path
    weights: dict[str, torch.Tensor]
    optimizer: Any = None
    scheduler: Any = None
    step: int | None = None
    epoch: float | None = None
    rest: list[str] = field(default_factory=list)
    """Names of what is none of these."""

    def warn(self, taken: tuple[str, ...] = ()) -> None:
        """Say what is left out, the `taken` parts aside."""
        parts = {name: getattr(self, name) for name in ("optimizer", "scheduler", "step", "epoch")}
        left = [name for name, value in parts.items() if value is not None and name not in taken]
        if left or self.rest:
            logger.warning("left out of %s: %s", self.path, ", ".join([*left, *self.rest]))


def read_raw(source: Path, *, allow_legacy: bool) -> RawState:
    """All that a PyTorch file, or a folder with `model.pt`, holds."""
    path = source / PICKLED_WEIGHTS if source.is_dir() else source
    legacy.require_permission(path, allow_legacy)
    held = legacy.read_pickled(path)
    weights = legacy.state_dict_of(held, path)
    key = legacy.weight_key(held)
    parts = {} if key is None else {name: value for name, value in held.items() if name != key}
    if source.is_dir():
        for file in sorted(source.glob("*.pt")):
            if file != path:
                parts[file.stem] = legacy.read_pickled(file)
        if (source / _METADATA).is_file():
            parts.update(read_json_object(source / _METADATA))

    def take(keys: tuple[str, ...], kind: Any) -> Any:
        for name in keys:
            value = parts.get(name)
            if isinstance(value, kind) and not isinstance(value, bool):
                del parts[name]
                return value or None if isinstance(value, Mapping) else value
        return None

    found = RawState(
        path=path,
        weights=weights,
        optimizer=take(_OPTIMIZER_KEYS, Mapping),
        scheduler=take(_SCHEDULER_KEYS, Mapping),
        step=take(_STEP_KEYS, int),
        epoch=take(_EPOCH_KEYS, int | float),
    )
    found.rest = [str(name) for name, value in parts.items() if value not in (None, {}, [])]
    return found


def import_raw(source: Path, target: Path, *, allow_legacy: bool = False) -> Path | None:
    """A training state as a checkpoint of kind training; None if there are weights alone.

    What it leaves out is named in a warning.
    """
    require_new(target)
    raw = read_raw(source, allow_legacy=allow_legacy)
    if raw.optimizer is None:
        return None
    tensors, aliases = split_ties(raw.weights)
    order = [aliases.get(name, name) for name in raw.weights]
    order = [n for n in dict.fromkeys(order) if _may_be_parameter(n, tensors[n])]
    taken = ["optimizer", "step", "epoch"]
    with Draft(target) as draft:
        files = draft.write_shards("model", tensors, aliases=aliases)
        draft.add_component("model", files)
        write_optimizer(draft, raw.optimizer, raw.path, tensors, order)
        if raw.scheduler is not None:
            write_component(draft, "scheduler", raw.scheduler)
            taken.append("scheduler")
        step = raw.step or 0
        if step < 0:
            raise CheckpointError(f"{raw.path}: the step is {step}, which counts nothing")
        counters: dict[str, Any] = {"global_step": step, "log_history": []}
        if raw.epoch is not None:
            counters["epoch"] = raw.epoch
        draft.write_json(TRAINER_STATE_NAME, counters)
        manifest = draft.describe(kind="training", step=step, metadata={"imported_from": "torch"})
        where = draft.commit(manifest)
    if raw.step is None:
        logger.warning("%s tells no step; the checkpoint has step 0", raw.path)
    raw.warn(tuple(taken))
    return where


def _may_be_parameter(name: str, tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and name.rpartition(".")[2] not in _BUFFERS
