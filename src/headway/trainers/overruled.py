"""Settings that a run is configured with and does not go by, since a checkpoint brought others.

Owns: the comparison of what was in force before a load and after it, and the words for it. Does
not own: reading the settings (optim/in_force.py), nor other options (resume.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.optim.groups import NO_DECAY
from headway.optim.in_force import RATE, InForce

# A rate that went through another type of number.
_SAME = 1e-6

# Options of the arguments -> what they are called in a param group.
_SETTINGS = {
    "args.learning_rate": RATE,
    "args.weight_decay": "weight_decay",
    "args.adam_beta1": "betas",
    "args.adam_beta2": "betas",
    "args.adam_epsilon": "eps",
    "args.optim_args.adamw_lr": RATE,
    "args.optim_args.adamw_weight_decay": "weight_decay",
}


@dataclass(frozen=True)
class Overruled:
    """A setting whose configured value does not count."""

    setting: str
    groups: list[str]
    """Param groups that it was configured for; none for a setting of the scheduler."""
    configured: Any
    in_force: Any
    advice: str
    """How to go on with the configured value."""

    def tell(self) -> str:
        """The fact in a line."""
        of = f"the param group{'s' * (len(self.groups) > 1)} {', '.join(self.groups)}"
        return (
            f"{self.setting} of {of if self.groups else 'the scheduler'}: configured "
            f"{self.configured!r}, in force {self.in_force!r} from the checkpoint; {self.advice}"
        )


def find_overruled(configured: InForce, now: InForce) -> list[Overruled]:
    """Every setting that is another one now; groups in which it changed alike share an entry."""
    found: list[Overruled] = []
    for group, settings in configured.groups.items():
        held = now.groups.get(group, {})
        for name, wanted in settings.items():
            if name in held and not _same(wanted, held[name]):
                found.append(Overruled(name, [group], wanted, held[name], ""))
    for name, wanted in configured.schedule.items():
        if name in now.schedule and not _same(wanted, now.schedule[name]):
            found.append(Overruled(name, [], wanted, now.schedule[name], ""))
    num_groups = len(configured.groups)
    return [
        replace(item, advice=_advise(item, is_everywhere=len(item.groups) == num_groups))
        for item in join_overruled([found])
    ]


def join_overruled(told: Iterable[Sequence[Overruled | Mapping[str, Any]]]) -> list[Overruled]:
    """What several ranks found, as one list."""
    joined: dict[str, Overruled] = {}
    for item in (item for one in told for item in one):
        own = item if isinstance(item, Overruled) else Overruled(**item)
        key = repr((own.setting, bool(own.groups), own.configured, own.in_force))
        first = joined.setdefault(key, own)
        joined[key] = replace(first, groups=list(dict.fromkeys([*first.groups, *own.groups])))
    return list(joined.values())


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, float) or isinstance(second, float):
        try:
            return math.isclose(first, second, rel_tol=_SAME)
        except TypeError:
            return False
    return bool(first == second)


def _advise(item: Overruled, *, is_everywhere: bool) -> str:
    configured, in_force = item.configured, item.in_force
    numbers = all(
        isinstance(value, int | float) and not isinstance(value, bool)
        for value in (configured, in_force)
    )
    edit = "to change it, edit the checkpoint with `headway checkpoint modify CHECKPOINT"
    if not item.groups:
        start = "leave scheduler out of load_components, which starts the schedule anew"
        where = f"--component scheduler --set {item.setting}={configured}"
        return f"{edit} {where}`, or {start}" if numbers else f"to change it, {start}"
    one = "" if is_everywhere else " --param-group NUMBER"
    if item.setting == RATE and numbers and in_force:
        start = "leave scheduler out of load_components, which starts the schedule anew"
        return f"{edit} --scale lr={configured / in_force:.10g}{one}`, or {start}"
    start = "leave optimizer out of load_components, which starts its state anew"
    if numbers and item.setting != RATE:
        value = float(configured) if isinstance(in_force, float) else configured
        return f"{edit} --set {item.setting}={value}{one}`, or {start}"
    return f"to change it, {start}"


def setting_of(key: str) -> str | None:
    """The name in param groups of an option of a run file, if it is one of their settings."""
    if key in _SETTINGS:
        return _SETTINGS[key]
    parts = key.split(".")
    if parts[:2] == ["args", "optim_args"] and len(parts) > 2:
        return parts[2]
    if parts[:2] == ["optimizer", "init_args"] and len(parts) > 2:
        return parts[2]
    if parts[0] == "optimizer_groups" and "config" in parts[2:-1]:
        return parts[parts.index("config", 2) + 1]
    return None


def is_told(key: str, overruled: Collection[Overruled]) -> bool:
    """Whether a changed option is among the overruled settings."""
    setting = setting_of(key)
    group = ".".join(key.split(".")[1:-2]) if key.startswith("optimizer_groups.") else None
    return any(
        item.setting == setting
        and (group is None or any(group == _group_of(label) for label in item.groups))
        if item.groups
        else key == f"lr_scheduler.init_args.{item.setting}"
        for item in overruled
    )


def _group_of(label: str) -> str:
    """The name in `optimizer_groups` of a param group, which may be a part of it."""
    whole = label.rpartition(" (")[0] if label.endswith(")") else label
    return whole.removesuffix(NO_DECAY)
