"""A batch in pieces, each of which passes through the stages by itself.

Owns: cutting along the first dimension, padding rows that count for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headway.data.counting import IGNORED_LABEL
from headway.errors import ConfigError

Piece = dict[str, Any]


def check_batch(batch: Any) -> Piece:
    """The batch as a dict with `input_ids` [rows, length]."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        got = (
            f"{', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
        )
        raise ConfigError(
            "a pipeline needs batches that are dicts with input_ids [batch, length], got "
            f"{got}; the data collator decides"
        )
    return dict(batch)


def pad_rows(batch: Piece, num_rows: int) -> Piece:
    """The batch with rows added that have no target: copies of the last one."""
    have = batch["input_ids"].shape[0]
    if have == num_rows:
        return batch
    padded = dict(batch)
    for name, value in batch.items():
        if not _has_rows(value, have):
            continue
        more = value[-1:].expand(num_rows - have, *value.shape[1:])
        if name == "labels" and not value.is_floating_point():
            more = torch.full_like(more, IGNORED_LABEL)
        padded[name] = torch.cat([value, more])
    return padded


def _has_rows(value: Any, num_rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == num_rows


def cut_batch(batch: Piece, num_pieces: int) -> list[Piece]:
    """The batch in at most so many pieces of as equal numbers of rows as possible."""
    rows = batch["input_ids"].shape[0]
    bounds = [rows * number // num_pieces for number in range(num_pieces + 1)]
    spans = [slice(a, b) for a, b in itertools.pairwise(bounds) if a < b]
    return [
        {name: value[span] if _has_rows(value, rows) else value for name, value in batch.items()}
        for span in spans
    ]
