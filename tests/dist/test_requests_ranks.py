"""Requests about a run of several ranks: one end for all of them, one order of what they do."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

from headway import TrainerCallback
from headway.args import DDPTrainingArguments
from headway.dist import agreement, init_distributed
from headway.engine import loop as engine_loop
from headway.testing import run_ranks, tiny_dataset, tiny_decoder
from headway.trainers.parallel import DDPTrainer


class Cancel(TrainerCallback):
    """Cancels on some ranks, from a thread of theirs, in the middle of a step."""

    def __init__(self, reasons: dict[int, str], **options: Any) -> None:
        self.reasons, self.options = reasons, options

    def on_gradients(self, state: Any, trainer: Any) -> None:
        reason = self.reasons.get(trainer.env.rank)
        if state.global_step == 2 and reason is not None:
            caller = threading.Thread(
                target=trainer.cancel_run, args=(reason,), kwargs=self.options
            )
            caller.start()
            caller.join()


class Gather(TrainerCallback):
    """An operation that all ranks do together, begun at every step; rank 1 is slow in it."""

    def __init__(self) -> None:
        self.came: list[tuple[int, list[int]]] = []

    def on_step_end(self, state: Any, trainer: Any) -> None:
        def work(step: int) -> list[int]:
            if trainer.env.rank == 1:
                threading.Event().wait(0.02)
            return list(trainer.bookkeeping_channel.exchange(step))

        trainer.run_bookkeeping_op(
            work,
            state.global_step,
            cb=lambda got: self.came.append((state.global_step, got)),
            distributed=True,
        )


def train(folder: Path, callbacks: list[Any]) -> DDPTrainer:
    trainer = DDPTrainer(
        args=DDPTrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            use_cpu=True,
            seed=0,
            max_steps=6,
            logging_strategy="no",
            save_strategy="steps",
            save_steps=100,
        ),
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(64, sequence_length=8),
        callbacks=callbacks,
        default_callbacks=False,
    )
    trainer.train()
    return trainer


def describe(trainer: DDPTrainer) -> list[Any]:
    state = trainer.state
    return [state.global_step, state.outcome, state.cancel_reason, state.cancel_step]


def run_requests(folder: Path) -> None:
    init_distributed(use_cpu=True)
    talks = []
    exchange = agreement.exchange

    def count(value: Any, *rest: Any) -> list[Any]:
        talks.append(value)
        return exchange(value, *rest)

    engine_loop.exchange = count  # type: ignore[attr-defined]
    found: dict[str, Any] = {
        "second": describe(train(folder / "a", [Cancel({1: "the disk is full"})])),
        "both": describe(train(folder / "b", [Cancel({0: "first", 1: "second"}, no_sync=True)])),
    }
    found["talks"] = len(talks)
    gather = Gather()
    found["gather"] = describe(train(folder / "c", [gather]))
    found["came"] = gather.came
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))


@pytest.mark.timeout(100)
def test_all_ranks_end_after_one_step_for_one_reason(tmp_path: Path) -> None:
    run_ranks(run_requests, 2, tmp_path, timeout_s=90)
    found, other = (json.loads((tmp_path / f"found-{n}.json").read_text()) for n in (0, 1))
    assert found == other
    assert found["second"] == [3, "canceled", "the disk is full", 3]
    assert found["both"] == [3, "canceled", "first", 3]
    # Only then do the ranks say more to each other than at every step.
    assert found["talks"] == 2
    for run in ("a", "b"):
        assert [path.name for path in (tmp_path / run).glob("checkpoint-*")] == ["checkpoint-3"]
    # Each operation once and in order; taken at the same steps, as both lists are equal.
    assert found["gather"][:2] == [6, "completed"]
    assert [got for _, got in found["came"]] == [[step, step] for step in range(1, 7)]
