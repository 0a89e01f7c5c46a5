"""A rank's stages with their values, and the weights that several stages share.

Owns: `Tie`, moving stages off the meta device, the same values on all ranks. Does not own: the
values (models/initial.py), sums of gradients (gradients.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist

from headway.models.initial import initial_tensors
from headway.models.ties import input_embedding_names, listed_ties, split_ties
from headway.strategies.pipeline.layout import Layout
from headway.strategies.source import ModelSource
from headway.strategies.spread import same_on_all_ranks

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
    group: dist.ProcessGroup | None = None,
    debug: bool = False,
) -> None:
    """Give this rank's stages their initial values, on `device`; no other value is kept.

    With the gloo group of all ranks the values are those of its rank 0, whatever `model_init` draws
    elsewhere; all of them must call it.
    """
    held: dict[str, Tensor] = {}
    for stage in stages:
        held |= dict(stage.named_parameters(remove_duplicate=False))
        held |= dict(stage.named_buffers(remove_duplicate=False))
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    values: dict[str, Tensor] = {}
    asked = [name for name in held if name in known]
    if group is not None:
        _draw_alike(group)
    for name, value in initial_tensors(_OneSource(source, group), model, asked):
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


@dataclass(frozen=True)
class _OneSource:
    """A source whose whole model is rank 0's, where it cannot be had tensor by tensor."""

    source: ModelSource
    group: dist.ProcessGroup | None

    @property
    def weights(self) -> Path | None:
        return self.source.weights

    def build(self) -> nn.Module:
        model = self.source.build()
        if self.group is not None:
            same_on_all_ranks(model, self.group)
        return model


def _draw_alike(group: dist.ProcessGroup) -> None:
    """Go on with rank 0's random numbers: a `model_init` may have seeded each rank by itself."""
    state = torch.get_rng_state()
    dist.broadcast(state, 0, group=group)
    torch.set_rng_state(state)


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
