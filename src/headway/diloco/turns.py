"""Whose turn it is: the fragment that the workers of a synchronous model exchange next.

Owns: telling that from the ids of rounds. Does not own: when a turn comes (worker.py), the ids
(rounds.py).

Workers wait for each other in every round. One that came to another fragment than the others would
wait for them there, and they for it, until deadlines pass.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBERED = re.compile(r"r-(\d+)-.*")


def whose_turn(round_ids: Sequence[str], otherwise: int) -> int:
    """The first fragment that has the fewest rounds behind it."""
    numbers = [int(found[1]) for one in round_ids if (found := _NUMBERED.fullmatch(one))]
    if not numbers or len(numbers) != len(round_ids):
        return otherwise
    return numbers.index(min(numbers))
