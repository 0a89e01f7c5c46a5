"""What model, data and tokenizer a run has, in a form that a later run can compare with.

Owns: taking the fingerprints. Does not own: where they are stored (saving.py) nor what a difference
leads to (resume.py).
"""

from __future__ import annotations

from typing import Any

import xxhash
from torch import nn

from headway.checkpoint.model import collect_model
from headway.data.fingerprint import fingerprint_data
from headway.data.loader import WindowLoader


def take_fingerprints(
    model: nn.Module, loader: WindowLoader, tokenizer: Any
) -> dict[str, dict[str, Any] | None]:
    """Fingerprints of a run's parts, as plain JSON values."""
    return {
        "model": fingerprint_model(model),
        "data": fingerprint_data(loader),
        "tokenizer": fingerprint_tokenizer(tokenizer),
    }


def fingerprint_model(model: nn.Module) -> dict[str, Any]:
    """Number of tensors and a digest of their names and shapes."""
    tensors = collect_model(model).by_name
    text = "\n".join(f"{name} {list(tensors[name].shape)}" for name in sorted(tensors))
    return {"num_tensors": len(tensors), "digest": xxhash.xxh3_128_hexdigest(text.encode())}


def fingerprint_tokenizer(tokenizer: Any) -> dict[str, Any] | None:
    """Class, vocabulary size and, where it can tell, the tokenizer's own digest."""
    if tokenizer is None:
        return None
    found: dict[str, Any] = {"class": type(tokenizer).__name__}
    for name in ("vocab_size", "digest"):
        value = getattr(tokenizer, name, None)
        if isinstance(value, int | str):
            found[name] = value
    return found
