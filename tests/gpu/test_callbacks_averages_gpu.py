"""Averages of weights on a CUDA device: what saves copy, what the host waits for, and memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway import TrainerCallback
from headway.callbacks import EMACallback, ModelMergeCallback
from headway.checkpoint.tensors import read_shards
from headway.testing import count_host_syncs, tiny_decoder, tiny_trainer

pytestmark = pytest.mark.gpu

MODEL = {"hidden_size": 512, "num_layers": 4, "intermediate_size": 2048}
RUN: dict[str, Any] = {"num_samples": 64, "max_steps": 12, "learning_rate": 1e-3, "use_cpu": False}


class Weights(TrainerCallback):
    priority = 100

    def __init__(self) -> None:
        self.by_step: dict[int, dict[str, Tensor]] = {}

    def on_train_begin(self, state: Any, model: Any) -> None:
        self.on_step_end(state, model)

    def on_step_end(self, state: Any, model: Any) -> None:
        held = model.state_dict()
        self.by_step[state.global_step] = {name: t.detach().clone() for name, t in held.items()}


def make_trainer(folder: Path, callbacks: list[Any], **changes: Any) -> Any:
    trainer = tiny_trainer(folder, callbacks, **{**RUN, **changes})
    trainer.model_init = lambda: tiny_decoder(**MODEL)
    return trainer


def average_at(seen: Weights, step: int, decay: float) -> dict[str, Tensor]:
    average = dict(seen.by_step[0])
    for number in range(1, step + 1):
        for name, value in seen.by_step[number].items():
            average[name] = average[name].lerp(value, 1 - decay)
    return {name: value.cpu() for name, value in average.items()}


@pytest.mark.parametrize("device", ["parameter", "cpu"])
def test_saves_hold_the_averages_of_their_step(tmp_path: Path, device: str) -> None:
    seen = Weights()
    callbacks = [
        ModelMergeCallback(merge_step=9, merge_last_n_steps=6),
        EMACallback(decay=0.8, device=device, use_for_eval=True, export=True),
        seen,
    ]
    make_trainer(
        tmp_path,
        callbacks,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=None,
        eval_strategy="steps",
        eval_steps=2,
    ).train()
    out = tmp_path / "out"
    for step in range(1, 13):
        stored = read_shards(out / f"checkpoint-{step}", "state/callback-EMACallback")
        expected = average_at(seen, step, 0.8)
        for name, value in stored.items():
            wanted = expected[name.removeprefix("ema.")]
            if device == "parameter":
                assert torch.equal(value, wanted), (step, name)
            else:  # the host rounds its multiply-add in another way
                torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-7)
        sums = read_shards(out / f"checkpoint-{step}", "state/callback-ModelMergeCallback")
        assert bool(sums) == (4 <= step < 9)
        for name, value in sums.items():
            total = torch.zeros_like(seen.by_step[step][name.removeprefix("sum.")])
            for number in range(4, step + 1):
                total += seen.by_step[number][name.removeprefix("sum.")]
            assert torch.equal(value, total.cpu()), (step, name)
        for name, value in read_shards(out / f"checkpoint-{step}", "model").items():
            assert torch.equal(value, seen.by_step[step][name].cpu()), (step, name)
    for name, value in read_shards(out / "checkpoint-9-merged", "model").items():
        total = torch.zeros_like(seen.by_step[9][name])
        for number in range(4, 10):
            total += seen.by_step[number][name]
        assert torch.equal(value, (total / 6).cpu()), name
    exported = read_shards(out / "checkpoint-12-ema", "model")
    last = read_shards(out / "checkpoint-12", "state/callback-EMACallback")
    assert all(torch.equal(exported[n.removeprefix("ema.")], v) for n, v in last.items())


@pytest.mark.parametrize("device", ["parameter", "cpu"])
def test_a_step_waits_for_nothing(tmp_path: Path, device: str) -> None:
    class Count(TrainerCallback):
        """Between the third step and the last."""

        priority = -100

        def on_step_end(self, state: Any) -> None:
            if state.global_step == 3:
                self.context = count_host_syncs()
                self.syncs = self.context.__enter__()
            elif state.global_step == 11:
                self.context.__exit__(None, None, None)

    count = Count()
    callbacks = [
        ModelMergeCallback(merge_step=100, merge_last_n_steps=100),
        EMACallback(decay=0.8, device=device),
        count,
    ]
    make_trainer(tmp_path, callbacks, logging_steps=1000, metrics_collect_interval=1000).train()
    assert count.syncs.count == 0, count.syncs.report()


def test_a_merge_takes_the_memory_of_the_sums_alone(tmp_path: Path) -> None:
    """Four bytes for each parameter from the window's beginning to the merge, and little at it."""
    used: dict[int, int] = {}
    peaks: dict[int, int] = {}

    class Memory(TrainerCallback):
        priority = -100

        def on_step_begin(self) -> None:
            torch.cuda.reset_peak_memory_stats()

        def on_step_end(self, state: Any) -> None:
            torch.cuda.synchronize()
            used[state.global_step] = torch.cuda.memory_allocated()
            peaks[state.global_step] = torch.cuda.max_memory_allocated()

    gc.collect()  # what earlier tests left behind would otherwise go at some moment in between
    merge = ModelMergeCallback(merge_step=8, merge_last_n_steps=4)
    trainer = make_trainer(tmp_path, [merge, Memory()], num_samples=64)
    trainer.train()
    size = sum(4 * p.numel() for p in trainer.model.parameters())
    largest = max(4 * p.numel() for p in trainer.model.parameters())
    assert used[6] - used[3] == pytest.approx(size, rel=0.05)
    assert used[10] == pytest.approx(used[3], rel=0.02)
    assert peaks[8] - peaks[6] <= 2 * largest + (1 << 20)
