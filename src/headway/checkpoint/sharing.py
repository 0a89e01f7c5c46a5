"""Parameter-sharing metadata: which names of a module are one tensor, as lists of names.

Owns: making such lists and tying a module by one. Does not own: which name a tied tensor is stored
under (models/ties.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from headway.checkpoint.errors import CheckpointError
from headway.models.ties import input_embedding_names, listed_ties, split_ties

SharingMetadata = list[list[str]]


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def create_sharing_metadata(model: nn.Module) -> SharingMetadata:
    """Groups of names that share a tensor, buffers included; the stored name first, rest sorted."""
    _, aliases = split_ties(
        dict(_named_tensors(model)), input_embedding_names(model), listed_ties(model)
    )
    return groups_of(aliases)


def groups_of(aliases: Mapping[str, str]) -> SharingMetadata:
    """`{alias: stored name}` as groups of names."""
    groups: dict[str, list[str]] = {}
    for alias, stored in sorted(aliases.items()):
        groups.setdefault(stored, [stored]).append(alias)
    return [groups[stored] for stored in sorted(groups)]


def retie_parameters(module: nn.Module, sharing_metadata: Sequence[Sequence[str]]) -> None:
    """Make the names of each group one tensor again, after `to_empty` or loading with `assign`.

    Names that the module does not have are passed over. The group's first name that has values
    gives them.
    """
    live = dict(_named_tensors(module))
    for group in sharing_metadata:
        there = [name for name in group if name in live]
        if len(there) < 2:
            continue
        source = next((name for name in there if not live[name].is_meta), there[0])
        for name in there:
            if live[name].shape != live[source].shape:
                raise CheckpointError(
                    f"{name} {list(live[name].shape)} and {source} {list(live[source].shape)} "
                    "are said to share one tensor, but their shapes differ"
                )
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, live[source])
