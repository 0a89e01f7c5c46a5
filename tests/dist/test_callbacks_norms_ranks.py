"""Norms and statistics on two ranks: the numbers of one process, whoever holds what."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist

from headway.callbacks import (
    GAPMonitorCallback,
    GradNormLogger,
    ParameterNormLogger,
    WeightNormLogger,
)
from headway.callbacks.watch.sharing import SharedFailure, on_all_ranks
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError
from headway.testing import run_ranks, tiny_dataset, tiny_decoder
from headway.trainers.parallel import DDPTrainer, FSDP2Trainer, PipelineTrainer
from headway.trainers.trainer import Trainer

# A number of rows that two ranks cannot share evenly, and a weight that two stages share.
make = partial(tiny_decoder, num_layers=4, vocab_size=259, tie_embeddings=True)

SHARES: dict[str, dict[str, Any]] = {
    "single": {"per_device_train_batch_size": 4},
    "ddp": {"per_device_train_batch_size": 2},
    "fsdp2": {"per_device_train_batch_size": 2},
    "pipeline": {
        "per_device_train_batch_size": 4,
        "pipe_schedule": "Interleaved1F1B",
        "n_microbatches": 2,
    },
}
TRAINERS: dict[str, type[Trainer]] = {
    "single": Trainer,
    "ddp": DDPTrainer,
    "fsdp2": FSDP2Trainer,
    "pipeline": PipelineTrainer,
}


class Sink(TrainerCallback):
    """Every metric of every step."""

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics[step] = {n: v for n, v in metrics.items() if n.startswith("gap/")}


def observers() -> list[Any]:
    return [
        GradNormLogger(),
        ParameterNormLogger(power_iter_steps=30),
        WeightNormLogger(),
        GAPMonitorCallback(
            interval=2,
            dump_gradients=True,
            dump_gradients_start_step=2,
            dump_gradients_end_step=2,
        ),
    ]


def train(kind: str, folder: Path, callbacks: list[Any], **arguments: Any) -> Trainer:
    trainer = TRAINERS[kind](
        args={
            "output_dir": str(folder / "out"),
            "per_device_eval_batch_size": 4,
            "logging_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "max_steps": 4,
            "save_strategy": "no",
            "seed": 0,
            "use_cpu": True,
            "learning_rate": 1e-2,
            "max_grad_norm": 0.1,
            **SHARES[kind],
            **arguments,
        },
        model_init=make,
        train_dataset=tiny_dataset(16, sequence_length=8, vocab_size=259),
        eval_dataset=tiny_dataset(4, sequence_length=8, seed=1, vocab_size=259),
        callbacks=callbacks,
        default_callbacks=False,
    )
    trainer.train()
    return trainer


def observe(kind: str, folder: Path) -> dict[str, Any]:
    sink = Sink()
    trainer = train(kind, folder, [*observers(), sink])
    logged = [r.get("weight_norm") for r in trainer.state.log_history if "eval_loss" not in r]
    return {"weights": logged, "gap": sink.metrics}


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / name).read_text().splitlines()]


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("rank 1 has no luck")


def observe_with_bad_luck(kind: str, folder: Path) -> list[str]:
    """One rank fails in each observer: which of them are still heard at the end?"""
    if dist.get_rank() == 1:
        from headway.callbacks.watch import gap_monitor, grad_norm_logger, spectral

        grad_norm_logger._measure = fail
        spectral._Iteration._multiply = fail  # type: ignore[method-assign]
        gap_monitor.look_at_elements = fail
    logging.disable(logging.CRITICAL)
    callbacks = [
        GradNormLogger(log_steps=1),
        ParameterNormLogger(log_steps=1),
        GAPMonitorCallback(),
    ]
    trainer = train(kind, folder, callbacks)
    assert trainer.state.global_step == 4
    logging.disable(logging.NOTSET)
    return sorted(p.name for p in (folder / "out").glob("*norms*"))


def share_failures() -> list[str]:
    rank, told = dist.get_rank(), []
    assert on_all_ranks(lambda: {"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    for error in (RuntimeError("broken"), ConfigError("option: 3 given")):
        try:
            on_all_ranks(lambda error=error: _raise_on(1, error))
        except (SharedFailure, ConfigError) as caught:
            told.append(f"{isinstance(caught, ConfigError)} {caught}")
    try:
        on_all_ranks(lambda: {1, 2} if rank == 1 else None)
    except SharedFailure as caught:
        told.append(str(caught)[:17])
    return told


def _raise_on(rank: int, error: Exception) -> None:
    if dist.get_rank() == rank:
        raise error


def on_ranks(kind: str, folder: Path) -> dict[str, Any]:
    found = observe(kind, folder / "good")
    if kind != "ddp":  # rank 0 asks nobody there
        found["after failures"] = observe_with_bad_luck(kind, folder / "bad")
    else:
        found["told"] = share_failures()
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, observe("single", folder)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "pipeline"])
def test_two_ranks_see_what_one_process_sees(
    kind: str, alone: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    reference, single = alone
    first, second = run_ranks(on_ranks, 2, kind, tmp_path, timeout_s=120)
    folder = tmp_path / "good"

    for name in ("gradient_norms.jsonl", "parameter_norms.jsonl"):
        wanted, found = read(reference, name), read(folder, name)
        assert [record["global_step"] for record in found] == [2, 4]
        for one, other in zip(wanted, found, strict=True):
            for key in ("grad_norms", "norms", "spectral_norms"):
                assert list(one.get(key, ())) == list(other.get(key, ()))
                assert other.get(key, {}) == pytest.approx(one.get(key, {}), rel=1e-3)
            totals = [key for key in ("grad_norm", "clip_factor") if key in one]
            assert [other[k] for k in totals] == pytest.approx([one[k] for k in totals], rel=1e-3)
    assert len(read(folder, "parameter_norms.jsonl")[0]["norms"]) == 38  # the tied weight once

    assert first["weights"] == pytest.approx(single["weights"], rel=1e-5)
    assert second["gap"][2] == {}
    check_statistics(kind, single["gap"], first["gap"])
    check_dumps(reference, folder)
    if kind == "ddp":
        assert (
            first["told"]
            == second["told"]
            == [
                "False rank 1: RuntimeError: broken",
                "True option: 3 given",
                "rank 1: TypeError",
            ]
        )
    else:
        assert first["after failures"] == []


def check_statistics(
    kind: str, wanted: dict[int, dict[str, float]], found: dict[int, dict[str, float]]
) -> None:
    for step in (2, 4):
        one, other = wanted[step], found[step]
        if kind == "pipeline":  # nobody calls the whole model
            one = {n: v for n, v in one.items() if n.split("/")[2] != "model"}
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=5e-3, abs=2e-5), name
    assert not found[1] and not found[3]


def check_dumps(reference: Path, folder: Path) -> None:
    place = Path("out", "gradients", "step2", "full_gradients")
    names = sorted(file.name for file in (reference / place).iterdir())
    assert names == sorted(file.name for file in (folder / place).iterdir())
    for name in names:
        one, other = (load_file(root / place / name)["gradient"] for root in (reference, folder))
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-6)
