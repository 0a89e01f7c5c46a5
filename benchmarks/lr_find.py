"""What `lr_find` suggests, against the best rate of short trainings at many rates.

For each model and optimizer: a search with three orders of the data, and a grid of trainings at a
constant rate, each with the same steps and the same initial weights. Runs on the CPU.

    python benchmarks/lr_find.py [--steps 100] [--write]
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headway.optim import lr_find
from headway.testing import tiny_decoder, tiny_llama


class Batches:
    """Rows of some tensors in an order that a seed decides, again and again."""

    def __init__(self, batch_size: int, **tensors: Tensor) -> None:
        self.batch_size, self.tensors = batch_size, tensors

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(len(next(iter(self.tensors.values()))))
        for rows in order.split(self.batch_size):
            yield {name: tensor[rows] for name, tensor in self.tensors.items()}


def make_text(num_rows: int = 512, length: int = 32, num_symbols: int = 64) -> Tensor:
    """Symbols of which each makes some others likely."""
    generator = np.random.default_rng(0)
    follows = generator.dirichlet(np.ones(num_symbols) * 0.1, size=num_symbols).cumsum(axis=1)
    rows = np.empty((num_rows, length), dtype=np.int64)
    rows[:, 0] = generator.integers(num_symbols, size=num_rows)
    for place in range(1, length):
        chosen = (follows[rows[:, place - 1]] < generator.random((num_rows, 1))).sum(axis=1)
        rows[:, place] = np.minimum(chosen, num_symbols - 1)
    return torch.from_numpy(rows)


def make_classes(noise: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(10, 20, generator=generator)
    y = torch.randint(10, (2048,), generator=generator)
    return {"x": centres[y] + noise * torch.randn(2048, 20, generator=generator), "y": y}


class Classifier(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for below, above in itertools.pairwise([20, *[width] * depth]):
            layers += [nn.Linear(below, above), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 10))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(x), y)}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


@dataclass
class Case:
    """A model on data with an optimizer."""

    make: Callable[[], nn.Module]
    batches: Batches
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    low: float = 2.5e-4
    """Lowest rate of the grid, which doubles from there."""


def make_cases() -> dict[str, Case]:
    text = make_text()
    language = Batches(8, input_ids=text, labels=text)
    easy, hard = Batches(32, **make_classes(1.0)), Batches(64, **make_classes(2.0))
    wide = {"hidden_size": 96, "num_layers": 3, "intermediate_size": 192}
    return {
        "decoder, width 32": Case(lambda: tiny_decoder(vocab_size=64), language),
        "decoder, width 96": Case(lambda: tiny_decoder(vocab_size=64, **wide), language),
        "Llama of transformers, width 32": Case(lambda: tiny_llama(vocab_size=64), language),
        "classifier, width 64": Case(lambda: Classifier(64, 2), easy),
        "classifier, width 256, 4 layers": Case(lambda: Classifier(256, 4), hard),
        "classifier, width 64, momentum": Case(lambda: Classifier(64, 2), easy, momentum, 2e-3),
        "decoder, width 32, momentum": Case(
            lambda: tiny_decoder(vocab_size=64), language, momentum, 1e-2
        ),
    }


def find_loss(outputs: Any) -> Tensor:
    loss: Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs.loss
    return loss


def train(case: Case, lr: float, num_steps: int) -> float:
    """The mean loss of the last quarter of a training at a constant rate."""
    torch.manual_seed(0)
    model = case.make()
    optimizer = case.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = lr
    batches = itertools.chain.from_iterable(itertools.repeat(case.batches))
    losses = []
    for batch in itertools.islice(batches, num_steps):
        loss = find_loss(model(**batch))
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            return math.inf
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return float(np.mean(losses[-(num_steps // 4) :]))


def measure(case: Case, num_steps: int) -> dict[str, Any]:
    """What is suggested, and what is best."""
    torch.manual_seed(0)
    found = lr_find(
        case.make(),
        case.batches,
        end_lr=1.0 if case.optimizer is adamw else 100.0,
        optimizer_factory=case.optimizer,
        max_grad_norm=1.0,
        num_seeds=3,
    )
    scores = {lr: train(case, lr, num_steps) for lr in (case.low * 2**n for n in range(9))}
    best = min(scores, key=lambda lr: scores[lr])
    suggested = found.suggested_lr or math.nan
    at_suggested = train(case, suggested, num_steps) if found.suggested_lr else math.nan
    return {
        "suggested": suggested,
        "spread": found.spread.get("valley", (math.nan, math.nan)),
        "best": best,
        "factor": max(suggested / best, best / suggested),
        "loss": at_suggested,
        "best_loss": scores[best],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="of each training of the grid")
    parser.add_argument("--write", action="store_true", help="write to benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    date = datetime.date.today().isoformat()
    lines = [
        f"# lr_find against a grid of trainings, {date}",
        "",
        f"CPU ({platform.machine()}), torch {torch.__version__}; {options.steps} steps each at a "
        "constant rate, gradients clipped to 1; rates of the grid grow by a factor of 2. Losses "
        "are means over the last quarter.",
        "",
        "| Model | suggested | valley, 3 orders | best of the grid | apart by | loss | best loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in make_cases().items():
        facts = measure(case, options.steps)
        low, high = facts["spread"]
        lines.append(
            f"| {name} | {facts['suggested']:.1e} | {low:.1e} to {high:.1e} | {facts['best']:.1e} "
            f"| {facts['factor']:.1f} x | {facts['loss']:.3f} | {facts['best_loss']:.3f} |"
        )
        print(lines[-1], flush=True)
    if options.write:
        path = Path(__file__).parent / "results" / f"lr_find-{date}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
