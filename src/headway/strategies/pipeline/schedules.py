"""The schedule classes of torch.distributed.pipelining, by name or as given.

Owns: finding the class and what is known of it. Does not own: running one (running.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed import pipelining

from headway.config.pipe_schedules import DEFAULT, FACTS, PREFIX, ScheduleFacts, find_facts
from headway.errors import ConfigError, unknown


@dataclass(frozen=True)
class Schedule:
    """What makes a schedule, and what it needs."""

    make: Callable[..., Any]
    facts: ScheduleFacts


def find_schedule(given: Any, name: str | None) -> Schedule:
    """The schedule of `pipe_schedule_factory`, else of `pipe_schedule`, else GPipe."""
    if given is None:
        given = name or DEFAULT
    if isinstance(given, str):
        facts = find_facts(given)
        if facts is None:
            raise ConfigError(unknown("pipe_schedule", given, FACTS))
        return Schedule(_class_of(facts.name), facts)
    kind = given.func if isinstance(given, functools.partial) else given
    if not isinstance(kind, type):
        raise ConfigError(
            f"pipe_schedule_factory must be a schedule class of torch.distributed.pipelining, "
            f"not {given!r}"
        )
    for base in kind.__mro__:
        facts = FACTS.get(base.__name__.removeprefix(PREFIX))
        if facts is not None and base.__name__.startswith(PREFIX):
            return Schedule(given, facts)
    return Schedule(given, _facts_of_unknown(kind))


def _class_of(name: str) -> Any:
    found = getattr(pipelining, f"{PREFIX}{name}", None)
    if found is None:
        from torch.distributed.pipelining import schedules

        found = getattr(schedules, f"{PREFIX}{name}", None)
    if found is None:
        import torch

        raise ConfigError(f"pipe_schedule={name!r} is not in torch {torch.__version__}")
    return found


def _facts_of_unknown(kind: type) -> ScheduleFacts:
    from torch.distributed.pipelining.schedules import (
        PipelineScheduleMulti,
        PipelineScheduleSingle,
    )

    if not issubclass(kind, PipelineScheduleSingle | PipelineScheduleMulti):
        raise ConfigError(
            f"pipe_schedule_factory must derive from torch's PipelineScheduleSingle or "
            f"PipelineScheduleMulti, and {kind.__name__} does not"
        )
    return ScheduleFacts(kind.__name__, is_multistage=issubclass(kind, PipelineScheduleMulti))
