"""Samples of text on two ranks: shares of copies, slices and stages together, failures alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway import DDPTrainer, FSDP2Trainer, PipelineTrainer
from headway.args import FSDP2TrainingArguments, PipelineTrainingArguments
from headway.callbacks import TextgenCallback
from headway.data.tokenizer import ByteTokenizer
from headway.dist import init_distributed
from headway.testing import run_ranks, tiny_dataset, tiny_decoder

PROMPTS = ["the boat", "a", "the tide finds the harbour"]


class Counted(TextgenCallback):
    """Knows for which prompts this rank drew; rank 1 may fail at it."""

    fails_on: int | None = None
    drew: list[int]

    def _continue(self, strategy: Any, batch: Any, limit: Any) -> list[str]:
        self.drew.append(batch.first)
        texts = super()._continue(strategy, batch, limit)
        if self.fails_on == self.rank:  # after what ranks do together, as a decoder might
            raise RuntimeError("out of ink")
        return texts

    @property
    def callback_name(self) -> str:
        return "TextgenCallback"


def sample(folder: str) -> dict[str, Any]:
    rank = init_distributed(use_cpu=True).rank
    facts: dict[str, Any] = {}

    def run(name: str, make: Any, fails_on: int | None = None, writes: bool = True) -> Any:
        mine = Counted(
            None, PROMPTS, {"do_sample": False}, max_new_tokens=5, batch_size=2, console=False
        )
        mine.rank, mine.drew, mine.fails_on = rank, [], fails_on
        if not writes:
            mine.writer.open = _refuse
        settings = {
            "output_dir": f"{folder}/{name}", "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2, "max_steps": 2, "eval_strategy": "steps",
            "eval_steps": 1, "save_strategy": "no", "seed": 0, "use_cpu": True,
        }  # fmt: skip
        trainer = make(
            settings,
            model_init=tiny_decoder,
            train_dataset=tiny_dataset(16, sequence_length=8),
            eval_dataset=tiny_dataset(4, sequence_length=8, seed=1),
            processing_class=ByteTokenizer(),
            callbacks=[] if name.startswith("plain") else [mine],
            default_callbacks=False,
        )
        step = trainer.train().global_step
        facts[name] = {
            "step": step, "disabled": trainer.bus.disabled, "drew": mine.drew,
            "sum": sum(float(_local(p).double().sum()) for p in trainer.model.parameters()),
        }  # fmt: skip

    def ddp(settings: Any, **given: Any) -> Any:
        return DDPTrainer(args=settings, **given)

    def fsdp2(settings: Any, **given: Any) -> Any:
        return FSDP2Trainer(args=FSDP2TrainingArguments(**settings), **given)

    def pipeline(settings: Any, **given: Any) -> Any:
        more = {"pipe_schedule": "GPipe", "n_microbatches": 2}
        return PipelineTrainer(args=PipelineTrainingArguments(**settings, **more), **given)

    for name, make in (("ddp", ddp), ("fsdp2", fsdp2), ("pipeline", pipeline)):
        run(name, make)
    run("plain-fsdp2", fsdp2)
    run("plain-pipeline", pipeline)
    run("failing-ddp", ddp, fails_on=1)
    run("failing-fsdp2", fsdp2, fails_on=1)
    run("readonly", pipeline, writes=False)
    return facts


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise OSError(30, "Read-only file system")


def _local(parameter: Any) -> Any:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("sampled")
    return folder, run_ranks(sample, 2, str(folder), timeout_s=60)


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / name / "eval_text.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "pipeline"])
def test_samples_of_each_strategy_are_written_once(sampled: Any, name: str) -> None:
    folder, ranks = sampled
    records = read(folder, name)
    assert [record["global_step"] for record in records] == [1, 2]
    assert all([s["prompt"] for s in record["samples"]] == PROMPTS for record in records)
    assert not any(rank[name]["disabled"] for rank in ranks)


def test_strategies_agree_on_what_the_model_writes(sampled: Any) -> None:
    texts = [read(sampled[0], name)[0]["samples"] for name in ("ddp", "fsdp2")]
    assert texts[0] == texts[1]


def test_copies_share_the_prompts_and_parts_work_together(sampled: Any) -> None:
    zero, one = sampled[1]
    assert (zero["ddp"]["drew"], one["ddp"]["drew"]) == ([0, 0], [2, 2])
    for name in ("fsdp2", "pipeline"):
        assert zero[name]["drew"] == one[name]["drew"] == [0, 2, 0, 2]


@pytest.mark.parametrize("name", ["fsdp2", "pipeline"])
def test_training_is_the_same_with_and_without(sampled: Any, name: str) -> None:
    for rank in sampled[1]:
        assert rank[name]["sum"] == rank[f"plain-{name}"]["sum"]


@pytest.mark.parametrize("name", ["failing-ddp", "failing-fsdp2"])
def test_a_failure_of_one_rank_disables_the_callback_on_all(sampled: Any, name: str) -> None:
    for rank in sampled[1]:
        assert rank[name]["step"] == 2
        (why,) = rank[name]["disabled"].values()
        assert "rank 1" in why and "out of ink" in why


def test_a_file_that_cannot_be_written_disables_it_on_all(sampled: Any) -> None:
    for rank in sampled[1]:
        assert rank["readonly"]["step"] == 2
        (why,) = rank["readonly"]["disabled"].values()
        assert "rank 0" in why and "Read-only" in why
