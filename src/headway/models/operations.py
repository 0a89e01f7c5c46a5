"""How much work a model of any kind is."""

from __future__ import annotations

import torch
from torch import nn


def count_matmul_parameters(model: nn.Module) -> int:
    """Parameters that take part in matrix products; embeddings look up, they do not.

    A weight that is both counts as the head.
    """
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    parameters = sum(p.numel() for p in model.parameters() if id(p) not in embedded)
    head = _output_weight(model)
    tied = head is not None and id(head) in embedded
    return parameters + (head.numel() if head is not None and tied else 0)


def _output_weight(model: nn.Module) -> torch.Tensor | None:
    try:
        head = getattr(model, "get_output_embeddings", lambda: None)()
    except NotImplementedError:  # transformers models without one
        return None
    weight = getattr(head, "weight", None)
    return weight if isinstance(weight, torch.Tensor) else None
