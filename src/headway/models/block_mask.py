"""Block masks of flex attention: which blocks of 128 queries see which blocks of 128 keys.

Owns: the block mask of one forward pass, made from what is known of whole blocks. Does not own:
the kernel, and when it is used (attention.py).

torch's own `create_block_mask` asks about every pair of tokens, 268 million at a length of 16,384,
in every step. A block of keys is of use to a block of queries where their ranges of document ids
overlap, and is seen whole where both hold one and the same id; that takes a look at each token, not
at each pair. What an overlap promises too much (ids that go up and down) the kernel finds out: in a
block that is not seen whole it asks for each pair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 128
# Flips the order of negative numbers and the others: a padding's id, -1, becomes the largest.
_PADDING_LAST = torch.iinfo(torch.int64).min


# Outside of graphs: a compiler looks past the cache below, and these few small operations would
# gain nothing.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def make_block_mask(
    seq_len: int,
    device: torch.device,
    window: int | None,
    document_ids: Tensor | None,
    attention_mask: Tensor | None,
) -> Any:
    """Causal, within a window, within documents, without padding; nobody waits for the device."""
    if document_ids is None and attention_mask is None:
        return _shared_block_mask(seq_len, device, window)
    padding = None if attention_mask is None else attention_mask.bool()
    return _assemble(seq_len, device, window, document_ids, padding)


@functools.lru_cache(maxsize=16)
def _shared_block_mask(seq_len: int, device: torch.device, window: int | None) -> Any:
    # Kept for training too, also where an evaluation in inference mode asks for it first.
    with torch.inference_mode(False):
        return _assemble(seq_len, device, window, None, None)


def _assemble(
    seq_len: int,
    device: torch.device,
    window: int | None,
    document_ids: Tensor | None,
    real: Tensor | None,
) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    numbers = torch.arange(-(-seq_len // _BLOCK), device=device)
    behind = numbers[:, None] - numbers
    seen, whole = behind >= 0, behind > 0
    if seq_len % _BLOCK:
        whole = whole & (numbers[:, None] < numbers[-1])  # the last block is not full of tokens
    if window is not None:
        seen = seen & (behind * _BLOCK - (_BLOCK - 1) < window)
        whole = whole & (behind * _BLOCK + (_BLOCK - 1) < window)
    seen, whole = seen[None], whole[None]
    if document_ids is not None:
        low, high = _ranges(document_ids)
        q_low, q_high = low[:, :, None], high[:, :, None]
        k_low, k_high = low[:, None], high[:, None]
        seen = seen & (q_low <= k_high) & (k_low <= q_high)
        whole = whole & (q_low == k_high) & (k_low == q_high)
    if real is not None:
        blocks = F.pad(real, (0, -seq_len % _BLOCK)).unflatten(1, (-1, _BLOCK))
        seen = seen & (blocks.any(2)[:, None] | (behind == 0))
        whole = whole & blocks.all(2)[:, None]
    return BlockMask.from_kv_blocks(
        *_listed(seen & ~whole),
        *_listed(whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask_function(window, document_ids, real),
        seq_lengths=(seq_len, seq_len),
    )


def _ranges(document_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest id of each block."""
    ids = document_ids.long() ^ _PADDING_LAST
    missing = -ids.shape[1] % _BLOCK
    if missing:
        ids = torch.cat((ids, ids[:, -1:].expand(-1, missing)), dim=1)
    low, high = ids.unflatten(1, (-1, _BLOCK)).aminmax(dim=2)
    return low, high


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and their numbers, in front of the others."""
    ones = chosen.unsqueeze(1).int()
    order = ones.argsort(dim=-1, descending=True, stable=True)
    return ones.sum(-1, dtype=torch.int32), order.int()


def mask_function(
    window: int | None, document_ids: Tensor | None, real: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether a query sees a key, for the kernel."""

    def sees(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        seen = q >= kv
        if window is not None:
            seen = seen & (q - kv < window)
        if document_ids is not None:
            seen = seen & (document_ids[b, q] == document_ids[b, kv])
        if real is not None:
            # A padded query still sees itself: a row with no key at all would be NaN.
            seen = seen & (real[b, kv] | (q == kv))
        return seen

    return sees
