"""The settings of param groups on their way back, and which group each parameter is in.

Owns: which saved settings a live group takes, and what is said about parameters that are in
another group now. Does not own: the state of the parameters (optimizer.py), which goes by their
names whatever their group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headway.checkpoint.errors import OptimizerMisfitError
from headway.checkpoint.model import describe_names
from headway.optim.in_force import MACHINE_FLAGS
from headway.optim.multi import GROUP_CLASS

GROUP_NAME = "group_name"

# The live values stay: no part of the trajectory, and a group is called what the run calls it.
_KEPT = MACHINE_FLAGS | {GROUP_NAME}
# They decide which tensors a state has; a step that misses one of them fails.
_SHAPING = ("amsgrad", "centered")

Settings = Mapping[str, Any]
Key = tuple[str, str | None]


def match_groups(
    groups: Sequence[Settings],
    live: Sequence[Mapping[str, torch.Tensor]],
    saved: Sequence[Sequence[str]],
    settings: Sequence[Settings],
) -> list[Settings | None]:
    """Saved settings for each live group; None where it keeps its own.

    By the group's name where all have one, so that parameters may have gone from one group to
    another; a group of a name that is not in the checkpoint keeps its own settings. Else by the
    parameters in it. `live` and `saved` are the parameters of each group, `groups` and `settings`
    what they go by.
    """
    found = _by_key(settings)
    if found is None or _by_key(groups) is None:
        return _match_members(live, saved, settings)
    chosen = [found.get(_key(group)) for group in groups]
    _check_shapes(groups, live, saved, settings, chosen)
    return chosen


def _key(group: Settings) -> Key:
    return str(group[GROUP_NAME]), group.get(GROUP_CLASS)


def _by_key(groups: Sequence[Settings]) -> dict[Key, Settings] | None:
    """Groups by name and, in a joined optimizer, class; None if that does not tell them apart."""
    if not all(isinstance(group.get(GROUP_NAME), str) for group in groups):
        return None
    found = {_key(group): group for group in groups}
    return found if len(found) == len(groups) else None


def _match_members(
    live: Sequence[Mapping[str, torch.Tensor]],
    saved: Sequence[Sequence[str]],
    settings: Sequence[Settings],
) -> list[Settings | None]:
    group_of = {name: index for index, members in enumerate(saved) for name in members}
    chosen: list[Settings | None] = []
    for index, members in enumerate(live):
        sources = sorted({group_of[name] for name in members})
        if not sources:
            chosen.append(None)
            continue
        first, *others = (settings[source] for source in sources)
        if any(not _same_settings(first, other) for other in others):
            raise OptimizerMisfitError(
                f"optimizer group {index} joins the saved groups {sources}, whose settings differ; "
                "group the parameters as in the saved run, or do not load the optimizer"
            )
        chosen.append(first)
    return chosen


def _same_settings(first: Settings, second: Settings) -> bool:
    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    keys = (first.keys() | second.keys()) - {GROUP_NAME}
    return first.keys() == second.keys() and all(
        plain(first[key]) == plain(second[key]) for key in keys
    )


def _check_shapes(
    groups: Sequence[Settings],
    live: Sequence[Mapping[str, torch.Tensor]],
    saved: Sequence[Sequence[str]],
    settings: Sequence[Settings],
    chosen: Sequence[Settings | None],
) -> None:
    """Refuse a parameter in a group whose settings want another kind of state than it has."""
    source = {name: old for members, old in zip(saved, settings) for name in members}
    for group, members, taken in zip(groups, live, chosen):
        now = group if taken is None else taken
        for key in _SHAPING:
            others = [n for n in members if bool(source[n].get(key)) != bool(now.get(key))]
            if others:
                raise OptimizerMisfitError(
                    f"optimizer_groups.{group[GROUP_NAME]}: {key} is {now.get(key)!r} there, and "
                    f"{source[others[0]].get(key)!r} in the group of the checkpoint that "
                    f"{describe_names(others)} comes from, whose state is of another kind; give "
                    f"both the same {key}, or leave optimizer out of load_components"
                )


def restore_settings(group: dict[str, Any], saved: Settings) -> None:
    """Put saved settings into a live group."""
    for key, value in saved.items():
        if key in _KEPT and key in group:
            continue
        current = group.get(key)
        if isinstance(current, torch.Tensor) and current.numel() == 1:
            # Kept in place: compiled steps and schedulers hold on to a tensor learning rate.
            current.fill_(float(value))
        elif isinstance(value, torch.Tensor) and isinstance(current, float):
            group[key] = float(value)
        else:
            group[key] = value


def check_classes(
    groups: Sequence[Settings],
    live: Sequence[Mapping[str, torch.Tensor]],
    saved: Sequence[Sequence[str]],
    settings: Sequence[Settings],
    file: str,
) -> None:
    """Refuse the state of another class in a group of a joined optimizer."""
    class_of = {
        name: old.get(GROUP_CLASS) for members, old in zip(saved, settings) for name in members
    }
    for group, members in zip(groups, live):
        here = group.get(GROUP_CLASS)
        others = {name: class_of[name] for name in members if class_of[name] != here}
        if others:
            name, there = next(iter(others.items()))
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise OptimizerMisfitError(
                f"{file} does not fit the optimizer: {name}{more} updated by {there} there, by "
                f"{here} here"
            )


def tell_regrouped(
    groups: Sequence[Settings],
    live: Sequence[Sequence[str]],
    saved: Sequence[Sequence[str]],
    settings: Sequence[Settings],
) -> list[str]:
    """A line for each way that parameters have gone between named groups since the checkpoint."""
    known = _by_key(settings)
    if known is None or _by_key(groups) is None:
        return []
    was = {name: str(old[GROUP_NAME]) for members, old in zip(saved, settings) for name in members}
    names = {name for name, _ in known}
    ways: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    for group, members in zip(groups, live):
        for parameter in members:
            way = was.get(parameter, ""), str(group[GROUP_NAME])
            if way[0] and way[0] != way[1]:
                ways[way] += 1
                first.setdefault(way, parameter)
    return [
        f"{first[before, now]}{_more(count)} in the param group {now} now, in {before} in the "
        f"checkpoint; the optimizer's state went along, the group's settings are "
        + ("those of the checkpoint" if now in names else "the configured ones, since it is new")
        for (before, now), count in ways.items()
    ]


def _more(count: int) -> str:
    return " is" if count == 1 else f" and {count - 1} more are"
