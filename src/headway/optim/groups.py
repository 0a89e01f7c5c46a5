"""Parameter groups by regular expression: the first group that matches a name takes it.

Owns the shape and meaning of `optimizer_groups`. Does not own which optimizer they go to.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from headway.errors import ConfigError, unknown

logger = logging.getLogger(__name__)

DEFAULT_GROUP = "__default__"
_ENTRY_KEYS = ("regex", "config", "factory")

OptimizerGroups = Mapping[str, Mapping[str, Any] | None]
NamedParameters = Iterable[tuple[str, nn.Parameter]]


def check_groups(groups: OptimizerGroups) -> dict[str, tuple[re.Pattern[str], dict[str, Any]]]:
    """Compile the patterns; every malformed entry is reported."""
    problems: list[str] = []
    compiled: dict[str, tuple[re.Pattern[str], dict[str, Any]]] = {}
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
        elif entry.get("factory") is not None:
            problems.append(
                f"{where}.factory: not available yet: one optimizer per group comes with the "
                f"optimizer choice"
            )
        else:
            problems += [
                f"{where}: " + unknown("key", key, _ENTRY_KEYS)
                for key in entry
                if key not in _ENTRY_KEYS
            ]
            try:
                pattern = re.compile(entry["regex"])
            except re.error as error:
                problems.append(f"{where}.regex: {entry['regex']!r} does not compile: {error}")
            else:
                compiled[name] = (pattern, dict(entry.get("config") or {}))
    if problems:
        raise ConfigError(problems)
    return compiled


def make_groups(
    named_parameters: NamedParameters, groups: OptimizerGroups | None, *, debug: bool = False
) -> list[dict[str, Any]]:
    """Deal trainable parameters to groups in declared order; the implicit default comes last.

    Empty groups vanish; a pattern that matches nothing is reported. Each group keeps its parameter
    names under `param_names`, by which checkpoints find them again.
    """
    compiled = check_groups(groups or {})
    members: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in compiled}
    members[DEFAULT_GROUP] = []
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        owner = next(
            (group for group, (regex, _) in compiled.items() if regex.search(name)), DEFAULT_GROUP
        )
        members[owner].append((name, parameter))
        if debug:
            logger.info("optimizer group %s <- %s", owner, name)
    result = []
    for group, named in members.items():
        if not named:
            if group != DEFAULT_GROUP:
                pattern = compiled[group][0].pattern
                logger.warning(
                    "optimizer_groups.%s: the regex %r matches no parameter that an earlier group "
                    "left over",
                    group,
                    pattern,
                )
            continue
        config = compiled[group][1] if group in compiled else {}
        result.append(
            {
                "params": [parameter for _, parameter in named],
                "param_names": [name for name, _ in named],
                "group_name": group,
                **config,
            }
        )
    return result
