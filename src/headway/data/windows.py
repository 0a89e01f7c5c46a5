"""A window: all micro-batches of one optimizer step.

Owns: what a window holds and what it amounts to. Does not own: which samples are in it (loader).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headway.data.fetch import Loaded
from headway.data.order import IndexArray


@dataclass(slots=True)
class WindowTotals:
    """What a window amounts to over all ranks."""

    num_target_tokens: int | torch.Tensor
    num_tokens: int
    num_samples: int


@dataclass(slots=True)
class Window:
    """All micro-batches of one optimizer step on this rank, and what they amount to."""

    micro_batches: list[Any]
    num_target_tokens: int | torch.Tensor
    num_tokens: int
    num_samples: int
    sample_ids: IndexArray | None = None
    totals: WindowTotals | None = None
    """The counts over all ranks; None where the own ones are all there are."""
    num_fillers: int = 0
    """So many of the last micro-batches only stand in, so that ranks run equally many."""


def join_parts(parts: list[Loaded], indices: IndexArray) -> Window:
    """The window of micro-batches that were fetched for it."""
    num_targets: int | torch.Tensor = 0
    num_tokens = 0
    for part in parts:
        num_targets += part.num_targets
        num_tokens += part.num_tokens
    batches = [part.batch for part in parts]
    return Window(batches, num_targets, num_tokens, len(indices), indices)
