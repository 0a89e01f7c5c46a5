"""What model, data and tokenizer a run has, in a form that a later run can compare with.

Owns: taking the fingerprints. Does not own: where they are stored (saving.py) nor what a difference
leads to (resume.py).
"""

from __future__ import annotations

from typing import Any

import xxhash
from torch import nn

from headway.checkpoint.model import collect_model
from headway.checkpoint.ranks import Ranks
from headway.data.fingerprint import fingerprint_data
from headway.data.loader import WindowLoader


def take_fingerprints(
    model: nn.Module, loader: WindowLoader, tokenizer: Any, ranks: Ranks
) -> dict[str, dict[str, Any] | None]:
    """Fingerprints of a run's parts, as plain JSON values; every rank takes part."""
    return {
        "model": fingerprint_model(model, ranks),
        "data": fingerprint_data(loader),
        "tokenizer": fingerprint_tokenizer(tokenizer),
    }


def fingerprint_model(model: nn.Module, ranks: Ranks) -> dict[str, Any]:
    """Number of tensors and a digest of their names and shapes, over all ranks."""
    tensors = collect_model(model).by_name
    own = [f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()]
    lines = sorted({line for told in ranks.exchange(own) for line in told})
    digest = xxhash.xxh3_128_hexdigest("\n".join(lines).encode())
    return {"num_tensors": len(lines), "digest": digest}


def fingerprint_tokenizer(tokenizer: Any) -> dict[str, Any] | None:
    """Class, vocabulary size and a digest: the tokenizer's own, or one of its vocabulary."""
    if tokenizer is None:
        return None
    found: dict[str, Any] = {"class": type(tokenizer).__name__}
    for name in ("vocab_size", "digest"):
        value = getattr(tokenizer, name, None)
        if isinstance(value, int | str):
            found[name] = value
    get_vocab = getattr(tokenizer, "get_vocab", None)
    if "digest" not in found and callable(get_vocab):
        lines = sorted(f"{number} {token!r}" for token, number in get_vocab().items())
        found["digest"] = xxhash.xxh3_128_hexdigest("\n".join(lines).encode())
    return found
