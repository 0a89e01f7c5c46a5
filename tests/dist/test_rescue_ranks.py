"""Saves after an error on several ranks: all of them save, or none does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import (
    DDPTrainer,
    DDPTrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    TrainerCallback,
)
from headway.dist import init_distributed
from headway.dist.failure import PeerFailure
from headway.engine.delivery import NonFiniteError
from headway.testing import run_ranks, tiny_dataset, tiny_decoder


class Damage(TrainerCallback):
    """After the second step: the gradients to come, or the weights of one rank's own layers."""

    def __init__(self, rank: int, *, weights: bool) -> None:
        self._rank, self._weights = rank, weights

    def on_window(self, state: Any, window: Any) -> None:
        if state.global_step == 2 and not self._weights:
            self._model.apply(_no_number_forward)

    def on_train_begin(self, model: torch.nn.Module) -> None:
        self._model = model

    def on_step_end(self, state: Any) -> None:
        if state.global_step == 2 and self._weights and self._rank == 1:
            with torch.no_grad():
                next(self._model.parameters()).fill_(float("nan"))


def _no_number_forward(module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.Linear):
        module.register_forward_hook(lambda module, args, out: out * float("nan"))


def fail(folder: str, weights: bool) -> str:
    rank = init_distributed(use_cpu=True).rank
    args = PipelineTrainingArguments(
        output_dir=folder, max_steps=5, use_cpu=True, save_strategy="no", seed=0, logging_steps=1,
        per_device_train_batch_size=4, per_device_eval_batch_size=4, save_on_error=True,
        nonfinite_action="raise",
    )  # fmt: skip
    trainer = PipelineTrainer(
        args=args,
        model_init=partial(tiny_decoder, num_layers=4),
        train_dataset=tiny_dataset(64),
        callbacks=[Damage(rank, weights=weights)],
        default_callbacks=False,
    )
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    return str(caught.value)


@pytest.mark.parametrize("weights", [True, False])
def test_weights_of_one_rank_that_are_no_numbers_are_saved_by_none(
    weights: bool, tmp_path: Path
) -> None:
    told = run_ranks(fail, 2, str(tmp_path), weights, backend=None)
    assert told[0] == told[1]
    kept = [path.name for path in tmp_path.glob("checkpoint-*")]
    assert kept == ([] if weights else ["checkpoint-3"])


def evaluate_badly(folder: str, wrong: bool) -> str:
    rank = init_distributed(use_cpu=True).rank
    args = DDPTrainingArguments(
        output_dir=folder, max_steps=4, use_cpu=True, save_steps=2, seed=0, logging_steps=1,
        per_device_train_batch_size=4, per_device_eval_batch_size=4, eval_strategy="steps",
        eval_steps=4,
    )  # fmt: skip

    def measure(pair: Any) -> dict[str, float]:
        assert rank == 0, "one rank measures, for all"
        return {"share": 1.0 / (not wrong)}

    trainer = DDPTrainer(
        args=args,
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(64),
        eval_dataset=tiny_dataset(8),
        compute_metrics=measure,
        default_callbacks=False,
    )
    if not wrong:
        trainer.train()
        return str([r["eval_share"] for r in trainer.state.log_history if "eval_share" in r])
    with pytest.raises(ZeroDivisionError if rank == 0 else PeerFailure) as caught:
        trainer.train()
    return str(caught.value)


def test_a_metric_of_the_users_that_fails_does_not_cost_the_save(tmp_path: Path) -> None:
    told = run_ranks(evaluate_badly, 2, str(tmp_path), True, backend=None)
    assert "division by zero" in told[0]
    assert "rank 0 of 2 failed" in told[1] and "division by zero" in told[1]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    told = run_ranks(evaluate_badly, 2, str(tmp_path), False, backend=None)
    assert told == ["[1.0]", "[1.0]"], "the next start evaluates the end"
