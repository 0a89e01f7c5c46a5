"""Muon for the matrices inside a model, AdamW for everything else.

Owns: which parameters Muon is for, and the two as one optimizer. Does not own: Muon itself, which
is torch's.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from headway.config.group_settings import unknown_setting
from headway.errors import ConfigError
from headway.optim.group_schedules import GROUP_KEY
from headway.optim.groups import Group
from headway.optim.kinds import Kinds
from headway.optim.multi import JoinedOptimizer

logger = logging.getLogger(__name__)

# Rows of these are looked up, or stand for classes: orthogonalising them makes no sense.
_NOT_FOR_MUON = frozenset({"embedding", "head", "norm", "bias"})


def is_for_muon(kinds: frozenset[str]) -> bool:
    """Whether a parameter of these kinds is a matrix between hidden states."""
    return "matrix" in kinds and not kinds & _NOT_FOR_MUON


def build_muon(
    groups: Sequence[Group],
    kinds: Kinds,
    *,
    muon: Mapping[str, Any],
    adamw: Mapping[str, Any],
    exclude: str | None = None,
) -> JoinedOptimizer:
    """Muon and AdamW as one optimizer; each group is divided between them.

    `muon` and `adamw` are their arguments. Parameters whose name `exclude` (a regex) is found in
    stay with AdamW.
    """
    excluded = _compile(exclude)
    divided: list[tuple[type[Optimizer], Group]] = []
    for group in groups:
        _check_config(group)
        for_muon = [
            pair
            for pair in group.members
            if is_for_muon(kinds.get(pair[0], frozenset()))
            and not (excluded and excluded.search(pair[0]))
        ]
        taken = {name for name, _ in for_muon}
        rest = [pair for pair in group.members if pair[0] not in taken]
        for cls, members in ((torch.optim.Muon, for_muon), (torch.optim.AdamW, rest)):
            if members or (not group.members and cls is torch.optim.AdamW):
                known = {k: v for k, v in group.config.items() if k in _settings_of(cls)}
                divided.append((cls, replace(group, members=members, config=known)))
    param_groups = [(cls, group.as_param_group()) for cls, group in divided]
    parts: list[Optimizer] = []
    for cls, arguments in ((torch.optim.Muon, muon), (torch.optim.AdamW, adamw)):
        own = [group for its, group in param_groups if its is cls]
        if own:
            parts.append(_make(cls, own, arguments))
    if excluded and not any(excluded.search(name) for name in kinds):
        logger.warning("optim_args.exclude: the regex %r matches no parameter", exclude)
    return JoinedOptimizer(parts, [group for _, group in param_groups])


def _make(
    cls: type[Optimizer], groups: list[dict[str, Any]], arguments: Mapping[str, Any]
) -> Optimizer:
    try:
        return cls(groups, **arguments)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optim='muon': {error}") from error


def _compile(exclude: str | None) -> re.Pattern[str] | None:
    try:
        return None if exclude is None else re.compile(exclude)
    except (re.error, TypeError) as error:
        raise ConfigError(f"optim_args.exclude: {exclude!r} does not compile: {error}") from error


def _settings_of(cls: type[Optimizer]) -> set[str]:
    """The settings that a param group of a class may have."""
    return {*cls([torch.zeros(1, 1)]).defaults, GROUP_KEY}  # type: ignore[call-arg]


def _check_config(group: Group) -> None:
    """Refuse a setting that neither of the two knows."""
    known = {*_settings_of(torch.optim.Muon), *_settings_of(torch.optim.AdamW)}
    for key in group.config:
        if key not in known:
            raise ConfigError(
                f"optimizer_groups.{group.name}.config: {unknown_setting(key, sorted(known))}"
            )
