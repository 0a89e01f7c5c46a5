"""Another length of a run, in the middle of it, and what its schedule makes of that.

Owns: drawing the curves of `CurveLR` over another length. Does not own: the length itself, nor who
asks for it.

A schedule that was planned over the run's length (cosine, linear, warmup_stable_decay, ...) is
drawn anew over the new one, with the warm-up it had: from the next update on the rate is that of a
run that was planned so from the start. Schedules that go by no length stay as they are, and so do
those that are not ours, which only their maker knows how to draw.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headway.errors import ConfigError
from headway.optim.rate_scaling import parts_of
from headway.optim.scheduler import CurveLR
from headway.optim.schedules import ScheduleSpec

Lengths = tuple[int | None, int | None]
"""Before and after."""


def find_length_obstacle(scheduler: Any, steps: Lengths, tokens: Lengths) -> str | None:
    """Why a scheduler cannot go on for that long; None if it can."""
    if isinstance(scheduler, CurveLR):
        try:
            specs = _change_specs(scheduler, steps, tokens)
            for spec, base in zip(specs, scheduler.drawn_for):
                spec.draw(base)
        except ConfigError as error:
            return f"the schedule cannot have that length: {error}"
        return None
    for part in parts_of(scheduler):
        limit = getattr(part, "total_steps", None)
        if isinstance(limit, int) and steps[1] is not None and steps[1] > limit:
            return f"{type(part).__name__} was made for {limit} steps and fails after them"
    return None


def change_length(scheduler: Any, steps: Lengths, tokens: Lengths) -> str:
    """Draw a schedule over another length; returns what became of it, in words."""
    if scheduler is None:
        return "there is no schedule"
    if not isinstance(scheduler, CurveLR):
        return f"{type(scheduler).__name__} is not drawn by the trainer and stays as it was made"
    specs = _change_specs(scheduler, steps, tokens)
    before = [spec.describe() for spec in scheduler.specs]
    scheduler.redraw(specs)
    if [spec.describe() for spec in specs] == before:
        return "its schedule goes by no length and stays"
    return "its schedule is drawn over the new length from the next step on"


def _change_specs(scheduler: CurveLR, steps: Lengths, tokens: Lengths) -> list[ScheduleSpec]:
    before, after = tokens if scheduler.unit == "tokens" else steps
    return [
        replace(spec, length=after) if spec.length is not None and spec.length == before else spec
        for spec in scheduler.specs
    ]
