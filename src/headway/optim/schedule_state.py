"""A scheduler's state on its way back, fitted to the optimizer's groups.

Owns: the lists in it that have an entry per param group. A state may come from a run that grouped
its parameters in another way, or from another tool that did. Does not own: the schedule itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from headway.errors import ConfigError

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
        self._scheduler.load_state_dict(_fit(state_dict, self._scheduler))


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
