"""Options that exist but whose engine does not yet: setting one is an error, never silence.

Owns: the table option -> the capability that brings it. A capability that arrives removes its
lines here; at times none is left.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from headway.config.rules import default_of
from headway.config.typecheck import Problem

PENDING: dict[str, str] = {}


def find_pending(args: Any, *, skip: Collection[str] = ()) -> list[Problem]:
    """A problem for each option that was set but is not available yet."""
    problems = []
    for option, capability in PENDING.items():
        if not hasattr(args, option) or option in skip:
            continue
        value = getattr(args, option)
        if value == default_of(args, option):
            continue
        problems.append(Problem((option,), not_yet(option, value, capability)))
    return problems


def not_yet(option: str, value: Any, capability: str) -> str:
    """The words for something that is announced but not there."""
    return f"option {option} is not available yet: it comes with {capability} (got {value!r})"
