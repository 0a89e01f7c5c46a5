"""Sampling from a model whose layers are on several ranks.

Owns: `pipeline_generate`. Does not own: the choice of a token (models/generation.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from headway.errors import ConfigError
from headway.models.generation import Sampling, check_request, draw_tokens, find_end, find_logits
from headway.strategies.pipeline.pieces import Piece
from headway.strategies.pipeline.relay import Relay
from headway.strategies.pipeline.stages import StageCall


@dataclass(frozen=True, kw_only=True)
class _SharedSampling(Sampling):
    """Draws on one rank and tells all the others."""

    source: int
    rank: int

    def draw(self, logits_BV: Tensor, seen: Tensor, seen_mask: Tensor, generator: Any) -> Tensor:
        token = torch.empty(seen.shape[0], dtype=torch.int64, device=seen.device)
        if self.rank == self.source:
            token = super().draw(logits_BV, seen, seen_mask, generator)
        dist.broadcast(token, self.source)
        return token


def pipeline_generate(
    relay: Relay,
    config: Any,
    input_ids: Tensor,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    *,
    source: int,
    attention_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Tensor:
    """Prompts [B, S] with up to `max_new_tokens` more; all ranks call it, with the same prompts.

    Every token is a pass of the whole text through all stages: there is no key/value cache. The
    rank `source` draws for all.
    """
    sampling = _SharedSampling(source=source, rank=dist.get_rank(), **options)
    check_request(input_ids, max_new_tokens, sampling, attention_mask)
    _check_length(config, input_ids.shape[1], max_new_tokens)
    ends, pad = find_end([config], eos_token_id, pad_token_id)
    padded = attention_mask is not None

    def step(ids: Tensor, mask: Tensor) -> Tensor:
        piece: Piece = {"input_ids": ids}
        if padded:
            piece["attention_mask"] = mask
            piece["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        found = relay.run([piece], _next_logits)
        return found[0] if found else ids.new_empty(0)

    return draw_tokens(
        step, input_ids, max_new_tokens, sampling, ends, pad, attention_mask, generator
    )


def _check_length(config: Any, num_given: int, num_new: int) -> None:
    limit = getattr(config, "max_seq_len", None) or getattr(config, "max_position_embeddings", None)
    if limit is not None and num_given + num_new > limit:
        raise ConfigError(
            f"a prompt of {num_given} tokens and max_new_tokens={num_new} make "
            f"{num_given + num_new}, more than the model's {limit} positions"
        )


def _next_logits(call: StageCall, hidden: Tensor, piece: Piece) -> Tensor:
    out = call.as_model(hidden)(**piece)
    return find_logits(out, type(call.stage).__name__)[:, -1]
