"""What a window amounts to over all ranks, also after somebody has edited it."""

from __future__ import annotations

import torch

from headway.data.loader import Window, WindowTotals
from headway.strategies.base import Strategy
from headway.strategies.objective import Objective


def count_window(
    window: Window, strategy: Strategy, objective: Objective, *, changed: bool
) -> Window | WindowTotals:
    """The counts over all ranks: those that came with the window, unless it may have `changed`, or
    the model predicts other labels than those that batches by themselves count."""
    changed |= not objective.shifts_labels
    if changed:
        _count_again(window, objective)
    if window.totals is None:
        return window
    if not changed:
        return window.totals
    own = [int(window.num_target_tokens), window.num_tokens, window.num_samples]
    if not strategy.data_shard().speaks:
        own = [0, 0, 0]
    targets, tokens, samples = strategy.reduce(torch.tensor(own), "sum").tolist()
    return WindowTotals(targets, tokens, samples)


def _count_again(window: Window, objective: Objective) -> None:
    """The targets that its micro-batches have now; those that only stand in count for nothing.

    The loss is divided by them. Tokens and samples are those that were read.
    """
    real = window.micro_batches[: len(window.micro_batches) - window.num_fillers]
    num_targets: int | torch.Tensor = 0
    for batch in real:
        num_targets = num_targets + objective.count_targets(batch)
    window.num_target_tokens = num_targets
