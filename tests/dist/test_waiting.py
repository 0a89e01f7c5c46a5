"""A rank that lives and does not come: the others say which one it is, and where it stands."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from headway import (
    DDPTrainer,
    DDPTrainingArguments,
    FSDP2Trainer,
    PipelineTrainer,
    TrainerCallback,
)
from headway.args import FSDP2TrainingArguments, PipelineTrainingArguments
from headway.dist import agree_bits, init_distributed, watch
from headway.strategies import fsdp2
from headway.testing import RankFailure, run_ranks, tiny_dataset, tiny_decoder

SOON = {"HEADWAY_WAITING_AFTER_S": "1"}


def listen(told: Path) -> None:
    """What this rank would say goes to a file, whole or not at all; signs come often."""
    watch.BEAT_S = 0.1

    def say(text: str, kind: str = "error") -> None:
        with told.with_suffix(".part").open("a") as file:
            file.write(f"{kind}: {text}\n")
        told.with_suffix(".part").replace(told)

    watch.say = say  # type: ignore[assignment]


def dawdle_until(told: Path) -> None:
    """Stand still, in Python, until someone complains of it."""
    while not told.exists():
        time.sleep(0.01)


class Dawdle(TrainerCallback):
    def __init__(self, rank: int, told: Path) -> None:
        self._rank, self._told = rank, told

    def on_step_end(self, state: Any) -> None:
        if state.global_step == 3 and self._rank == 1:
            dawdle_until(self._told)


def in_a_callback(folder: str) -> int:
    told = Path(folder, "told")
    listen(told)
    rank = init_distributed(use_cpu=True).rank
    args = DDPTrainingArguments(
        output_dir=folder, max_steps=5, use_cpu=True, save_strategy="no", seed=0
    )
    trainer = DDPTrainer(
        args=args,
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(64),
        callbacks=[Dawdle(rank, told)],
        default_callbacks=False,
    )
    return trainer.train().global_step


def before_a_collective(folder: str) -> None:
    told = Path(folder, "told")
    listen(told)
    rank = init_distributed(use_cpu=True).rank
    agree_bits(0)
    if rank == 2:
        dawdle_until(told)
    dist.all_reduce(torch.ones(1))


def all_together(folder: str) -> None:
    listen(Path(folder, "told"))
    rank = init_distributed(use_cpu=True).rank
    agree_bits(0)
    deadline = time.monotonic() + 2
    own, others = Path(folder, f"over-{rank}"), [Path(folder, f"over-{n}") for n in range(2)]
    # On a busy machine one of them may be much slower; neither goes before both can.
    while not all(path.exists() for path in others):
        if time.monotonic() > deadline:
            own.touch()
        time.sleep(0.01)
    agree_bits(0)


def test_a_rank_that_hangs_in_a_callback_is_named(tmp_path: Path) -> None:
    assert run_ranks(in_a_callback, 2, str(tmp_path), backend=None, env=SOON) == [5, 5]
    (line,) = (tmp_path / "told").read_text().splitlines()
    assert line.startswith("warning: rank 1 of 2 has kept the others waiting for 1 s: it is at ")
    assert "test_waiting.py:" in line and "in dawdle_until (process " in line


def test_a_rank_that_hangs_before_a_collective_is_named(tmp_path: Path) -> None:
    run_ranks(before_a_collective, 3, str(tmp_path), backend=None, env=SOON)
    (line,) = (tmp_path / "told").read_text().splitlines()
    assert line.startswith("warning: rank 2 of 3 has kept the others waiting")
    assert "in dawdle_until" in line


@pytest.mark.parametrize("limit", ["1", "0"])
def test_ranks_that_take_their_time_together_are_left_alone(limit: str, tmp_path: Path) -> None:
    function = all_together if limit == "1" else leave_unwatched
    run_ranks(function, 2, str(tmp_path), backend=None, env={"HEADWAY_WAITING_AFTER_S": limit})
    told = tmp_path / "told"
    assert not told.exists(), told.read_text()


def leave_unwatched(folder: str) -> None:
    listen(Path(folder, "told"))
    rank = init_distributed(use_cpu=True).rank
    agree_bits(0)
    deadline = time.monotonic() + 2 * (rank == 1)
    while time.monotonic() < deadline:
        time.sleep(0.01)
    agree_bits(0)


# How long they wait

LIMITED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ddp": (DDPTrainer, DDPTrainingArguments, {}),
    "fsdp2": (FSDP2Trainer, FSDP2TrainingArguments, {"fsdp2": {"shard_size": 2}}),
    "fsdp2 beside a gpu": (FSDP2Trainer, FSDP2TrainingArguments, {}),
    "pipeline": (PipelineTrainer, PipelineTrainingArguments, {"pipeline_size": 2}),
}


class Limits(TrainerCallback):
    """Notes how long the ranks wait in each process group there is."""

    def __init__(self) -> None:
        self.found_s: list[float] = []

    def on_step_end(self) -> None:
        from torch.distributed.distributed_c10d import _world

        backends = [group._get_backend(torch.device("cpu")) for group in _world.pg_map]
        self.found_s = [backend.options._timeout.total_seconds() for backend in backends]


def make_mesh_beside_a_gpu(*given: Any, **more: Any) -> Any:
    with mock.patch("torch.cuda.is_available", return_value=True):
        return init_device_mesh(*given, **more)


def limits_in_a_run(folder: str, kind: str) -> list[float]:
    init_distributed(use_cpu=True)
    if "gpu" in kind:  # torch makes another group then, for ranks that talk over gloo
        fsdp2.init_device_mesh = make_mesh_beside_a_gpu  # type: ignore[assignment]  # in this process, which ends after it
    trainer_class, arguments_class, more = LIMITED[kind]
    args = arguments_class.from_dict(
        {"output_dir": folder, "max_steps": 1, "use_cpu": True, "ddp_timeout": 77, **more}
    )
    limits = Limits()
    trainer_class(
        args=args,
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(64),
        callbacks=[limits],
        default_callbacks=False,
    ).train()
    return limits.found_s


@pytest.mark.parametrize("kind", LIMITED)
def test_ddp_timeout_holds_in_every_group_of_a_run(tmp_path: Path, kind: str) -> None:
    for found_s in run_ranks(limits_in_a_run, 4, str(tmp_path), kind, backend=None, timeout_s=120):
        assert len(found_s) > 2 and set(found_s) == {77.0}


def limits_of_two_runs(folder: str) -> list[set[float]]:
    init_distributed(use_cpu=True, timeout_s=99)
    found_s = []
    for limit_s in (77, None):
        limits = Limits()
        DDPTrainer(
            args=DDPTrainingArguments(
                output_dir=f"{folder}/{limit_s}", use_cpu=True, max_steps=1, ddp_timeout=limit_s
            ),
            model_init=tiny_decoder,
            train_dataset=tiny_dataset(64),
            callbacks=[limits],
            default_callbacks=False,
        ).train()
        found_s.append(set(limits.found_s))
    return found_s


def test_ddp_timeout_of_one_run_does_not_hold_in_the_next(tmp_path: Path) -> None:
    for first, second in run_ranks(limits_of_two_runs, 2, str(tmp_path), backend=None):
        assert first == {77.0} and 99.0 in second, "groups of the first run are still there"


def slow_figures(found: Any) -> dict[str, float]:
    time.sleep(4)
    return {"slow": 1.0}


def evaluate_slowly(folder: str, **options: Any) -> dict[str, float]:
    init_distributed(use_cpu=True, timeout_s=2)
    trainer = DDPTrainer(
        args=DDPTrainingArguments(output_dir=folder, use_cpu=True, **options),
        model_init=tiny_decoder,
        eval_dataset=tiny_dataset(4),
        compute_metrics=slow_figures,
        default_callbacks=False,
    )
    return trainer.evaluate()


def test_ranks_wait_for_rank_0s_metrics_as_long_as_ddp_timeout_says(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="Timed out waiting"):
        run_ranks(evaluate_slowly, 2, str(tmp_path), backend=None)
    told = run_ranks(evaluate_slowly, 2, str(tmp_path), backend=None, ddp_timeout=60)
    assert [metrics["eval_slow"] for metrics in told] == [1.0, 1.0]


def test_for_ever_is_longer_than_any_wait(tmp_path: Path) -> None:
    """Of 300 years gloo makes a time that has been, and of more torch takes none."""
    for given in (10**10, 10**15):
        said = {"ddp_timeout": given}
        told = run_ranks(evaluate_slowly, 2, str(tmp_path), backend=None, timeout_s=60, **said)
        assert [metrics["eval_slow"] for metrics in told] == [1.0, 1.0]
