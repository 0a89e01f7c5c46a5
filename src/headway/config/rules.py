"""The rules between options: one table, and what it says about a set of arguments.

Owns: `Rule`, the joined table, the functions that apply it. The rules stand in `rules_values`
(one option each), `rules_pairs` (combinations), `rules_precision` (quantization),
`rules_schedule` (learning rate) and `rules_later` (those that need a model, a device or a world
size and are checked where these are known).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from headway.config.typecheck import Problem

Check = Callable[[Any], str | None]

_DEFAULTS: dict[type, dict[str, Any]] = {}


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule: which options meet in it, when it is checked, what it says, and the check.

    `number` is that of the option reference; our own additions count H1, H2, ...
    `check` returns a message when the rule is broken; None where arguments alone cannot tell.
    `outcome` is what a broken rule leads to: reject, warn or fallback.
    """

    number: str
    options: tuple[str, ...]
    stage: str
    description: str
    check: Check | None = None
    outcome: str = "reject"
    strategies: tuple[str, ...] = ()


@functools.lru_cache(maxsize=1)
def all_rules() -> tuple[Rule, ...]:
    """Every rule, those of the reference by number and then our own."""
    from headway.config import (
        rules_later,
        rules_memory,
        rules_optimizer,
        rules_pairs,
        rules_precision,
        rules_schedule,
        rules_values,
    )

    table = [
        *rules_pairs.RULES,
        *rules_values.RULES,
        *rules_memory.RULES,
        *rules_optimizer.RULES,
        *rules_precision.RULES,
        *rules_schedule.RULES,
        *rules_later.RULES,
    ]
    return tuple(
        sorted(table, key=lambda rule: (rule.number[0] == "H", int(rule.number.lstrip("H"))))
    )


def find_broken(args: Any, *, skip: Collection[str] = ()) -> list[Problem]:
    """The problems of all rules that reject `args`; rules on a `skip`ped option are left out."""
    return [Problem(rule.options, message) for rule, message in _apply(args, "reject", skip)]


def find_warnings(args: Any, *, skip: Collection[str] = ()) -> list[str]:
    """The messages of the rules that only warn; those on a `skip`ped option are left out."""
    return [message for _, message in _apply(args, "warn", skip)]


def rules_of(option: str) -> list[Rule]:
    """The rules `option` takes part in."""
    return [rule for rule in all_rules() if option in rule.options]


def default_of(args: Any, name: str) -> Any:
    """The default of a field, from the class."""
    return defaults(type(args))[name]


def defaults(cls: type) -> dict[str, Any]:
    """Field name -> default value of a dataclass."""
    if cls not in _DEFAULTS:
        _DEFAULTS[cls] = {
            field.name: field.default_factory()
            if field.default_factory is not dataclasses.MISSING
            else field.default
            for field in dataclasses.fields(cls)
        }
    return _DEFAULTS[cls]


def idle(switch: str, *options: str, filled: Mapping[str, Any] | None = None) -> Check:
    """A check that no companion of a switch that is off is set; `filled` are automatic values."""

    def check(args: Any) -> str | None:
        if getattr(args, switch):
            return None
        own = [
            f"{name}={getattr(args, name)!r}"
            for name in options
            if hasattr(args, name)
            and getattr(args, name) not in (None, default_of(args, name), (filled or {}).get(name))
        ]
        if not own:
            return None
        return f"{' and '.join(own)}: without effect, since {switch} is {getattr(args, switch)}"

    return check


def get(args: Any, option: str) -> Any:
    """The value of a dotted option."""
    return functools.reduce(getattr, option.split("."), args)


def _has(args: Any, option: str) -> bool:
    for part in option.split("."):
        if not hasattr(args, part):
            return False
        args = getattr(args, part)
    return True


def _apply(args: Any, outcome: str, skip: Collection[str]) -> list[tuple[Rule, str]]:
    broken = []
    for rule in all_rules():
        if rule.check is None or rule.outcome != outcome:
            continue
        if rule.strategies and args.strategy_name not in rule.strategies:
            continue
        if any(option in skip for option in rule.options):
            continue
        if not _has(args, rule.options[0]):
            continue
        message = rule.check(args)
        if message is not None:
            broken.append((rule, message))
    return broken
