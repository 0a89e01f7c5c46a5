"""A part of a model whose activations the backward pass makes again.

Owns: `recomputed`, torch's checkpointing as compiled graphs want it. Does not own: what is
recomputed (decoder.py, strategies/recompute.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# Before torch 2.13, compiled graphs keep what an autograd.Function in them makes (joined
# projections, the gated MLP), unless each of its operations is asked for.
_KEEPS_FUNCTIONS = torch.__version__ < "2.13"


def _nothing_kept(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


_make_contexts = functools.partial(create_selective_checkpoint_contexts, _nothing_kept)


def recomputed(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """function(*args), of which only `args` are kept; `options` are those of torch's checkpoint."""
    if (
        _KEEPS_FUNCTIONS
        and torch.compiler.is_compiling()
        and not options.get("use_reentrant")
        and "context_fn" not in options
    ):
        options["context_fn"] = _make_contexts
    return checkpoint(function, *args, **options)
