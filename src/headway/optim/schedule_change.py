"""What changed between the schedule that a checkpoint was saved with and the present one.

Owns the comparison and its words. Does not own what is done about it (scheduler.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headway.optim.schedules import ScheduleSpec

# A rate that was computed by the same formula in another order of operations.
_SAME_RATE = 1e-6


def tell_changes(
    saved: Any,
    specs: Sequence[ScheduleSpec],
    names: Sequence[str],
    *,
    progress: int,
    before: Sequence[float],
    after: Sequence[float],
) -> list[str]:
    """A line for each schedule that is another one now; groups that changed alike share a line.

    `before` and `after` are the rates at the stored progress. A state without a description
    (older, or another tool's) is judged by the rates alone.
    """
    known = _match_groups(saved, names)
    unit = specs[0].unit
    found: dict[str, list[str]] = {}
    for number, (spec, name) in enumerate(zip(specs, names)):
        old, new = before[number], after[number]
        described = known[number]
        if described is None:
            if math.isclose(old, new, rel_tol=_SAME_RATE, abs_tol=1e-30):
                continue
            what = "the stored rate is not on it"
        else:
            saved_unit = str(saved.get("unit", unit))
            differences = list(_compare(described, spec, saved_unit))
            if not differences:
                continue
            what = ", ".join(differences)
        rates = f"at {progress} {unit} the learning rate was {old:.6g} and is {new:.6g}"
        found.setdefault(f"{what}; {rates}", []).append(name)
    return [
        f"the learning-rate schedule{_of(groups, names)} is not the one of the checkpoint: {text}"
        for text, groups in found.items()
    ]


def _match_groups(saved: Any, names: Sequence[str]) -> list[Mapping[str, Any] | None]:
    """The stored description for each group: by name, by place, or the one that all share."""
    groups = saved.get("groups") if isinstance(saved, Mapping) else None
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return [None] * len(names)
    by_name = {str(group.get("group")): group for group in groups}
    if len(by_name) == len(groups) and all(name in by_name for name in names):
        return [by_name[name] for name in names]
    if len(groups) == len(names):
        return list(groups)
    kinds = [{key: value for key, value in g.items() if key != "group"} for g in groups]
    shared = kinds[0] if kinds and all(kind == kinds[0] for kind in kinds) else None
    return [shared] * len(names)


def _compare(saved: Mapping[str, Any], spec: ScheduleSpec, saved_unit: str) -> Iterator[str]:
    now = spec.describe()
    if saved.get("type") != now["type"]:
        yield f"{saved.get('type')} -> {now['type']}"
    if saved_unit != spec.unit:
        yield f"unit {saved_unit} -> {spec.unit}"
    for what in ("length", "warmup"):
        if saved.get(what) != now[what]:
            word = "warm-up" if what == "warmup" else what
            yield f"{word} {_say(saved.get(what))} -> {_say(now[what])} {spec.unit}"
    old, new = saved.get("options"), now["options"]
    old = old if isinstance(old, Mapping) else {}
    for key in sorted(old.keys() | new.keys()):
        if _plain(old.get(key)) != _plain(new.get(key)):
            yield f"{key} {_say(old.get(key))} -> {_say(new.get(key))}"


def _plain(value: Any) -> Any:
    """Tuples come back from a file as lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _say(value: Any) -> str:
    return "(none)" if value is None else f"{value}"


def _of(groups: Sequence[str], names: Sequence[str]) -> str:
    if len(groups) == len(names):
        return ""
    word = "group" if len(groups) == 1 else "groups"
    return f" of the param {word} {', '.join(groups)}"
