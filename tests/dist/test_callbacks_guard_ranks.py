"""Guards on two ranks: one decision, the same steps left out, the same end; every strategy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from headway import AccelTrainer, DDPTrainer, FSDP2Trainer, PipelineTrainer, TrainerCallback
from headway.callbacks import (
    DivergenceDetector,
    NaNGuardCallback,
    ReplicaCheckCallback,
    StepSkipRange,
)
from headway.checkpoint.sharding import local_tensor
from headway.dist import init_distributed
from headway.testing import run_ranks
from headway.testing.poisoned import Poison, final_loss, poisoned_trainer, sample_at

BAD = 15
pytestmark = pytest.mark.timeout(170)


class StopAfterReturn(TrainerCallback):
    """Stops the run at a step of its second time."""

    def __init__(self, step: int) -> None:
        self.step, self.returned = step, False

    def on_load(self) -> None:
        self.returned = True

    def on_step_end(self, state: Any, control: Any) -> None:
        if self.returned and state.global_step == self.step:
            control.should_training_stop = True


class Loads(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_load(self, state: Any) -> None:
        self.steps.append(state.global_step)


class AskOnOneRank(TrainerCallback):
    """What this rank alone has seen goes wrong; the ranks want different things."""

    def __init__(self) -> None:
        self.asked = False

    def on_step_end(self, state: Any, control: Any) -> None:
        if state.global_step != 12 or self.asked:
            return
        self.asked = True
        if dist.get_rank() == 1:
            control.rollback = True
            control.rollback_before_step = 7
            control.rollback_rate_factor = 0.5


class BreakOnOneRank(TrainerCallback):
    """What one rank holds of the weights is broken in the update of a step, once."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_optimizer_step(self, model: Any, state: Any) -> None:
        if state.global_step + 1 != self.step:
            return
        self.step = -1
        if dist.get_rank() == 1:
            with torch.no_grad():
                local_tensor(next(model.parameters())).fill_(math.nan)


def poisoned_ddp(folder: Path) -> dict[str, Any]:
    def train(name: str, sample: int | None, callbacks: list[Any]) -> Any:
        poison = Poison(sample)
        trainer = poisoned_trainer(
            folder / name,
            [poison, *callbacks],
            DDPTrainer,
            num_shares=2,
            max_steps=36,
            save_steps=5,
        )
        trainer.train()
        return trainer, poison

    def guard() -> DivergenceDetector:
        return DivergenceDetector(action="rollback", threshold=0.6, patience=2)

    clean, _ = train("clean", None, [])
    _, poison = train("guarded", sample_at(BAD), [guard(), StopAfterReturn(13)])
    resumed, again = train("guarded", sample_at(BAD), [guard()])
    return {
        "clean": final_loss(clean),
        "hits": poison.hits + again.hits,
        "first": poison.steps,
        "second": again.steps,
        "resumed": final_loss(resumed),
    }


def asked_on_one_rank(folder: Path) -> dict[str, Any]:
    loads = Loads()
    trainer = poisoned_trainer(
        folder, [AskOnOneRank(), loads], DDPTrainer, num_shares=2, max_steps=14, save_steps=5,
        lr_scheduler_type="constant", save_total_limit=None,
    )  # fmt: skip
    trainer.train()
    rate = trainer.optimizer.param_groups[0]["lr"]
    return {"loads": loads.steps, "rate": rate, "factor": trainer.state.rate_factor}


def broken_shard(folder: Path) -> dict[str, Any]:
    guard, loads = NaNGuardCallback("rollback", parameter_interval=1), Loads()
    trainer = poisoned_trainer(
        folder, [BreakOnOneRank(13), guard, loads], FSDP2Trainer, num_shares=2, max_steps=16,
        save_steps=5, optim="adamw_torch", learning_rate=1e-2,
    )  # fmt: skip
    trainer.train()
    return {
        "loads": loads.steps,
        "left_out": guard.recovery.skip_steps,
        "loss": final_loss(trainer),
        "outcome": trainer.state.outcome,
    }


def late_look(folder: Path) -> dict[str, Any]:
    guard = NaNGuardCallback("rollback")  # looks at the weights when the loss is bad
    trainer = poisoned_trainer(
        folder, [BreakOnOneRank(8), guard], FSDP2Trainer, num_shares=2, max_steps=11,
        save_steps=5, optim="adamw_torch", learning_rate=1e-2,
    )  # fmt: skip
    trainer.train()
    return {"left_out": guard.recovery.skip_steps, "outcome": trainer.state.outcome}


def norm_of_one_rank(folder: Path) -> dict[str, Any]:
    class Spoil(TrainerCallback):
        def on_gradients(self, model: Any, state: Any) -> None:
            if state.global_step + 1 == 8 and dist.get_rank() == 1:  # reduced by now
                next(model.parameters()).grad.fill_(math.nan)

    guard = NaNGuardCallback("rollback")
    trainer = poisoned_trainer(
        folder, [Spoil(), guard], DDPTrainer, num_shares=2, max_steps=11, save_steps=5
    )
    trainer.train()
    total = float(sum(p.detach().double().sum() for p in trainer.model.parameters()))
    return {
        "left_out": guard.recovery.skip_steps,
        "total": total,
        "step": trainer.state.global_step,
    }


