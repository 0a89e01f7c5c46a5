"""What must hold wherever linear layers are exchanged for ones that compute in fewer bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from headway.testing import tiny_decoder

Change = Callable[[nn.Module], object]


def layers_of_class(model: nn.Module, kind: str) -> list[str]:
    """Names of the modules of a class, which only the package that has it could import."""
    return [name for name, module in model.named_modules() if type(module).__name__ == kind]


def check_training(change: Change, kind: str) -> None:
    """Names, dtypes and parameters stay; the loss is near the plain one, another, and falls."""
    torch.manual_seed(0)
    model = tiny_decoder()
    before = {name: (id(p), p.dtype) for name, p in model.named_parameters()}
    names = list(model.state_dict())
    ids = torch.randint(0, 258, (2, 16))
    whole = model(ids, labels=ids).loss.item()
    change(model)
    assert {name: (id(p), p.dtype) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == names
    assert len(layers_of_class(model, kind)) == 14
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(whole, rel=1e-2) and losses[0] != whole
    assert losses[-1] < losses[0] - 1


def check_without_values(change: Change) -> None:
    """A model on the meta device keeps its parameters, ties and what is frozen."""
    with torch.device("meta"):
        model = tiny_decoder(tie_embeddings=True)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    change(model)
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before) and after.keys() == before.keys()
    assert model.is_blank and model.lm_head.weight is model.model.embed_tokens.weight
