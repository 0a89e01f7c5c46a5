"""What `lr_find` suggests is a good rate: near the best of trainings at many rates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headway.optim import lr_find
from headway.testing import tiny_decoder

NUM_STEPS = 80
GRID = [4e-4 * 2**n for n in range(8)]  # to 5e-2


class Batches:
    """Rows of some tensors in an order that a seed decides, again and again."""

    def __init__(self, batch_size: int, **tensors: Tensor) -> None:
        self.batch_size, self.tensors = batch_size, tensors
        self.seed: int | None = None

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator()
        generator.manual_seed(int(torch.randint(2**31, ())) if self.seed is None else self.seed)
        num_rows = len(next(iter(self.tensors.values())))
        for rows in torch.randperm(num_rows, generator=generator).split(self.batch_size):
            yield {name: tensor[rows] for name, tensor in self.tensors.items()}


def make_text(num_rows: int, length: int, num_symbols: int = 64) -> Tensor:
    """Symbols of which each makes some others likely."""
    generator = np.random.default_rng(0)
    follows = generator.dirichlet(np.ones(num_symbols) * 0.1, size=num_symbols).cumsum(axis=1)
    rows = np.empty((num_rows, length), dtype=np.int64)
    rows[:, 0] = generator.integers(num_symbols, size=num_rows)
    for place in range(1, length):
        draws = generator.random((num_rows, 1))
        chosen = (follows[rows[:, place - 1]] < draws).sum(axis=1)
        rows[:, place] = np.minimum(chosen, num_symbols - 1)
    return torch.from_numpy(rows)


class Classifier(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = [20, *[width] * depth]
        layers = [
            part
            for below, above in itertools.pairwise(sizes)
            for part in (nn.Linear(below, above), nn.ReLU())
        ]
        self.net = nn.Sequential(*layers, nn.Linear(width, 10))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(x), y)}


def make_classes(noise: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(10, 20, generator=generator)
    y = torch.randint(10, (2048,), generator=generator)
    return {"x": centres[y] + noise * torch.randn(2048, 20, generator=generator), "y": y}


def make_decoder() -> tuple[Callable[[], nn.Module], Batches]:
    text = make_text(512, 24)
    batches = Batches(8, input_ids=text, labels=text)
    return lambda: tiny_decoder(vocab_size=64, num_layers=1), batches


CASES: dict[str, Callable[[], tuple[Callable[[], nn.Module], Batches]]] = {
    "decoder": make_decoder,
    "small classifier": lambda: (lambda: Classifier(64, 2), Batches(32, **make_classes(1.0))),
    "large classifier": lambda: (lambda: Classifier(256, 4), Batches(64, **make_classes(2.0))),
}


def train(model: nn.Module, batches: Batches, lr: float) -> float:
    """The mean loss of the last steps of a short training at a constant rate."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=lr)
    losses: list[float] = []
    batches.seed = 0
    while len(losses) < NUM_STEPS:
        for batch in batches:
            loss = model(**batch)["loss"] if "x" in batch else model(**batch).loss
            losses.append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if len(losses) == NUM_STEPS:
                break
    batches.seed = None
    return float(np.mean(losses[-NUM_STEPS // 4 :]))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", CASES)
def test_the_suggestion_is_within_a_factor_of_3_of_the_best_rate(case: str) -> None:
    make, batches = CASES[case]()
    torch.manual_seed(0)
    found = lr_find(make(), batches, max_grad_norm=1.0, num_seeds=2)
    scores = {}
    for lr in GRID:
        torch.manual_seed(0)
        scores[lr] = train(make(), batches, lr)
    best = min(scores, key=lambda lr: scores[lr])
    assert GRID[0] < best < GRID[-1], scores
    assert found.suggested_lr is not None
    assert best / 3 < found.suggested_lr < best * 3, (best, found.suggestions, scores)
    for low, high in found.spread.values():
        assert low <= high
