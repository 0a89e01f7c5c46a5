"""Metrics of several ranks: joined, whatever each of them recorded, and never out of step."""

from __future__ import annotations

import json
import logging
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from headway import TrainerCallback
from headway.args import DDPTrainingArguments
from headway.dist import init_distributed
from headway.dist.agreement import CommonMistake
from headway.dist.channel import RankChannel
from headway.engine.flushing import Flusher
from headway.engine.metrics import MetricBuffer
from headway.testing import RankFailure, run_ranks, tiny_dataset, tiny_decoder
from headway.trainers.parallel import DDPTrainer

Flushed = list[tuple[int, dict[str, float]]]


class Ranks:
    """One rank's side of the checks below; all ranks go through them together."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.channel = RankChannel()

    def flusher(self, **limits: float) -> tuple[MetricBuffer, Flusher]:
        buffer = MetricBuffer()
        return buffer, Flusher(buffer, self.channel, **limits)

    def same_names(self) -> Flushed:
        buffer, flusher = self.flusher()
        for name, kind in (("sum", "sum"), ("mean", "mean"), ("max", "max"), ("norm", "l2_norm")):
            buffer.record(1, name, torch.tensor(3.0 + self.rank), kind)
        buffer.record(1, "own", float(self.rank))
        buffer.record(1, "count", 2**52 + self.rank, "sum")
        buffer.record(1, "broken", math.nan if self.rank else 1.0, "max")
        flusher.start()
        result = flusher.finish()
        flusher.close()
        return result

    def different_names(self) -> tuple[Flushed, Flushed]:
        """One way or the other, flush by flush; in the background and at once."""
        buffer, flusher = self.flusher()
        for step in (1, 2, 3):
            buffer.record(step, "ours", 1.0, "sum")
            if self.rank == 0 and step > 1:
                buffer.record(step, "first only", 4.0, "mean")
        buffer.record(2, "own", float(self.rank))
        flusher.start()
        apart = flusher.finish()
        buffer.record(4, "ours", 1.0, "sum")
        alike = flusher.flush()
        for step in (5, 6):  # one rank brings nothing at all
            if self.rank == 1:
                buffer.record(step, "second only", torch.tensor(2**53 - 1), "max")
        flusher.start()
        return apart + alike, flusher.finish()

    def learned_type(self) -> str:
        """A rank that starts to record a metric must do as the others did before it."""
        buffer, flusher = self.flusher()
        if self.rank == 0:
            buffer.record(1, "late", 1.0, "sum")
        flusher.flush()
        try:
            buffer.record(2, "late", 1.0, "max")
        except ValueError as error:
            return str(error)
        return ""

    def two_types(self, *kinds: str | None) -> list[str]:
        buffer, flusher = self.flusher()
        buffer.record(3, "peak", 1.0, kinds[self.rank])
        flusher.start()
        try:
            flusher.finish()
        except CommonMistake as error:
            return error.problems
        return []

    def out_of_step(self) -> str:
        _, flusher = self.flusher()
        flusher._number += self.rank
        try:
            flusher.flush()
        except RuntimeError as error:
            return str(error)
        return ""

    def missing_rank(self) -> str:
        """Rank 1 does not begin its flush before rank 0 has given up."""
        buffer, flusher = self.flusher(warn_after_s=0.3, limit_s=1.0)
        if self.rank == 1:
            dist.barrier()
            return ""
        buffer.record(1, "x", 1.0, "sum")
        flusher.start()
        try:
            flusher.finish()
        except RuntimeError as error:
            dist.barrier()
            return f"{error} / {error.failed_rank}"  # type: ignore[attr-defined]
        return "nobody was missed"


def check_ranks() -> dict[str, Any]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("headway.engine.flushing")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    ranks = Ranks()
    found: dict[str, Any] = {
        "same": ranks.same_names(),
        "different": ranks.different_names(),
        "told": list(told),
        "learned": ranks.learned_type(),
        "two types": ranks.two_types("max", "sum"),
        "one without": ranks.two_types("max", None),
        "out of step": ranks.out_of_step(),
        "threads": [t.name for t in threading.enumerate() if t.name == "headway-metrics"],
    }
    told.clear()
    return found | {"missing": ranks.missing_rank(), "warned": list(told)}


def test_metrics_of_ranks() -> None:
    first, second = run_ranks(check_ranks, 2, timeout_s=120)
    for rank, found in enumerate((first, second)):
        [(step, numbers)] = found["same"]
        assert step == 1 and math.isnan(numbers.pop("broken"))
        assert numbers == {
            "sum": 7.0,
            "mean": 3.5,
            "max": 4.0,
            "norm": 5.0,
            "own": rank,
            "count": 2**53 + 1 - 1,  # 2**53 + 1 is no double
        }
        steps, alone = found["different"]
        assert steps == [
            (1, {"ours": 2.0}),
            (2, {"own": rank, "first only": 4.0, "ours": 2.0}),
            (3, {"first only": 4.0, "ours": 2.0}),
            (4, {"ours": 2.0}),
        ]
        assert alone == [(5, {"second only": 2**53 - 1}), (6, {"second only": 2**53 - 1})]
        assert len(found["told"]) == 1 and "not every rank records the same" in found["told"][0]
        assert "'late' was recorded with reduce type sum and now with max" in found["learned"]
        assert found["two types"] == [
            "metric 'peak' has different reduce types on different ranks: "
            "max on rank 0, sum on rank 1"
        ]
        assert found["one without"] == [
            "metric 'peak' has different reduce types on different ranks: "
            "max on rank 0, none on rank 1"
        ]
        assert "different flushes, 1 to 2" in found["out of step"]
    assert first["missing"] == "metrics: waited for 1 s for rank 1 / 1"
    assert first["warned"] == ["metrics: waiting for 0.3 s for rank 1"]


class Watch(TrainerCallback):
    """Records what only some ranks know, and notes what comes back, and when."""

    def __init__(self, fail_at: int = -1) -> None:
        self.fail_at = fail_at
        self.came: list[tuple[int, int, dict[str, float]]] = []

    def on_step_end(self, state: Any, trainer: Any) -> None:
        if trainer.env.rank == 1:
            trainer.record_metric("rank 1", state.global_step, "sum")
        trainer.record_metric("both", 1.0, "sum")
        if state.global_step == self.fail_at and trainer.env.rank == 1:
            raise OSError("this rank's disk")

    def on_metrics(self, step: int, metrics: dict[str, float], state: Any) -> None:
        self.came.append((state.global_step, step, metrics))


def train(folder: Path, watch: Watch, **options: Any) -> DDPTrainer:
    init_distributed(use_cpu=True)
    trainer = DDPTrainer(
        args=DDPTrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            use_cpu=True,
            seed=0,
            **{"logging_strategy": "no", "save_strategy": "no", **options},
        ),
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(64, sequence_length=8),
        callbacks=[watch],
        default_callbacks=False,
    )
    trainer.train()
    return trainer


def run_training(folder: Path) -> None:
    watch = Watch()
    options = {"max_steps": 9, "metrics_collect_interval": 3}
    train(folder / "run", watch, save_strategy="steps", save_steps=8, **options)
    found: dict[str, Any] = {
        "came": [(at, step) for at, step, _ in watch.came],
        "rank 1": {step: m["rank 1"] for _, step, m in watch.came if "rank 1" in m},
        "loss": [m["train/CE loss"] for _, _, m in watch.came if "train/CE loss" in m],
        "names": [set(m) for _, step, m in watch.came if step == 8],
    }
    found["names"] = [sorted(names) for names in found["names"]]
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))
    try:
        train(folder / "failed", Watch(fail_at=5), **options)
    except OSError:
        # As long as this process lives the other waits in a collective, until its watch ends it.
        wait, dump = threading.Event().wait, folder / "failed" / "last_metrics-rank0.json"
        while not dump.exists():
            wait(0.05)
        raise


def test_ranks_deliver_at_the_same_steps_and_dump_what_is_pending(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):  # whichever process was gone first
        run_ranks(run_training, 2, tmp_path, timeout_s=100)
    first, second = (json.loads((tmp_path / f"found-{n}.json").read_text()) for n in (0, 1))
    # A flush of step 3 comes at the end of step 4; a save flushes at once; the end the rest.
    came = [[2, 1], [4, 2], [4, 3], [7, 4], [7, 5], [7, 6], [8, 7], [8, 8]]
    assert first["came"][:8] == second["came"][:8] == came
    assert first["came"] == second["came"]
    assert first["loss"] == second["loss"] and len(first["loss"]) == 9
    assert first["rank 1"] == second["rank 1"] == {str(n): n for n in range(1, 10)}
    # The durations of the save are known after its step was delivered, and belong to it.
    late = set().union(*first["names"][1:])
    known = ("save_wait_s", "save_duration_s", "save_async_duration_s")
    assert late == {f"checkpoint/{name}" for name in known}
    for rank in (0, 1):
        file = tmp_path / "failed" / f"last_metrics-rank{rank}.json"
        dump = json.loads(file.read_text())
        assert dump["rank"] == rank and len(dump["run_id"]) == 12
        assert dump["global_step"] == 5 and "this rank's disk" in dump["error"]
        assert set(dump["metrics"]) == {"4", "5"}
        assert dump["metrics"]["4"]["both"] == 1.0  # this rank's own, not joined
        assert ("rank 1" in dump["metrics"]["5"]) == (rank == 1)
