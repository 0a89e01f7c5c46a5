"""The key/value cache of text generation.

Owns: `KVCache`. Does not own: when tokens are drawn (generation.py).

Shapes: B batch, N key/value heads, T cache length, S new tokens, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.models.config import DecoderConfig


class KVCache:
    """Keys and values of all layers, allocated once for `max_len` tokens."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        batch_size: int,
        max_len: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        shape = (config.num_layers, 2, batch_size, config.kv_heads, max_len, config.head_size)
        self._store = torch.empty(shape, device=device, dtype=dtype)
        self.max_len = max_len
        self.length = 0
        """Tokens held, not counting those of a forward pass under way."""

    def append(self, layer: int, key_BNSD: Tensor, value_BNSD: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values; return all it holds, the new ones included."""
        end = self.length + key_BNSD.shape[2]
        keys, values = self._store[layer]
        keys[:, :, self.length : end] = key_BNSD
        values[:, :, self.length : end] = value_BNSD
        return keys[:, :, :end], values[:, :, :end]

    def check_room(self, num_tokens: int) -> None:
        """Raise `ConfigError` if `num_tokens` more do not fit."""
        if self.length + num_tokens > self.max_len:
            raise ConfigError(
                f"the key/value cache holds {self.max_len} tokens and has {self.length}; "
                f"{num_tokens} more do not fit"
            )

    def advance(self, num_tokens: int) -> None:
        """Count the tokens of a finished forward pass as held."""
        self.length += num_tokens
