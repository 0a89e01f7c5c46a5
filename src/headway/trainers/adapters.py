"""The folder that PEFT makes of a model's adapters, of a model that no rank holds whole.

Owns: telling such a model, and giving PEFT the weights that the ranks hold together. Does not own:
what is in the folder (PEFT), nor writing weights by all ranks (checkpoint).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from headway.checkpoint.sharding import is_spread
from headway.checkpoint.weights import open_weights
from headway.models.hf import hf_config_of


def has_adapters(model: nn.Module) -> bool:
    """Whether it is one of PEFT's, which says itself what is saved of it."""
    return hasattr(model, "peft_config") and hf_config_of(model) is None


def is_whole(model: nn.Module) -> bool:
    """Whether this rank has all of every tensor of the module."""
    return not any(is_spread(tensor) for tensor in model.state_dict().values())


def save_adapters(model: Any, weights: Path, folder: Path, tokenizer: Any) -> None:
    """Let PEFT choose from the weights that all ranks have written; they are read as it does."""
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    model.save_pretrained(str(folder), state_dict=open_weights(weights).read())
