"""What ranks do in the tests of the pipeline: train, measure, and compare with one device."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from headway.args import PipelineTrainingArguments
from headway.data.windows import Window
from headway.dist import init_distributed
from headway.strategies.objective import Objective
from headway.strategies.pipeline import PipelineStrategy
from headway.strategies.pipeline.schedules import find_schedule
from headway.strategies.single import SingleDevice
from headway.strategies.source import ModelSource
from headway.testing import tiny_decoder, tiny_llama

CPU = torch.device("cpu")
ROWS = 8
MAKERS = {"decoder": tiny_decoder, "llama": tiny_llama}
DEPTH = {"decoder": "num_layers", "llama": "num_hidden_layers"}


@dataclass(frozen=True)
class Case:
    """One way of training: a schedule, a model, and batches of these shapes in each step."""

    schedule: str | None = None
    layers: int = 4
    family: str = "decoder"
    model: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, int], ...] = ((ROWS, 16), (ROWS, 16))
    steps: int = 5
    recompute: bool = False
    own_loss: bool = False


@dataclass
class Trained:
    """Losses, norms and what the trained model does."""

    losses: list[float]
    norms: list[float]
    eval_loss: float
    tokens: list[list[int]]
    logits: torch.Tensor
    events: list[str]
    num_parameters: int


def batches_of(case: Case) -> list[list[dict[str, torch.Tensor]]]:
    """By step: the global batches, with rows of which some targets are ignored."""
    draw = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(case.steps):
        batches = []
        for shape in case.shapes:
            ids = torch.randint(0, 258, shape, generator=draw)
            labels = ids.clone()
            labels[0, :5] = -100
            batches.append({"input_ids": ids, "labels": labels})
        steps.append(batches)
    return steps


def count(batches: list[dict[str, torch.Tensor]]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def source_of(case: Case) -> ModelSource:
    fields = {DEPTH[case.family]: case.layers, **case.model}
    source = ModelSource(make=partial(MAKERS[case.family], **fields))
    if case.recompute:
        source.prepare = lambda module: module.gradient_checkpointing_enable()
    return source


def loss_of_logits(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


def make_pipeline(case: Case, **options: Any) -> PipelineStrategy:
    context = init_distributed(use_cpu=True)
    shares = context.world_size // case.arguments.get("pipeline_size", context.world_size)
    args = PipelineTrainingArguments(
        output_dir="out",
        pipe_schedule=case.schedule,
        per_device_train_batch_size=ROWS // shares,
        per_device_eval_batch_size=ROWS // shares,
        **case.arguments,
    )
    return PipelineStrategy(context, CPU, args, **options)


def train(strategy: Any, case: Case) -> Trained:
    """A few steps of AdamW on this rank's share, then an evaluation and some tokens."""
    torch.manual_seed(0)
    model = strategy.setup(source_of(case))
    for stage in getattr(model, "stages", ()):
        assert stage.is_gradient_checkpointing == case.recompute
        assert stage.plain_loss == find_schedule(None, case.schedule).facts.is_zero_bubble
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    objective = Objective(model, loss_of_logits if case.own_loss else None)
    shard = strategy.data_shard()
    events: list[str] = []
    losses, norms = [], []
    for batches in batches_of(case):
        own = [
            {name: value.chunk(shard.world_size)[shard.rank] for name, value in batch.items()}
            for batch in batches
        ]
        window = Window(own, count(own), 0, 0)
        loss = strategy.forward_backward(window, objective, count(batches), events.append)
        norm = strategy.clip(0.7)
        strategy.apply(optimizer, loss, norm)
        losses.append(strategy.reduce(loss, "sum").item())
        norms.append(norm.item())
    model.eval()
    batch = {name: value[:5] for name, value in batches_of(case)[0][0].items()}
    step = strategy.eval_forward(batch, objective, with_logits=True)
    sums = torch.tensor([float(step.loss_sum), float(step.num_targets)], dtype=torch.float64)
    loss_sum, targets = strategy.reduce(sums, "sum").tolist()
    tokens = strategy.generate(batch["input_ids"][:2, :5], max_new_tokens=6, do_sample=False)
    assert not model.training, "generate leaves the mode as it was"
    assert step.logits is not None
    num_parameters = sum(p.numel() for p in model.parameters())
    return Trained(
        losses, norms, loss_sum / targets, tokens.tolist(), step.logits, events, num_parameters
    )


def train_all(cases: list[Case]) -> list[tuple[Trained, Trained]]:
    """For each case: in the pipeline, and on one device."""
    found = []
    for case in cases:
        piped = train(make_pipeline(case), case)
        found.append((piped, train(SingleDevice(CPU), case)))
    return found
