"""Micro-batches with shorter sequences: cut into pieces, or cut off.

Owns: what happens to each field of a batch, and what a window amounts to afterwards. Does not own:
which length a step has (sequence_length.py).

A piece is a sample like any other: its positions begin at 0, its documents are numbered from 0, and
its first token is no target, since nothing in the piece comes before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from headway.data.windows import Window

_WHO = "SequenceLengthSchedulerCallback"
# How other libraries say where the documents of a pack end: in numbers, not beside the tokens.
_BY_LENGTHS = ("cu_seq", "doc_len", "max_doc_len", "max_seqlen", "max_length_", "seq_len")


def cut_window(window: Window, length: int, *, split: bool) -> bool:
    """Give all micro-batches of a window sequences of at most `length`, and count it anew.

    With `split` every token stays, else those beyond the length are gone. False where all were
    short enough. The batches themselves are left alone, the window gets new ones.
    """
    from headway.data.counting import count_targets, count_tokens

    cut = [cut_batch(batch, length, split=split) for batch in window.micro_batches]
    if all(new is old for new, old in zip(cut, window.micro_batches)):
        return False
    real = cut[: len(cut) - window.num_fillers]
    num_targets: Any = 0
    for batch in real:
        num_targets = num_targets + count_targets(batch)
    window.num_target_tokens = num_targets
    window.num_tokens = sum(map(count_tokens, real))
    # After counting: a place that is attended to only so that no row is empty holds no token.
    window.micro_batches = [_fill_empty_rows(batch) for batch in cut]
    return True


def cut_batch(batch: Any, length: int, *, split: bool) -> Any:
    """The batch with sequences of at most `length`; the same object where they were so."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if ids is None or getattr(ids, "ndim", 0) != 2:
        got = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ConfigError(
            f"{_WHO} needs batches that are dicts with input_ids [batch, length], got {got}; the "
            "data collator decides"
        )
    rows, width = ids.shape
    if width <= length:
        return batch
    if split and width % length:
        raise ConfigError(
            f"{_WHO}: sequences of {width} tokens cannot be split into pieces of {length}; give "
            f"every sample the full length (packed or padded to it), or set truncate=True"
        )
    if not split:
        _refuse_left_padding(batch.get("attention_mask"), length)
    cut = {
        name: _cut_field(name, value, rows, width, length, split=split)
        for name, value in batch.items()
    }
    if split:
        if "position_ids" in cut:
            cut["position_ids"] = _restart_positions(cut["position_ids"])
        if "document_ids" in cut:
            cut["document_ids"] = _renumber(cut["document_ids"])
    return cut


def _refuse_left_padding(mask: Any, length: int) -> None:
    """Of a sample that begins with padding the cut would leave padding, and take tokens away."""
    if mask is None or getattr(mask, "ndim", 0) != 2 or mask.device.type != "cpu":
        return
    if bool(((mask[:, 0] == 0) & (mask[:, length:] != 0).any(1)).any()):
        raise ConfigError(
            f"{_WHO}: truncate=True cuts from the right, and a sample begins with padding, so that "
            "tokens would be cut off and padding kept; pad on the right. The data collator decides"
        )


def _cut_field(name: str, value: Any, rows: int, width: int, length: int, *, split: bool) -> Any:
    from torch import Tensor

    if isinstance(value, Tensor) and not name.startswith(_BY_LENGTHS):
        whole_mask = value.dim() > 2 and ("mask" in name or "bias" in name)
        if value.dim() == 0:
            return value
        if value.dim() >= 2 and value.shape[:2] == (rows, width) and not whole_mask:
            return _cut_tokens(value, length, split=split)
        if value.dim() == 1 and value.shape[0] == rows:
            return value.repeat_interleave(width // length) if split else value
    elif isinstance(value, list) and len(value) == rows:
        return [item for item in value for _ in range(width // length if split else 1)]
    elif isinstance(value, int | float | str) and not name.startswith(_BY_LENGTHS):
        return value
    shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
    raise ConfigError(
        f"{_WHO} cannot shorten {name!r} ({shape}) of a batch of [{rows}, {width}] tokens; allowed "
        f"are fields with an entry for each token, such as document_ids and position_ids of packed "
        f"data, or one for each sample. The data collator decides"
    )


def _cut_tokens(value: Tensor, length: int, *, split: bool) -> Tensor:
    if split:
        return value.reshape(-1, length, *value.shape[2:])
    kept = value[:, :length].contiguous()
    return kept.pin_memory() if value.device.type == "cpu" and value.is_pinned() else kept


def _restart_positions(positions: Tensor) -> Tensor:
    """Positions of a document that began in an earlier piece are counted from this piece on."""
    import torch

    first = positions[:, :1]
    along = first + torch.arange(positions.shape[1], device=positions.device)
    continued = (positions == along).int().cumprod(1).bool()
    return torch.where(continued, positions - first, positions)


def _renumber(documents: Tensor) -> Tensor:
    """Documents of each piece from 0; padding (-1) stays."""
    import torch

    first = documents[:, :1].clamp(min=0)
    return torch.where(documents >= 0, documents - first, documents)


def _fill_empty_rows(batch: Any) -> Any:
    """A piece of nothing but padding attends to one place: a softmax over none is not a number."""
    mask = batch.get("attention_mask")
    if mask is None:
        return batch
    empty = (mask == 0).all(1)
    if mask.device.type == "cpu" and not empty.any():
        return batch
    mask = mask.clone()
    mask[:, 0] = mask[:, 0].masked_fill(empty, 1)
    return {**batch, "attention_mask": mask}
