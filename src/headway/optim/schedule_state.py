"""A scheduler's state on its way back, fitted to the optimizer's groups.

Owns: the lists in it that have an entry per param group. A state may come from a run that grouped
its parameters in another way, or from another tool that did. Does not own: the schedule itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from headway.errors import ConfigError
from headway.optim.scheduler import CurveLR

logger = logging.getLogger(__name__)

_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")


class ScheduleState:
    """Stands for a scheduler in a checkpoint."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> Any:
        """The scheduler's own."""
        return self._scheduler.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Take a state, for as many groups as the optimizer has."""
        scheduler = self._scheduler
        if isinstance(scheduler, CurveLR):
            source = _match_names(state_dict, scheduler)
            if source is not None:
                _load_by_name(state_dict, scheduler, source)
                return
        scheduler.load_state_dict(_fit(state_dict, scheduler))


def _match_names(state: Any, scheduler: CurveLR) -> list[int | None] | None:
    """Where the state has each group of the scheduler, by its name; None if it goes by place.

    Groups that share a name, as those of a joined optimizer may, are told apart by their order.
    """
    schedule = state.get("schedule") if isinstance(state, Mapping) else None
    entries = schedule.get("groups") if isinstance(schedule, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        return None
    saved = [str(entry.get("group")) for entry in entries]
    names = [str(group.get("group_name", "")) for group in scheduler.optimizer.param_groups]
    unnamed = saved == [str(number) for number in range(len(saved))]
    lengths = {len(state[key]) for key in _PER_GROUP[:2] if isinstance(state.get(key), list)}
    if saved == names or unnamed or not all(names) or lengths != {len(saved)}:
        return None
    places: dict[str, list[int]] = {}
    for place, name in enumerate(saved):
        places.setdefault(name, []).append(place)
    return [
        places[name][names[:number].count(name)]
        if len(places.get(name, ())) == names.count(name)
        else None
        for number, name in enumerate(names)
    ]


def _load_by_name(
    state: Mapping[str, Any], scheduler: CurveLR, source: Sequence[int | None]
) -> None:
    """Take a state of other groups: one that is not in it has the base rate that it is set to."""
    groups = scheduler.optimizer.param_groups
    own = scheduler.state_dict()["schedule"]["groups"]
    factor = float(state.get("rate_factor", 1.0))
    progress = int(state.get("tokens" if scheduler.unit == "tokens" else "last_epoch", 0))
    fitted: dict[str, list[Any]] = {"base_lrs": [], "_last_lr": [], "groups": []}
    new = []
    for number, place in enumerate(source):
        if place is not None:
            fitted["base_lrs"].append(state["base_lrs"][place])
            fitted["_last_lr"].append(state["_last_lr"][place])
            fitted["groups"].append(state["schedule"]["groups"][place])
            continue
        base = float(groups[number]["initial_lr"])
        rate = base * float(scheduler.specs[number].draw(base)(progress)) * factor
        new.append((groups[number], rate))
        fitted["base_lrs"].append(base)
        fitted["_last_lr"].append(rate)
        fitted["groups"].append(own[number])
    schedule = {**state["schedule"], "groups": fitted.pop("groups")}
    scheduler.load_state_dict({**state, **fitted, "schedule": schedule})
    for group, rate in new:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _fit(state: Any, scheduler: Any) -> Any:
    if not isinstance(scheduler, LRScheduler) or not isinstance(state, Mapping):
        return state
    lists = {key: state[key] for key in _PER_GROUP if isinstance(state.get(key), list)}
    groups = scheduler.optimizer.param_groups
    if all(len(values) == len(groups) for values in lists.values()):
        return state
    sizes = max(len(values) for values in lists.values())
    if not isinstance(scheduler, LambdaLR):
        raise ConfigError(
            f"the scheduler's state is of {sizes} param groups, the optimizer has {len(groups)}"
        )
    # A schedule of ours is a function of the step: only the rates depend on the groups.
    fitted = {**state, "lr_lambdas": [None] * len(groups)}
    for key, in_group in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
        rates = lists.get(key, [])
        if rates and all(rate == rates[0] for rate in rates):
            fitted[key] = [rates[0]] * len(groups)
        else:
            # The groups' rates have been restored by the names of their parameters.
            fitted[key] = [float(group[in_group]) for group in groups]
            logger.warning(
                "the schedule was saved for %d param groups with rates of their own, the optimizer "
                "has %d; %s are those of the optimizer's groups",
                len(rates),
                len(groups),
                key,
            )
    return fitted
