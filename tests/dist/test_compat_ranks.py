"""xaytune's trainer on two ranks: the losses of one process, and one group per run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from headway.checkpoint import read_manifest
from headway.compat.xaytune import CallbackManager, Trainer, TrainerConfig
from headway.dist.group import current_context
from headway.errors import ConfigError
from headway.testing import run_ranks

Run = dict[str, Any]


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.second(self.norm(self.first(x)).relu()).squeeze(-1) - y).square().mean()


def make_loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    samples = [
        {"x": torch.randn(4, generator=generator), "y": torch.randn((), generator=generator)}
        for _ in range(22)
    ]
    return DataLoader(samples, batch_size=4, shuffle=True)  # type: ignore[arg-type]


def train(
    folder: Path, strategy: str, *, accumulation: int, own: bool = False, stops: bool = False
) -> Run:
    """Two epochs of three steps, each over eight samples on all ranks together."""
    callbacks, heard = CallbackManager(), Run(losses=[], group=[], evals=[])

    @callbacks.on("step_end")
    def on_step_end(state: Any) -> None:
        heard["losses"].append(float(state.metrics["loss"]))
        if stops and state.global_step == 2 and os.environ.get("RANK", "0") == "0":
            state.stop_training()

    @callbacks.on("eval_end")
    def on_eval_end(state: Any) -> None:
        heard["evals"].append(state.metrics["eval_loss"])

    for event in ("checkpoint_saved", "train_end"):

        @callbacks.on(event)
        def on_late_event(state: Any) -> None:
            heard["group"].append(current_context() is not None)

    config = TrainerConfig(
        strategy=strategy,
        output_dir=str(folder),
        num_epochs=2,
        learning_rate=1e-2,
        gradient_accumulation=accumulation,
        scheduler="linear",
        mixed_precision="fp32",
    )
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9) if own else None
    state = Trainer(config, callbacks).train(
        model=model,
        train_dataloader=make_loader(),
        eval_dataloader=make_loader(),
        optimizer=optimizer,
    )
    saved = read_manifest(str(state.last_checkpoint))
    heard |= {
        "step": state.global_step,
        "saved": (saved.step, saved.topology["strategy"], saved.topology["world_size"]),
        "left": current_context() is None and not torch.distributed.is_initialized(),
    }
    return heard


def train_on_ranks(folder: Path) -> dict[str, Run]:
    with pytest.raises(ConfigError, match="runs on one device, but this process is one of 2"):
        train(folder, "none", accumulation=1)
    return {
        "ddp": train(folder / "ddp", "auto", accumulation=1),
        "fsdp2": train(folder / "fsdp", "fsdp", accumulation=1),
        "fsdp2 own": train(folder / "own", "fsdp", accumulation=1, own=True),
        "ddp stopped": train(folder / "stopped", "ddp", accumulation=1, stops=True),
    }


def test_two_ranks_give_the_losses_of_one(tmp_path: Path) -> None:
    alone = {
        own: train(tmp_path / f"alone-{own}", "auto", accumulation=2, own=own)
        for own in (False, True)
    }
    assert alone[False]["saved"] == (6, "single", 1) and alone[False]["left"]
    for found in run_ranks(train_on_ranks, 2, tmp_path, backend=None, timeout_s=100):
        for name, run in found.items():
            expected = alone[name.endswith("own")]
            num_steps = 2 if name.endswith("stopped") else 6
            assert run["losses"] == pytest.approx(expected["losses"][:num_steps], abs=1e-5), name
            assert run["step"] == num_steps, name
            assert run["saved"] == (num_steps, name.split()[0], 2), name
            # The ranks part, but not before the last checkpoint and the last event.
            assert run["group"] == [True, True] and run["left"], name
            if num_steps == 6:
                assert run["evals"] == pytest.approx(expected["evals"], abs=1e-5), name
