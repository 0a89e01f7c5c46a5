"""Weights that a run's checkpoints do not hold (`checkpoint_components` without `model`).

Owns: who must bring them, and the proof that all of them were brought. Does not own: where they
come from, which is the callback's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway.checkpoint import CheckpointError
from headway.checkpoint.model import collect_model, describe_names
from headway.checkpoint.sharding import local_tensor
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.trainers.trainer import Trainer

EVENT = "on_load_model_weights"
# The types in which torch can both write and find a NaN.
_HAVE_NAN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_source(trainer: Trainer) -> None:
    """Refuse a run without the two that make and bring the weights."""
    problems = []
    if trainer.model_init is None:
        problems.append(
            "checkpoint_components leaves out model, so weights come from outside; give "
            "model_init, which makes the model they go into"
        )
    if not trainer.bus.listens(EVENT):
        problems.append(
            f"checkpoint_components leaves out model, but no callback has {EVENT}, which is what "
            f"brings the weights when the run is resumed"
        )
    if problems:
        raise ConfigError(problems)


def take_weights(trainer: Trainer, path: str) -> None:
    """Ask the callbacks for the weights that belong to a checkpoint; all must have come.

    What is not brought would be of another step. So every tensor is made unusable first, and one
    that is still so afterwards is an error.
    """
    assert trainer.strategy is not None
    model = trainer.strategy.unwrap()
    before = collect_model(model).stored
    versions = {name: _make_unusable(tensor) for name, tensor in before.items()}
    with trainer._ranks().together("taking weights from outside"):
        trainer.bus.fire(EVENT, path=path)
        after = collect_model(model).stored
        absent = [name for name, tensor in after.items() if _is_unusable(tensor, versions[name])]
        replaced = [name for name, tensor in after.items() if tensor is not before[name]]
        # The optimizer goes on with the parameters it knows.
        if replaced:
            raise CheckpointError(
                f"{EVENT} replaced tensors of the model instead of filling them: "
                f"{describe_names(replaced)}; copy the values into those that are there"
            )
        if absent:
            raise CheckpointError(
                f"{EVENT} left tensors of the model without values (or with NaN in them): "
                f"{describe_names(absent)}; with checkpoint_components leaving out model, a "
                f"callback must load every one of them"
            )


@torch.no_grad()
def _make_unusable(tensor: Tensor) -> int:
    """Fill with NaN; where the type has none, the count of changes so far tells."""
    held = local_tensor(tensor)
    if held.dtype in _HAVE_NAN:
        held.fill_(torch.nan)
    return tensor._version


@torch.no_grad()
def _is_unusable(tensor: Tensor, version: int) -> bool:
    held = local_tensor(tensor)
    if held.dtype in _HAVE_NAN:
        return bool(held.isnan().any())
    return tensor._version == version