def pipeline_steps(folder: Path) -> dict[str, Any]:
    class Ruin(TrainerCallback):
        priority = 100

        def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
            if "train/CE loss" in metrics:
                metrics["train/CE loss"] = 9.0 if step == 8 else 2.0

    taken: list[int] = []

    class Taken(TrainerCallback):
        def on_optimizer_step(self, state: Any) -> None:
            taken.append(state.global_step + 1)

    detector = DivergenceDetector(
        action="rollback", every_step=True, warmup=2, patience=1, smoothing=1.0
    )
    trainer = poisoned_trainer(
        folder, [Ruin(), StepSkipRange(3, 5), detector, Taken()], PipelineTrainer, max_steps=12,
        save_steps=5, n_microbatches=2, metrics_collect_interval=1, per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer.train()
    return {"taken": taken, "loss": final_loss(trainer), "skipped": detector.recovery.skip_steps}


def on_accelerator(folder: str) -> dict[str, Any]:
    """A poisoned batch, a gradient that is not finite, and weights that grow apart."""
    from accelerate import Accelerator

    class OnAccelerator(AccelTrainer):
        def __init__(self, **given: Any) -> None:
            super().__init__(accelerator=Accelerator(cpu=True), **given)

    class Spoil(TrainerCallback):
        def on_gradients(self, model: Any, state: Any) -> None:
            if state.global_step + 1 == 8:  # reduced by now, so it is so on all ranks
                next(model.parameters()).grad.fill_(math.nan)

        def on_step_begin(self, model: Any, state: Any) -> None:
            if state.global_step + 1 == 5 and dist.get_rank() == 1:
                next(model.parameters()).data[0] += 1.0

    def train(name: str, callbacks: list[Any], **more: Any) -> Any:
        trainer = poisoned_trainer(
            Path(folder) / name, callbacks, OnAccelerator, num_shares=2, save_steps=5, **more
        )
        trainer.train()
        return trainer

    init_distributed(use_cpu=True)
    guard = DivergenceDetector(action="rollback", threshold=0.6, patience=2)
    poison = Poison(sample_at(BAD))
    clean = train("clean", [Poison(None)], max_steps=36)
    guarded = train("guarded", [poison, guard], max_steps=36)
    nan_guard, check = NaNGuardCallback("skip"), ReplicaCheckCallback(2, "resync")
    spoiled = train("spoiled", [Spoil(), nan_guard, check, StepSkipRange(2, 4)], max_steps=9)
    return {
        "clean": final_loss(clean),
        "guarded": final_loss(guarded),
        "hits": (poison.hits, guard.recovery.num_rollbacks),
        "bad": (nan_guard.num_bad_steps, check.num_resyncs),
        "end": (spoiled.state.outcome, spoiled.state.num_input_tokens_skipped > 0),
        "total": float(sum(p.detach().double().sum() for p in spoiled.model.parameters())),
    }


@pytest.mark.slow
def test_guards_on_an_accelerator(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    one, two = run_ranks(on_accelerator, 2, str(tmp_path), timeout_s=150)
    assert one == two
    assert one["hits"] == ([BAD], 1) and abs(one["guarded"] / one["clean"] - 1) < 0.01
    assert one["bad"] == (1, 1)
    assert one["end"] == ("completed", True)


def live(folder: str) -> dict[str, Any]:
    init_distributed(use_cpu=True)
    jobs = (
        poisoned_ddp, asked_on_one_rank, broken_shard, late_look, norm_of_one_rank, pipeline_steps,
    )  # fmt: skip
    return {job.__name__: job(Path(folder) / job.__name__) for job in jobs}


@pytest.fixture(scope="module")
def lives(tmp_path_factory: Any) -> list[dict[str, Any]]:
    return run_ranks(live, 2, str(tmp_path_factory.mktemp("guards")), timeout_s=150)


def both(lives: list[dict[str, Any]], job: str) -> dict[str, Any]:
    """What both ranks tell alike."""
    assert lives[0][job] == lives[1][job]
    return lives[0][job]


def test_a_poisoned_batch_and_a_resume_cost_less_than_one_percent(lives: Any) -> None:
    told = both(lives, "poisoned_ddp")
    assert told["hits"] == [BAD], "on no rank and in no run a second time"
    assert told["first"][-3:] == [11, 12, 13] and told["second"][:2] == [14, 18]
    assert abs(told["resumed"] / told["clean"] - 1) < 0.01


def test_what_one_rank_asks_for_is_done_by_all(lives: Any) -> None:
    told = both(lives, "asked_on_one_rank")
    assert told == {"loads": [5], "rate": 0.5, "factor": 0.5}


def test_a_shard_that_is_broken_on_one_rank_takes_all_back(lives: Any) -> None:
    told = both(lives, "broken_shard")
    assert told["loads"] == [10] and told["outcome"] == "completed"
    assert told["left_out"] == [(13, 14)]
    assert math.isfinite(told["loss"])


def test_what_one_rank_finds_in_its_share_decides_for_all_which_steps_are_left_out(
    lives: Any,
) -> None:
    assert both(lives, "late_look") == {"left_out": [(8, 10)], "outcome": "completed"}


def test_a_gradient_that_is_broken_on_one_rank_is_known_to_all(lives: Any) -> None:
    told = both(lives, "norm_of_one_rank")
    assert told["left_out"] == [(8, 9)] and told["step"] == 11
    assert math.isfinite(told["total"])


def test_stages_of_a_pipeline_leave_out_and_return_together(lives: Any) -> None:
    told = both(lives, "pipeline_steps")
    assert told["skipped"] == [(7, 9)]
    assert told["taken"][:4] == [1, 2, 5, 6] and told["taken"][-5:] == [6, 9, 10, 11, 12]
    assert math.isfinite(told["loss"])
