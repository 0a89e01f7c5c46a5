"""A rank's stages with their values, and the weights that several stages share.

Owns: `Tie`, moving stages off the meta device. Does not own: the values (models/initial.py), sums
of gradients (gradients.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway.models.initial import initial_tensors
from headway.models.ties import input_embedding_names, listed_ties, split_ties
from headway.strategies.pipeline.layout import Layout
from headway.strategies.source import ModelSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tie:
    """One weight of the model that has several names, and the places in the pipeline of each."""

    canonical: str
    """The name under which it is stored."""
    places: dict[str, int]

    @property
    def members(self) -> tuple[int, ...]:
        """The places that hold it, the one of the stored name first."""
        first = self.places[self.canonical]
        return (first, *sorted(set(self.places.values()) - {first}))

    def names_on(self, place: int) -> list[str]:
        """Its names on one rank, the stored one first."""
        names = [name for name, own in self.places.items() if own == place]
        return sorted(names, key=lambda name: (name != self.canonical, name))


def find_ties(model: nn.Module, stages: Sequence[nn.Module], layout: Layout) -> list[Tie]:
    """The weights that have several names in the whole model."""
    named = dict(model.named_parameters(remove_duplicate=False))
    _, aliases = split_ties(named, input_embedding_names(model), listed_ties(model))
    place_of = {
        name: layout.rank_of(number)
        for number, stage in enumerate(stages)
        for name, _ in stage.named_parameters(remove_duplicate=False)
    }
    groups: dict[str, list[str]] = {}
    for alias, canonical in aliases.items():
        groups.setdefault(canonical, [canonical]).append(alias)
    return [
        Tie(canonical, {name: place_of[name] for name in names if name in place_of})
        for canonical, names in sorted(groups.items())
        if canonical in place_of
    ]


@torch.no_grad()
def fill_stages(
    stages: Sequence[nn.Module],
    ties: Sequence[Tie],
    place: int,
    model: nn.Module,
    source: ModelSource,
    device: torch.device,
    *,
    debug: bool = False,
) -> None:
    """Give this rank's stages their initial values, on `device`; no other value is kept."""
    held: dict[str, Tensor] = {}
    for stage in stages:
        held |= dict(stage.named_parameters(remove_duplicate=False))
        held |= dict(stage.named_buffers(remove_duplicate=False))
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    values: dict[str, Tensor] = {}
    for name, value in initial_tensors(source, model, [name for name in held if name in known]):
        values[name] = value.to(device)
        if debug:
            logger.info("initial value of %s: %s %s", name, list(value.shape), value.dtype)
    made = {name: _as_held(held[name], values.get(name, held[name]).to(device)) for name in held}
    for tie in ties:
        first, *others = tie.names_on(place) or [tie.canonical]
        for name in others:
            made[name] = made[first]
    for stage in stages:
        _put(stage, made)


def _as_held(held: Tensor, value: Tensor) -> Tensor:
    if isinstance(held, nn.Parameter):
        return nn.Parameter(value, requires_grad=held.requires_grad)
    return value


def _put(stage: nn.Module, made: Mapping[str, Tensor]) -> None:
    for prefix, module in stage.named_modules(remove_duplicate=False):
        for tensors in (module._parameters, module._buffers):
            for leaf, old in tensors.items():
                name = f"{prefix}.{leaf}" if prefix else leaf
                if old is not None:
                    tensors[leaf] = made[name]  # type: ignore[assignment]
