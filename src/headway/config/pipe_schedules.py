"""What each pipeline schedule needs, by name.

Owns: the facts that decide whether a schedule and the other options fit. Does not own: the classes
themselves (torch.distributed.pipelining), nor where stages go (strategies/pipeline).
"""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "Schedule"


@dataclass(frozen=True)
class ScheduleFacts:
    """How a schedule uses its ranks."""

    name: str
    """Without the prefix that torch's classes have."""
    is_multistage: bool = False
    """It runs several stages on a rank."""
    is_v: bool = False
    """Its stages go through the ranks there and back, two on each."""
    is_zero_bubble: bool = False
    """It makes the gradients of inputs and of weights apart from each other."""
    needs_full: bool = False
    """It needs at least as many micro-batches as stages."""
    has_rounds: bool = False
    """Micro-batches go in equal rounds of about as many as there are ranks."""


FACTS: dict[str, ScheduleFacts] = {
    facts.name: facts
    for facts in (
        ScheduleFacts("GPipe"),
        ScheduleFacts("1F1B", needs_full=True),
        ScheduleFacts("LoopedBFS", is_multistage=True),
        ScheduleFacts("Interleaved1F1B", is_multistage=True, has_rounds=True),
        ScheduleFacts(
            "InterleavedZeroBubble", is_multistage=True, is_zero_bubble=True, has_rounds=True
        ),
        ScheduleFacts("ZBVZeroBubble", is_multistage=True, is_v=True, is_zero_bubble=True),
        ScheduleFacts(
            "DualPipeV", is_multistage=True, is_v=True, is_zero_bubble=True, needs_full=True
        ),
    )
}
DEFAULT = "GPipe"
NAMES: tuple[str, ...] = (*FACTS, *(f"{PREFIX}{name}" for name in FACTS))


def find_facts(name: str) -> ScheduleFacts | None:
    """The facts of a schedule by its name, with or without the prefix."""
    return FACTS.get(name.removeprefix(PREFIX))
