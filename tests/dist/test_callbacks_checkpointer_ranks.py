"""Checkpointer and converter on two ranks: one decision, folders of every strategy, one failure."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import DDPTrainer, FSDP2Trainer, PipelineTrainer, TrainerCallback
from headway.args import FSDP2TrainingArguments, PipelineTrainingArguments
from headway.callbacks import CheckpointerCallback, HFConverterCallback
from headway.callbacks.save import hf_converter
from headway.checkpoint import CheckpointManager
from headway.checkpoint.weights import open_weights
from headway.dist import init_distributed
from headway.testing import run_ranks, tiny_dataset, tiny_decoder


class Ask(TrainerCallback):
    """One rank alone asks for more than the others."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_step_end(self, state: Any, control: Any) -> None:
        if self.rank == 1 and state.global_step == 3:
            control.request_save("permanent")


def ddp(settings: Any, **given: Any) -> Any:
    return DDPTrainer(args=settings, **given)


def fsdp2(settings: Any, **given: Any) -> Any:
    return FSDP2Trainer(args=FSDP2TrainingArguments(**settings), **given)


def pipeline(settings: Any, **given: Any) -> Any:
    more = {"pipe_schedule": "GPipe", "n_microbatches": 2}
    return PipelineTrainer(args=PipelineTrainingArguments(**settings, **more), **given)


MAKERS = {"ddp": ddp, "fsdp2": fsdp2, "pipeline": pipeline}


def train(folder: str, name: str, callbacks: list[Any], max_steps: int = 5) -> None:
    settings = {
        "output_dir": f"{folder}/{name}",
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": max_steps,
        "seed": 0,
        "use_cpu": True,
    }
    MAKERS[name](
        settings,
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(32, sequence_length=8),
        callbacks=callbacks,
        default_callbacks=False,
    ).train()


def on_rank(folder: str) -> dict[str, Any]:
    rank = init_distributed(use_cpu=True).rank
    for name in MAKERS:
        saving = CheckpointerCallback(2, 1, max_checkpoints=1, pre_train_checkpoint=True)
        converter = HFConverterCallback(dtype="float32", checkpoints="permanent")
        train(folder, name, [saving, converter, Ask(rank)])
    words = []

    def fail_late(*_: Any, **__: Any) -> Path:
        time.sleep(0.5)  # longer than ranks wait for one word
        raise OSError("no space left")

    make_folder, hf_converter.make_folder = hf_converter.make_folder, fail_late
    callback = HFConverterCallback(output_folder=f"{folder}/late")
    on_train_end = callback.on_train_end

    def count_words(state: Any, trainer: Any) -> None:
        ranks = trainer._ranks()
        share = ranks.share
        ranks.share = lambda value: words.append(1) or share(value)
        on_train_end(state, trainer)

    callback.on_train_end = count_words  # type: ignore[method-assign]
    try:
        train(f"{folder}/failing", "fsdp2", [CheckpointerCallback(), callback], 1)
        told = "nothing"
    except RuntimeError as error:
        told = str(error)
    finally:
        hf_converter.make_folder = make_folder
    return {"told": told, "num_words": len(words)}


@pytest.fixture(scope="module")
def lived(tmp_path_factory: Any) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_ranks(on_rank, 2, str(folder), timeout_s=240)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MAKERS)
def test_what_one_rank_asks_for_all_of_them_save(name: str, lived: Any) -> None:
    found = [
        (c.step, next(iter(c.manifest.metadata), "regular"))
        for c in CheckpointManager(lived[0] / name).list()
        if c.kind == "training"
    ]
    permanent = [(step, "permanent") for step in (0, 3)]
    assert found == [*permanent, (4, "regular"), (5, "permanent")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MAKERS)
def test_folders_of_every_strategy_are_whole(name: str, lived: Any) -> None:
    place = lived[0] / name
    folders = sorted(path.name for path in place.glob("*-hf"))
    assert folders == ["checkpoint-0-hf", "checkpoint-3-hf", "checkpoint-5-hf"]
    made = open_weights(place / folders[-1]).read()
    stored = open_weights(place / "checkpoint-5").read()
    assert set(made) == set(stored) and len(made) > 10
    for key, value in stored.items():
        assert torch.equal(made[key], value)


@pytest.mark.timeout(300)
def test_what_fails_on_the_first_rank_fails_on_all_and_none_waits_for_one_word(lived: Any) -> None:
    for facts in lived[1]:
        assert "checkpoint-1: OSError: no space left" in facts["told"]
        assert facts["num_words"] > 1
