"""Another base for all learning rates, in the middle of a run.

Owns: which numbers of an optimizer and its scheduler a factor has to reach, so that the present
rate, all later ones and a checkpoint know of it. Does not own: who asks for it, or how often.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from headway.optim.scheduler import CurveLR

# Cyclic schedules keep the ends of their range in the groups.
_OF_GROUP = ("initial_lr", "max_lr", "min_lr")
_OF_SCHEDULER = ("base_lrs", "max_lrs", "min_lrs", "_last_lr")
_FLOOR = "eta_min"


def scale_rates(optimizer: Optimizer, scheduler: Any, factor: float) -> None:
    """Multiply the rates of all groups, now and for the rest of the schedule."""
    parts = list(parts_of(scheduler))
    # First all products, then the first write: one tensor may stand at several places.
    lists = [
        (part, name, [rate * factor for rate in getattr(part, name)])
        for part in parts
        for name in _OF_SCHEDULER
        if isinstance(getattr(part, name, None), list)
    ]
    groups = [
        (group, {key: group[key] * factor for key in ("lr", *_OF_GROUP) if key in group})
        for group in optimizer.param_groups
    ]
    for part, name, rates in lists:
        setattr(part, name, rates)
    for part in parts:
        if isinstance(getattr(part, _FLOOR, None), int | float):
            setattr(part, _FLOOR, getattr(part, _FLOOR) * factor)
    for group, rates_of_group in groups:
        _set_rate(group, rates_of_group.pop("lr"))
        group.update(rates_of_group)
    for part in parts:
        if isinstance(part, CurveLR):
            # The curve stays, and with it a floor that was given as a rate: it is scaled too.
            part.redraw(part.specs)


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    """Into the same tensor, where it is one: a compiled step reads that."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(float(rate))
    else:
        group["lr"] = rate


def parts_of(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those that it holds: of a sequence, of a chain, or inside a wrapper."""
    if scheduler is None:
        return
    yield scheduler
    held = getattr(scheduler, "_schedulers", None) or [getattr(scheduler, "scheduler", None)]
    for one in held:
        yield from parts_of(one)
