"""Rotary positions: the frequencies, the cached tables, and their application to heads.

Owns: `RotaryTable`, `apply_rope`, Llama-3 frequency scaling.
Does not own: which positions a batch has (data/), nor attention itself (attention.py).

Shapes: B batch, S sequence, N heads, D head width, H = D / 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from headway.models.config import DecoderConfig


def rope_frequencies(config: DecoderConfig, device: torch.device | None = None) -> Tensor:
    """Angle per position of each pair of elements, [H], in float32."""
    steps = torch.arange(0, config.head_size, 2, dtype=torch.float32, device=device)
    freq_H = 1.0 / config.rope_theta ** (steps / config.head_size)
    scaling = config.rope_scaling
    if scaling is None:
        return freq_H
    trained_len = float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    slow_H = freq_H / float(scaling["factor"])
    # Turns made within the trained length: below `low` a pair is slowed down fully, above `high`
    # not at all, and in between by linear interpolation.
    turns_H = trained_len * freq_H / (2 * math.pi)
    share_H = ((turns_H - low) / (high - low)).clamp(0.0, 1.0)
    return slow_H + share_H * (freq_H - slow_H)


class RotaryTable(nn.Module):
    """Cosines and sines for every position up to max_seq_len; in no state dict."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        # The default device may be meta, where a value cannot be had; reset() fills it later.
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.reset()

    def reset(self) -> None:
        """Compute both tables anew, in float32, on the device they are on."""
        device = self.cos.device
        positions = torch.arange(self.config.max_seq_len, dtype=torch.float32, device=device)
        angles = torch.outer(positions, rope_frequencies(self.config, device))
        self.cos, self.sin = angles.cos(), angles.sin()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # After to_empty() the tables hold garbage, and a cast would lose precision for good.
        super()._apply(fn, recurse)
        self.reset()
        return self

    def forward(
        self, seq_len: int, start: int, position_ids: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """cos and sin as [B or 1, S, 1, H] in `dtype`."""
        if position_ids is None:
            cos, sin = self.cos[start : start + seq_len], self.sin[start : start + seq_len]
            cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
        else:
            cos, sin = self.cos[position_ids], self.sin[position_ids]
            if position_ids.dim() == 1:
                cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
        return cos.to(dtype).unsqueeze(2), sin.to(dtype).unsqueeze(2)


def apply_rope(x_BSND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (element i, element i + H) of every head by its position's angle."""
    first, second = x_BSND.chunk(2, dim=-1)
    turned_first = torch.addcmul(first * cos, second, sin, value=-1)
    turned_second = torch.addcmul(second * cos, first, sin)
    return torch.cat((turned_first, turned_second), dim=-1)
