"""Training on an Accelerator of two gloo ranks gives what one process gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from headway.args import AccelTrainingArguments
from headway.data.loader import WindowLoader
from headway.errors import ConfigError
from headway.strategies.base import Strategy
from headway.strategies.objective import Objective
from headway.strategies.single import SingleDevice
from headway.strategies.source import ModelSource
from headway.testing import run_ranks, tiny_dataset, tiny_decoder

NUM_STEPS = 5
Curve = list[tuple[float, float]]


def source() -> ModelSource:
    def make() -> torch.nn.Module:
        torch.manual_seed(3)
        return tiny_decoder(hidden_size=16, intermediate_size=32, num_layers=1)

    return ModelSource(make=make)


def train(
    strategy: Strategy, *, batch_size: int, accumulation: int = 1, num_samples: int = 20
) -> tuple[Curve, float, list[str]]:
    """Losses and norms, the loss of an evaluation after them, and the events of one step."""
    model = strategy.setup(source())
    objective, shard = Objective(model), strategy.data_shard()
    loader = WindowLoader(
        tiny_dataset(num_samples, sequence_length=12, ragged=True),
        batch_size=batch_size,
        accumulation=accumulation,
        rank=shard.rank,
        world_size=shard.world_size,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    curve: Curve = []
    epoch = 0
    while len(curve) < NUM_STEPS:
        loader.start_epoch(epoch)
        epoch += 1
        for window in strategy.feed(loader):
            events: list[str] = []
            totals = window.totals or window
            loss = strategy.forward_backward(
                window, objective, totals.num_target_tokens, events.append
            )
            norm = strategy.clip(0.5)
            strategy.apply(optimizer, loss, norm)
            curve.append((strategy.reduce(loss, "sum").item(), norm.item()))
    model.eval()
    sums = torch.zeros(2)
    with torch.no_grad():
        for window in strategy.feed(loader, training=False):
            step = strategy.eval_forward(window.micro_batches[0], objective)
            if not window.num_fillers and step.loss_sum is not None:
                sums += torch.tensor([float(step.loss_sum), float(step.num_targets)])
    loss_sum, count = strategy.reduce(sums, "sum").tolist()
    assert strategy.unwrap() is model
    strategy.teardown()
    return curve[:NUM_STEPS], loss_sum / count, events


def accelerated(
    settings: dict[str, Any], options: dict[str, Any], **training: Any
) -> tuple[Curve, float, list[str]]:
    from accelerate import Accelerator

    from headway.strategies import AccelerateStrategy

    accelerator = Accelerator(cpu=True, **settings)
    args = AccelTrainingArguments(**options)
    strategy = AccelerateStrategy(accelerator, args)
    training.setdefault("accumulation", args.gradient_accumulation_steps)
    result = train(strategy, **training)
    assert strategy.name == "accelerate" and strategy.device == torch.device("cpu")
    strategy.barrier()
    return result


def check_equal(found: Curve, expected: Curve, tolerance: float = 1e-6) -> None:
    assert torch.allclose(
        torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=tolerance
    ), f"{found} is not {expected}"


def test_two_ranks_equal_one_process() -> None:
    curve, evaluation, _ = train(SingleDevice(torch.device("cpu")), batch_size=4)
    results = run_ranks(_train_either_way, 2)
    for rank in results:
        for found, found_evaluation, _ in rank:
            check_equal(found, curve)
            assert found_evaluation == pytest.approx(evaluation, abs=1e-5)
    assert results[0][0][0] == results[1][0][0]


def _train_either_way() -> list[Any]:
    """Rank 0 reads for both; each reads its own share."""
    from accelerate import DataLoaderConfiguration

    configs = [DataLoaderConfiguration(dispatch_batches=choice) for choice in (True, False)]
    return [accelerated({"dataloader_config": config}, {}, batch_size=2) for config in configs]


def test_accumulation_reduces_once_per_window() -> None:
    """18 samples: full windows of 12, then one of 6 that leaves a rank with less than the other."""
    curve, _, _ = train(
        SingleDevice(torch.device("cpu")), batch_size=6, accumulation=2, num_samples=18
    )
    for (found, _, events), num_steps, once, each in run_ranks(_accumulate, 2):
        check_equal(found, curve)
        assert once == num_steps and each > num_steps
        assert events[:3] == [
            "on_forward_backward_begin",
            "on_forward_backward_end",
            "on_substep_end",
        ]


def _accumulate() -> tuple[Any, int, int, int]:
    """A run, its number of steps and of reductions, and of those when each batch is reduced."""
    from accelerate.state import GradientState
    from accelerate.utils import GradientAccumulationPlugin
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from headway.strategies import accelerate as room

    count = 0
    num_steps = 0

    class Counting(room.AccelerateStrategy):
        def setup(self, source: ModelSource) -> torch.nn.Module:
            def hook(state, bucket):  # DDP refuses annotations that are text
                nonlocal count
                count += bucket.is_last()
                return allreduce_hook(state, bucket)

            model = super().setup(source)
            self._prepared.register_comm_hook(None, hook)
            return model

        def apply(self, *step: Any) -> None:
            nonlocal num_steps
            num_steps += 1
            super().apply(*step)

    room.AccelerateStrategy = Counting  # type: ignore[misc]
    runs = []
    for sync_each_batch in (False, True):
        count = num_steps = 0
        GradientState._reset_state()
        plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=sync_each_batch)
        result = accelerated(
            {"gradient_accumulation_plugin": plugin},
            {"gradient_accumulation_steps": 3},
            batch_size=2,
            num_samples=18,
        )
        runs.append((result, num_steps, count))
    (first, num_first, once), (second, num_second, each) = runs
    assert num_first == num_second
    check_equal(second[0], first[0])
    return first, num_first, once, each


def test_accelerators_that_would_train_something_else_are_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("with a GPU Accelerate does as it is told")
    for alone, sharded in run_ranks(_make_traps, 2):
        assert "WORLD_SIZE" in alone and "cpu=True" in alone
        assert "FSDP2Trainer" in sharded


def _make_traps() -> tuple[str, str]:
    """Without cpu=True every rank takes itself for the only one; FSDP on a CPU becomes DDP."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    from headway.strategies import AccelerateStrategy

    texts = []
    for settings in (
        {},
        {"cpu": True, "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
    ):
        AcceleratorState._reset_state(True)
        with pytest.raises(ConfigError) as caught:
            AccelerateStrategy(Accelerator(**settings), AccelTrainingArguments())
        texts.append(str(caught.value))
    return texts[0], texts[1]
