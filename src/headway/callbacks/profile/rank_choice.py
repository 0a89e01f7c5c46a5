"""Which ranks look into their run in detail.

Owns: the words and numbers by which ranks are chosen. Does not own: how ranks are laid out
(strategies/).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from headway.errors import ConfigError, unknown

logger = logging.getLogger(__name__)

WORDS = ("all", "dp", "tp", "cp", "pp", "ep")
Ranks = int | Sequence[int] | str | None


def require_ranks(given: Any) -> None:
    """None (rank 0), a rank, a list of ranks, or one of the words."""
    if isinstance(given, str):
        if given not in WORDS:
            raise ConfigError(unknown("ranks", given, WORDS))
        return
    listed = given if isinstance(given, list | tuple) else [0 if given is None else given]
    if not listed or not all(
        isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in listed
    ):
        raise ConfigError(
            f"ranks: {given!r} given; allowed: a rank from 0 up, a list of them, or one of "
            f"{', '.join(WORDS)}"
        )


def is_chosen(ranks: Ranks, args: Any, strategy: Any) -> bool:
    """Whether this rank is among the chosen ones.

    `dp` and `pp` choose the first rank of each group of data-parallel ranks or of each pipeline.
    """
    rank, num_ranks = args.process_index, args.world_size
    if ranks is None:
        return bool(rank == 0)
    if not isinstance(ranks, str):
        listed = [ranks] if isinstance(ranks, int) else list(ranks)
        absent = [chosen for chosen in listed if chosen >= num_ranks]
        if absent:
            raise ConfigError(
                f"ranks: {absent} given; allowed: 0 to {num_ranks - 1}, the ranks of this run"
            )
        return rank in listed
    if ranks == "all":
        return True
    place = _place_in_group(ranks, args, strategy)
    if place is None:
        if rank == 0 and num_ranks > 1:
            logger.warning("ranks: this run has no groups of %r; only rank 0 is looked into", ranks)
        return bool(rank == 0)
    return place == 0


def _place_in_group(word: str, args: Any, strategy: Any) -> int | None:
    """Where this rank stands in its group; None where the run has no such groups."""
    layout = getattr(strategy, "layout", None)
    if word == "pp" and layout is not None:
        return int(layout.place_of(args.process_index))
    if word == "dp" and args.world_size > 1:
        return int(strategy.data_shard().rank)
    return None
