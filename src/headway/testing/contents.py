"""Small things to save: a model with tied weights, its optimizer, a component.

Owns: contents in which a seed decides every value. Does not own: real models (models/).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headway.checkpoint import CheckpointContents, RNGState, SharingPattern, StateComponent

VOCABULARY = 7


class Counter:
    """A stateful object with one number and one tensor."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.tensor = torch.full((3,), float(value))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "tensor": self.tensor, "seen": (1, {"a": float("nan")})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]
        self.tensor = state_dict["tensor"]


class TiedModel(nn.Module):
    """An embedding, a layer and a head that shares the embedding's weight."""

    def __init__(self, seed: int = 0, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.norm = nn.BatchNorm1d(width)
        self.layer = nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.drop(self.layer(self.norm(self.embed(ids)))))
        return logits


def make_contents(
    seed: int = 0, value: int = 0, width: int = 4, **changes: Any
) -> CheckpointContents:
    """Contents in which `seed` decides the weights and `value` the rest."""
    model = TiedModel(seed, width)
    fields: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05),
        "components": [
            StateComponent("rng", RNGState(), SharingPattern.PER_RANK),
            StateComponent("counter", Counter(value), SharingPattern.GLOBAL),
        ],
        "trainer_state": {"global_step": value, "log_history": [{"loss": 1.0, "step": 1}]},
    }
    return CheckpointContents(**{**fields, **changes})


def train(contents: CheckpointContents, num_steps: int) -> list[float]:
    """Train on random tokens; returns the losses."""
    assert contents.optimizer is not None
    losses = []
    for _ in range(num_steps):
        ids = torch.randint(0, VOCABULARY, (6,))
        loss = nn.functional.cross_entropy(contents.model(ids), ids)
        loss.backward()  # type: ignore[no-untyped-call]
        contents.optimizer.step()
        contents.optimizer.zero_grad()
        losses.append(loss.item())
    return losses
