"""Evaluators on several ranks: the figures of one process, whatever the strategy and the number."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import (
    AccelTrainer,
    DDPTrainer,
    FSDP2Trainer,
    PipelineTrainer,
    Trainer,
    TrainingArguments,
)
from headway.args import (
    AccelTrainingArguments,
    FSDP2TrainingArguments,
    PipelineTrainingArguments,
)
from headway.callbacks import (
    DownstreamEvaluatorCallbackConfig,
    Evaluator,
    EvaluatorCallback,
    LMEvaluatorCallbackConfig,
)
from headway.callbacks.evaluate.tasks import suite_tasks
from headway.data.tokenizer import ByteTokenizer
from headway.data.tokens import TokenFileWriter
from headway.dist import init_distributed
from headway.testing import run_ranks, tiny_dataset, tiny_decoder


def write_data(folder: Path) -> None:
    tokenizer = ByteTokenizer()
    for label, count in (("long", 13), ("short", 1)):
        with TokenFileWriter(folder / f"{label}.hwt", tokenizer=tokenizer) as writer:
            for n in range(count):
                writer.add_document(tokenizer.encode(f"{n} {label} words of text. " * 3, True))
    lines = suite_tasks()["everyday"].read_text(encoding="utf-8").splitlines()
    (folder / "task.jsonl").write_text("\n".join(lines[:7]), encoding="utf-8")


class Fails(Evaluator):
    """Fails on one rank only, in the middle or at the end; with `strange` ids in the forward."""

    def __init__(self, rank: int, at: int, strange: bool = False) -> None:
        ids = torch.arange(8).reshape(1, 8)
        batches = [{"input_ids": ids, "labels": ids}] * 5
        if strange:  # the second batch is the first of the second rank
            batches[1] = {"input_ids": ids + 10**6, "labels": ids}
        super().__init__("fails", batches)
        self.rank, self.at, self.count = rank, at, 0

    def reset_metrics(self) -> None:
        self.count = 0

    def update_metrics(self, batch: Any, scores: Any) -> None:
        self.count += 1
        if self.rank == 1 and self.count == self.at:
            raise KeyError("lost")

    def compute_metrics(self, join: Any) -> dict[str, float]:
        return {"batches": float(join(torch.tensor(float(self.count))))}


def configs(folder: str, **more: Any) -> dict[str, Any]:
    cadence = {"eval_interval": 1, **more}
    files = {label: f"{folder}/{label}.hwt" for label in ("long", "short")}
    return {
        "lm": LMEvaluatorCallbackConfig(files, sequence_length=16, batch_size=3, **cadence),
        "part": LMEvaluatorCallbackConfig(
            files, sequence_length=16, batch_size=3, name="part", **cadence,
            eval_duration="7 steps",
        ),
        "tasks": DownstreamEvaluatorCallbackConfig(
            [f"{folder}/task.jsonl"], batch_tokens=400, **cadence
        ),
    }  # fmt: skip


def train(folder: str, name: str, make: Any, callbacks: Any) -> dict[str, Any]:
    settings = {
        "output_dir": f"{folder}/{name}", "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2, "max_steps": 1,
        "save_strategy": "no", "seed": 0, "use_cpu": True, "learning_rate": 0.0,
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    trainer = make(
        settings,
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(8, sequence_length=8),
        processing_class=ByteTokenizer(),
        callbacks=callbacks,
        default_callbacks=False,
    )
    try:
        trainer.train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    history = trainer.state.log_history
    return {k: v for record in history for k, v in record.items() if k.startswith("eval/")}


def single(settings: Any, **given: Any) -> Any:
    return Trainer(args=TrainingArguments(**settings), **given)


def ddp(settings: Any, **given: Any) -> Any:
    return DDPTrainer(args=settings, **given)


def fsdp2(settings: Any, **given: Any) -> Any:
    return FSDP2Trainer(args=FSDP2TrainingArguments(**settings), **given)


def pipeline(settings: Any, **given: Any) -> Any:
    more = {"pipe_schedule": "GPipe", "n_microbatches": 2}
    return PipelineTrainer(args=PipelineTrainingArguments(**settings, **more), **given)


def pipelines(settings: Any, **given: Any) -> Any:
    more = {"pipe_schedule": "GPipe", "n_microbatches": 2, "pipeline_size": 2}
    return PipelineTrainer(args=PipelineTrainingArguments(**settings, **more), **given)


def accelerated(settings: Any, **given: Any) -> Any:
    from accelerate import Accelerator

    return AccelTrainer(
        args=AccelTrainingArguments(**settings), accelerator=Accelerator(cpu=True), **given
    )


MAKERS = {
    "accelerate": accelerated,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "pipeline": pipeline,
    "pipelines": pipelines,
}


class Figures(Evaluator):
    """Fails on one rank while it computes: `before` its join, `after` it, or joins `alone`."""

    def __init__(self, name: str, rank: int, fails: str = "never") -> None:
        ids = torch.zeros(1, 8, dtype=torch.long)
        super().__init__(name, [{"input_ids": ids, "labels": ids}] * 3)
        self.fails = fails if rank else "never"

    def reset_metrics(self) -> None:
        self.num_batches = 0

    def update_metrics(self, batch: Any, scores: Any) -> None:
        self.num_batches += 1

    def compute_metrics(self, join: Any) -> dict[str, float]:
        if self.fails == "before":
            raise ValueError("no figures")
        total = float(join(torch.tensor(float(self.num_batches))))
        if self.fails == "after":
            raise ValueError("no figures")
        if self.fails == "alone":
            join(torch.ones(()))
        return {"batches": total}


def compute_on_rank(folder: str) -> dict[str, Any]:
    rank = init_distributed(use_cpu=True).rank
    found = {}
    for fails in ("before", "after", "alone"):
        evaluators = [Figures("some", rank, fails), Figures("rest", rank)]
        callbacks = [EvaluatorCallback(evaluators, 1, evaluator_errors="skip")]
        found[fails] = train(folder, fails, ddp, callbacks)
    return found


def test_figures_that_fail_on_one_rank_are_left_out_on_all(tmp_path: Path) -> None:
    for found in run_ranks(compute_on_rank, 2, str(tmp_path), timeout_s=60):
        assert found["before"] == found["after"] == {"eval/rest/batches": 3.0}
        assert "evaluator 'some'" in found["alone"]["error"]
        assert "same joins" in found["alone"]["error"]


def on_rank(folder: str, names: list[str], fails: bool) -> dict[str, Any]:
    rank = init_distributed(use_cpu=True).rank
    found = {name: train(folder, name, MAKERS[name], configs(folder)) for name in names}
    if fails:
        for at in (1, 2):
            callbacks = [EvaluatorCallback([Fails(rank, at)], 1, evaluator_errors="skip")]
            found[f"skips {at}"] = train(folder, "skips", fsdp2, callbacks)
        callbacks = [EvaluatorCallback([Fails(rank, 9, True)], 1, evaluator_errors="skip")]
        found["skips a forward"] = train(folder, "forward", ddp, callbacks)
        found["raises"] = train(folder, "raises", ddp, [EvaluatorCallback([Fails(rank, 2)], 1)])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("evaluated")
    write_data(place)
    return place


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, float]:
    found = train(str(folder), "single", single, configs(str(folder)))
    # The part is too short to see both labels.
    assert len(found) == 2 * 6 + 4 and sum(map(math.isnan, found.values())) == 3
    return found


def test_two_ranks_give_the_figures_of_one(folder: Path, alone: dict[str, float]) -> None:
    ranks = run_ranks(on_rank, 2, str(folder), ["ddp", "fsdp2", "pipeline"], True, timeout_s=60)
    for found in ranks:
        for name in ("ddp", "fsdp2", "pipeline"):
            assert found[name] == pytest.approx(alone, rel=1e-6, nan_ok=True), name
        # One failed; both have left it out, or both say which and why.
        assert found["skips 1"] == found["skips 2"] == found["skips a forward"] == {}
        assert "evaluator 'fails' failed" in found["raises"]["error"]
        assert "rank 1" in found["raises"]["error"] and "lost" in found["raises"]["error"]
    assert json.dumps(ranks[0]) == json.dumps(ranks[1])


def test_four_ranks_too(folder: Path, alone: dict[str, float]) -> None:
    ranks = run_ranks(on_rank, 4, str(folder), ["ddp", "pipelines"], False, timeout_s=60)
    for found in ranks:
        for name in ("ddp", "pipelines"):
            assert found[name] == pytest.approx(alone, rel=1e-6, nan_ok=True), name


@pytest.mark.slow
def test_an_accelerator_too(folder: Path, alone: dict[str, float]) -> None:
    for found in run_ranks(on_rank, 2, str(folder), ["accelerate"], False, timeout_s=100):
        assert found["accelerate"] == pytest.approx(alone, rel=1e-6, nan_ok=True)
