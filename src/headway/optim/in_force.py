"""What an optimizer and its scheduler go by: the settings that a user chooses, by param group.

Owns: reading them off the live objects, so that two moments can be compared. Does not own: what a
resume makes of a difference (trainers/overruled.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from headway.optim.multi import GROUP_CLASS, JoinedOptimizer

RATE = "lr"

MACHINE_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings chosen for the machine at hand, which are no part of what is trained."""

_LEFT_OUT = MACHINE_FLAGS | {"self", "params", "optimizer", "last_epoch"}
# A scheduler that has one of these in a group moves the momentum from step to step.
_MOVING_MOMENTUM = ("max_momentum", "base_momentum")
_MOMENTUM = ("momentum", "betas")


@dataclass(frozen=True)
class InForce:
    """The settings at one moment."""

    groups: dict[str, dict[str, Any]]
    """By param group; the rate is that before the schedule."""
    schedule: dict[str, Any]
    """Of the scheduler."""

    @classmethod
    def read(cls, optimizer: Optimizer | None, scheduler: Any) -> InForce:
        """As they are now."""
        groups = {} if optimizer is None else read_settings(optimizer, scheduler)
        return cls(groups, read_schedule(scheduler))

    def knows(self, setting: str) -> bool:
        """Whether some group has such a setting."""
        return any(setting in own for own in self.groups.values())


def read_settings(optimizer: Optimizer, scheduler: Any = None) -> dict[str, dict[str, Any]]:
    """The settings of each param group by the group's name; the rate is that before the schedule.

    Only what the optimizer's class takes as an argument: other numbers in a group are its state.
    Groups without parameters are left out.
    """
    found: dict[str, dict[str, Any]] = {}
    bases = getattr(scheduler, "base_lrs", None)
    groups = optimizer.param_groups
    if not isinstance(bases, list) or len(bases) != len(groups):
        bases = None
    for number, group in enumerate(groups):
        if not group["params"]:
            continue
        part = optimizer.part_of(number) if isinstance(optimizer, JoinedOptimizer) else optimizer
        moving = _MOMENTUM if any(key in group for key in _MOVING_MOMENTUM) else ()
        known = argument_names(type(part)) - {*moving}
        own = {key: plain(value) for key, value in group.items() if key in known}
        if RATE in group:
            base = group.get("initial_lr", group[RATE]) if bases is None else bases[number]
            own[RATE] = plain(base)
        found[_label(groups, number)] = own
    return found


def read_schedule(scheduler: Any) -> dict[str, Any]:
    """The arguments of a scheduler as it holds them; nothing for one that does not show them."""
    state = getattr(scheduler, "state_dict", None)
    held = state() if callable(state) else None
    if not isinstance(held, Mapping):
        return {}
    known = argument_names(type(scheduler))
    return {key: plain(value) for key, value in held.items() if key in known}


def argument_names(cls: type) -> set[str]:
    """What a class and those it derives from are made with."""
    names: set[str] = set()
    for owner in cls.__mro__:
        if "__init__" not in vars(owner) or owner in (object, Optimizer):
            continue
        try:
            names.update(inspect.signature(vars(owner)["__init__"]).parameters)
        except (TypeError, ValueError):
            continue
    return names - _LEFT_OUT


def plain(value: Any) -> Any:
    """A value as JSON has it, so that what was stored and what is live can be compared."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _label(groups: list[dict[str, Any]], number: int) -> str:
    """The group's name, with the class where a joined optimizer has divided it."""
    group = groups[number]
    name = str(group.get("group_name", number))
    alike = [other for other in groups if str(other.get("group_name", "")) == name]
    return f"{name} ({group.get(GROUP_CLASS, number)})" if len(alike) > 1 else name
