"""What an evaluator's figures decide: the best checkpoint, and when it is enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluated import Counter, trainer_with

from headway import TrainerCallback
from headway.callbacks import EarlyStoppingCallback, EMACallback, EvaluatorCallback


def test_a_figure_decides_which_checkpoint_is_the_best(tmp_path: Path) -> None:
    class Falls(Counter):
        values = iter([3.0, 1.0, 2.0])

        def compute_metrics(self, join: Any) -> dict[str, float]:
            return {"score": next(self.values)}

    evaluator = Falls()
    trainer = trainer_with(
        tmp_path,
        EvaluatorCallback([evaluator], eval_interval=None),
        max_steps=6,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="eval/counter/score",
        greater_is_better=False,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric == 1.0 and trainer.state.best_global_step == 4
    assert str(trainer.state.best_model_checkpoint).endswith("checkpoint-4")
    assert evaluator.passes == 3


@pytest.mark.parametrize("options", [{"evaluator_errors": "skip"}, {"time_budget_s": 1e-9}])
def test_a_pass_without_the_figure_is_no_better_and_no_mistake(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    class Fails(Counter):
        def update_metrics(self, batch: Any, scores: Any) -> None:
            raise KeyError("lost")

    stop = EarlyStoppingCallback(2)
    trainer = trainer_with(
        tmp_path,
        EvaluatorCallback([Fails()], eval_interval=None, **options),
        stop,
        max_steps=9,
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval/counter/batches",
        greater_is_better=True,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 2 and trainer.state.best_metric is None
    assert stop.early_stopping_patience_counter == 2


def test_with_the_runs_evaluations_the_average_is_measured_too(tmp_path: Path) -> None:
    class Weights(Counter):
        def compute_metrics(self, join: Any) -> dict[str, float]:
            return {"sum": float(next(trainer.model.parameters()).detach().double().sum())}

    sums = []
    for options in ({"eval_interval": 3}, {"eval_interval": None, "with_evaluation": True}):
        trainer = trainer_with(
            tmp_path,
            EMACallback(0.9, use_for_eval=True),
            EvaluatorCallback([Weights()], **options),
            max_steps=3, eval_strategy="steps", eval_steps=3,
        )  # fmt: skip
        trainer.train()
        name = "eval/counter/sum"
        sums.append([r[name] for r in trainer.state.log_history if name in r])
    in_training = float(next(trainer.model.parameters()).detach().double().sum())
    assert sums[0] == sums[1] != [in_training]


def test_early_stopping_hears_of_it_at_that_step(tmp_path: Path) -> None:
    class Stuck(Counter):
        def compute_metrics(self, join: Any) -> dict[str, float]:
            return {"score": 1.0}

    stop = EarlyStoppingCallback(2, metric="eval/counter/score", greater_is_better=True)
    trainer = trainer_with(tmp_path, EvaluatorCallback([Stuck()], 1), stop, max_steps=9)
    trainer.train()
    assert trainer.state.global_step == 3


def test_an_evaluation_of_other_data_under_another_prefix_is_not_joined(tmp_path: Path) -> None:
    class AlsoTrain(TrainerCallback):
        def on_step_end(self, trainer: Any) -> None:
            found.append(trainer.evaluate(trainer.train_dataset, metric_key_prefix="seen"))

    found: list[dict[str, float]] = []
    evaluator = Counter()
    trainer = trainer_with(
        tmp_path,
        EvaluatorCallback([evaluator], None, with_evaluation=True),
        AlsoTrain(),
        max_steps=2, eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    trainer.train()
    assert evaluator.passes == 1 and len(found) == 2
    assert not any(name.startswith("eval/") for metrics in found for name in metrics)
