"""What a window amounts to over all ranks."""

from __future__ import annotations

import torch

from headway.data.loader import Window, WindowTotals
from headway.strategies.base import Strategy


def count_window(window: Window, strategy: Strategy, *, changed: bool) -> Window | WindowTotals:
    """The counts over all ranks: those that came with the window, unless it may have `changed`."""
    if window.totals is None:
        return window
    if not changed:
        return window.totals
    own = [int(window.num_target_tokens), window.num_tokens, window.num_samples]
    if not strategy.data_shard().speaks:
        own = [0, 0, 0]
    targets, tokens, samples = strategy.reduce(torch.tensor(own), "sum").tolist()
    return WindowTotals(targets, tokens, samples)
