"""A regression small enough to train in a test, and a record of the events of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from headway.compat.xaytune import EVENTS, CallbackManager, Trainer, TrainerConfig, TrainState

NUM_SAMPLES = 22


class Regression(nn.Module):
    """Returns its loss; dropout makes a resume that loses the generators' state visible."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.dropout = nn.Dropout(0.2)
        self.linear = nn.Linear(4, 1)

    def predict(self, x: Tensor) -> Tensor:
        return self.linear(self.dropout(self.norm(x))).squeeze(-1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.predict(x) - y).square().mean()


def make_model() -> Regression:
    torch.manual_seed(7)
    return Regression()


def make_data(num_samples: int = NUM_SAMPLES) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(4, generator=generator), "y": torch.randn((), generator=generator)}
        for _ in range(num_samples)
    ]


def make_loader(shuffle: bool = False, **options: Any) -> DataLoader[Any]:
    return DataLoader(make_data(), batch_size=4, shuffle=shuffle, **options)  # type: ignore[arg-type]


def make_config(folder: Path, **options: Any) -> TrainerConfig:
    fields: dict[str, Any] = {
        "output_dir": str(folder),
        "num_epochs": 2,
        "learning_rate": 1e-2,
        "mixed_precision": "fp32",
        "checkpoint_every_n_steps": 0,
        "save_last": False,
    }
    return TrainerConfig(**{**fields, **options})


class Record:
    """A manager with a handler for each event, and what they heard."""

    def __init__(self) -> None:
        self.manager = CallbackManager()
        self.heard: list[tuple[str, dict[str, Any]]] = []
        for event in EVENTS:
            self.manager.on(event)(self._listen(event))

    def _listen(self, event: str) -> Any:
        def handler(state: TrainState) -> None:
            plain = state.to_dict()
            plain["metrics"] = dict(plain["metrics"])
            self.heard.append((event, plain))

        return handler

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.heard]

    def of(self, event: str, field: str) -> list[Any]:
        return [state[field] for name, state in self.heard if name == event]


def train(
    config: TrainerConfig, manager: CallbackManager | None = None, **options: Any
) -> TrainState:
    options.setdefault("model", make_model())
    options.setdefault("train_dataloader", make_loader())
    return Trainer(config, manager).train(**options)
