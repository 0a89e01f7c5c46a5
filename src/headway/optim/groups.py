"""Parameter groups by regular expression: the first group that matches a name takes it.

Owns the shape and meaning of `optimizer_groups`, and the groups without weight decay of
`no_decay_on`. Does not own which optimizer they go to (build.py).
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from headway.config.group_settings import check_setting
from headway.errors import ConfigError, nearest, unknown
from headway.optim.kinds import Kinds

logger = logging.getLogger(__name__)

DEFAULT_GROUP = "__default__"
NO_DECAY = ".no_decay"
"""Ends the name of the part of a group that `no_decay_on` takes out."""
_ENTRY_KEYS = ("regex", "config", "factory")
_MOST_SHOWN = 3

OptimizerGroups = Mapping[str, Mapping[str, Any] | None]
NamedParameters = Iterable[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Entry:
    """One entry of `optimizer_groups`, checked."""

    pattern: re.Pattern[str]
    config: dict[str, Any]
    factory: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Group:
    """Parameters that are treated alike."""

    name: str
    members: list[tuple[str, nn.Parameter]]
    config: dict[str, Any] = field(default_factory=dict)
    factory: Callable[[Any], Any] | None = None

    def as_param_group(self) -> dict[str, Any]:
        """As optimizers take it; checkpoints find parameters by `param_names`."""
        return {
            "params": [parameter for _, parameter in self.members],
            "param_names": [name for name, _ in self.members],
            "group_name": self.name,
            **own_values(self.config),
        }


def own_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as given, but tensors copied: schedules write into a rate that is one, and the next
    optimizer of these settings would begin where this one ended."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in settings.items()
    }


def check_groups(groups: OptimizerGroups) -> dict[str, Entry]:
    """Compile the patterns; every malformed entry is reported."""
    if not isinstance(groups, Mapping):
        raise ConfigError(
            f"optimizer_groups must be a mapping of names to groups, each with 'regex' and "
            f"'config', got {groups!r}"
        )
    problems: list[str] = []
    checked: dict[str, Entry] = {}
    for name, entry in groups.items():
        where = f"optimizer_groups.{name}"
        if entry is None:
            continue
        if name == DEFAULT_GROUP:
            problems.append(f"{where}: this name is kept for parameters that no group matches")
        elif not isinstance(entry, Mapping):
            problems.append(f"{where}: must be a mapping with 'regex', got {entry!r}")
        elif not isinstance(entry.get("regex"), str):
            problems.append(f"{where}.regex: must be a pattern (str), got {entry.get('regex')!r}")
        elif not isinstance(entry.get("config") or {}, Mapping):
            problems.append(f"{where}.config: must be a mapping, got {entry['config']!r}")
        elif entry.get("factory") is not None and not callable(entry["factory"]):
            problems.append(
                f"{where}.factory: must be callable with parameter groups, got {entry['factory']!r}"
            )
        else:
            problems += [
                f"{where}: " + unknown("key", key, _ENTRY_KEYS)
                for key in entry
                if key not in _ENTRY_KEYS
            ]
            config = dict(entry.get("config") or {})
            for key, value in config.items():
                wrong = check_setting(key, value)
                if wrong is not None:
                    problems.append(f"{where}.config.{key} {wrong}")
            try:
                pattern = re.compile(entry["regex"])
            except re.error as error:
                problems.append(f"{where}.regex: {entry['regex']!r} does not compile: {error}")
            else:
                checked[name] = Entry(pattern, config, entry.get("factory"))
    if problems:
        raise ConfigError(problems)
    return checked


def make_groups(
    named_parameters: NamedParameters, groups: OptimizerGroups | None, *, debug: bool = False
) -> list[dict[str, Any]]:
    """Param groups as an optimizer takes them; see `deal_parameters`."""
    dealt = deal_parameters(named_parameters, groups, debug=debug)
    return [group.as_param_group() for group in dealt]


def deal_parameters(
    named_parameters: NamedParameters,
    groups: OptimizerGroups | None,
    *,
    names: Mapping[str, Sequence[str]] | None = None,
    elsewhere: Collection[str] = (),
    debug: bool = False,
) -> list[Group]:
    """Deal trainable parameters to groups in declared order; the implicit default comes last.

    A tied parameter goes to the first group that matches any of its names (`names`, by the first).
    Empty groups vanish; a pattern that takes nothing is reported, unless it matches a parameter
    `elsewhere`, which another rank has.
    """
    entries = check_groups(groups or {})
    members: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in entries}
    members[DEFAULT_GROUP] = []
    owners: dict[str, str | None] = {}
    seen: set[int] = set()
    for name, parameter in named_parameters:
        own = (names or {}).get(name, (name,))
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        if not parameter.requires_grad:
            owners.update(dict.fromkeys(own))
            continue
        found = (g for g, entry in entries.items() if any(map(entry.pattern.search, own)))
        group = next(found, DEFAULT_GROUP)
        owners.update(dict.fromkeys(own, group))
        members[group].append((name, parameter))
        if debug:
            shown = name if len(own) == 1 else f"{name} (also {', '.join(own[1:])})"
            logger.info("optimizer group %s <- %s", group, shown)
    result = []
    for name, named in members.items():
        entry = entries.get(name)
        if named:
            config = dict(entry.config) if entry else {}
            result.append(Group(name, named, config, entry.factory if entry else None))
        elif entry and not any(map(entry.pattern.search, elsewhere)):
            _warn_of_nothing(name, entry.pattern, owners)
    return result


def _warn_of_nothing(
    group: str, pattern: re.Pattern[str], owners: Mapping[str, str | None]
) -> None:
    """Say why a group is empty; `owners` has the group of every name, None where it is frozen."""
    matched = [name for name in owners if pattern.search(name)]
    if not matched:
        close = ", ".join(closest_names(pattern.pattern, list(owners)))
        reason = f"matches no parameter; the closest are: {close}"
    elif all(owners[name] is None for name in matched):
        reason = f"matches frozen parameters only ({_shorten(matched)})"
    else:
        taken = sorted({str(owners[name]) for name in matched if owners[name] is not None})
        reason = (
            f"matches only what earlier groups took ({', '.join(taken)}: {_shorten(matched)}); "
            f"move it before them"
        )
    logger.warning("optimizer_groups.%s: the regex %r %s", group, pattern.pattern, reason)


def _shorten(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more


def closest_names(pattern: str, names: list[str]) -> list[str]:
    """Parameter names that look most like what a pattern was to match."""
    parts = {part for name in names for part in name.split(".")}
    words = re.findall(r"[A-Za-z_][A-Za-z0-9_]*", re.sub(r"\\[a-zA-Z]", " ", pattern))
    close = {nearest(word, parts) for word in words} - {None}
    found = [name for name in names if close & set(name.split("."))]
    if not found:
        found = difflib.get_close_matches(pattern, names, n=_MOST_SHOWN, cutoff=0.0)
    return found[:_MOST_SHOWN]


def split_no_decay(groups: Sequence[Group], kinds: Kinds, kept_off: Collection[str]) -> list[Group]:
    """Give parameters of these kinds a group of their own without weight decay.

    A group whose configuration sets `weight_decay` keeps it for all its parameters.
    """
    result = []
    for group in groups:
        if "weight_decay" in group.config:
            result.append(group)
            continue
        off: list[tuple[str, nn.Parameter]] = []
        on: list[tuple[str, nn.Parameter]] = []
        for name, parameter in group.members:
            is_off = not kinds.get(name, frozenset()).isdisjoint(kept_off)
            (off if is_off else on).append((name, parameter))
        if on:
            result.append(replace(group, members=on))
        if off:
            config = {**group.config, "weight_decay": 0.0}
            result.append(
                replace(group, name=f"{group.name}{NO_DECAY}", members=off, config=config)
            )
    return result
