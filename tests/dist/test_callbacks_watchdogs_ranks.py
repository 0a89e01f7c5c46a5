"""Watchdogs on real ranks: one notice for all, who is stuck, whose weights differ."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from headway import DDPTrainer, FSDP2Trainer, PipelineTrainer, TrainerCallback
from headway.callbacks import (
    HangWatchdogCallback,
    MonkeyPatcherCallback,
    PreemptionCallback,
    ReplicaCheckCallback,
    TimeLimitCallback,
)
from headway.checkpoint.sharding import local_tensor
from headway.dist import init_distributed
from headway.testing import run_ranks, tiny_dataset, tiny_decoder

pytestmark = pytest.mark.timeout(150)


def make(kind: Any, folder: str, callbacks: list[Any], **arguments: Any) -> Any:
    options = {"max_steps": 12, "save_strategy": "steps", "save_steps": 4, "seed": 0}
    args = {"output_dir": folder, "use_cpu": True, "logging_steps": 5, **options, **arguments}
    return kind(
        args=kind.arguments_class(**args),
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(64, sequence_length=8),
        callbacks=callbacks,
        default_callbacks=False,
    )


class Flip(TrainerCallback):
    """Flips one bit of one weight on one rank, once."""

    def __init__(self, rank: int, step: int, bit: int) -> None:
        self.rank, self.step, self.bit = rank, step, bit
        self.done = False

    def on_step_begin(self, state: Any, model: Any) -> None:
        if state.global_step + 1 != self.step or self.done:
            return
        self.done = True
        if dist.get_rank() == self.rank:
            *_, parameter = model.parameters()
            words = local_tensor(parameter).detach().view(torch.int32).view(-1)
            words[3] ^= 1 << self.bit


def weights(trainer: Any) -> float:
    return sum(float(local_tensor(p).double().sum()) for p in trainer.model.parameters())


def replicas(folder: str) -> dict[str, Any]:
    init_distributed(use_cpu=True)
    found: dict[str, Any] = {}
    for action in ("rollback", "resync"):
        check = ReplicaCheckCallback(5, action, optimizer_state=action == "resync")
        trainer = make(DDPTrainer, f"{folder}/{action}", [Flip(1, 7, 0), check])
        step = trainer.train().global_step
        found[action] = (step, trainer.state.outcome, check.differences, weights(trainer))
        found[f"{action} repaired"] = (check.recovery.num_rollbacks, check.num_resyncs)
    plain = make(DDPTrainer, f"{folder}/plain", [check := ReplicaCheckCallback(1)])
    plain.train()
    found["plain"] = (check.differences, weights(plain))
    return found


def test_one_flipped_bit_is_found_and_mended(tmp_path: Path) -> None:
    one, two = run_ranks(replicas, 2, str(tmp_path), timeout_s=120)
    for found in (one, two):
        step, outcome, told, total = found["rollback"]
        assert (step, outcome, len(told)) == (12, "completed", 1)
        assert found["rollback repaired"] == (1, 0)
        assert "after step 10 ranks 0, 1 hold different values" in told[0]
        assert "which are right cannot be told" in told[0]
        assert total == found["plain"][1], "from before the flip all went as without it"
        step, outcome, told, _ = found["resync"]
        assert (step, outcome, len(told)) == (12, "completed", 1)
        assert found["resync repaired"] == (0, 1)
        assert found["plain"][0] == []
    assert one["resync"][3] == two["resync"][3]


def on_four(folder: str) -> dict[str, Any]:
    """Two copies of two shards, and two pipelines of two stages."""
    init_distributed(use_cpu=True)
    rows = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "sharded": (FSDP2Trainer, {"fsdp2": {"shard_size": 2}}),
        "pipelines": (PipelineTrainer, {"pipeline_size": 2, "n_microbatches": 2, **rows}),
    }
    found: dict[str, Any] = {}
    for name, (kind, options) in kinds.items():
        options = {"max_steps": 6, "save_steps": 3, **options}
        plain = make(kind, f"{folder}/{name}", [], **options)
        plain.train()
        for action in ("rollback", "resync"):
            check = ReplicaCheckCallback(3, action, optimizer_state=True)
            trainer = make(kind, f"{folder}/{name}-{action}", [Flip(3, 5, 9), check], **options)
            trainer.train()
            mended = check.recovery.num_rollbacks, check.num_resyncs
            found[name, action] = check.differences, mended, trainer.state.outcome
            found[name, action, "total"] = weights(trainer)
        found[name] = weights(plain)
    return found


@pytest.mark.slow
def test_copies_of_shards_and_of_stages_are_compared(tmp_path: Path) -> None:
    ranks = run_ranks(on_four, 4, str(tmp_path), timeout_s=140)
    for found in ranks:
        for name, who in (("sharded", "ranks 1, 3"), ("pipelines", "ranks 2, 3")):
            for action, mended in (("rollback", (1, 0)), ("resync", (0, 1))):
                (told,), done, outcome = found[name, action]
                # Of the last step, told after the last save; a rollback takes the run up again.
                assert told.startswith(f"after step 6 {who} hold different values")
                assert done == mended and outcome == "completed"
            assert found[name, "rollback", "total"] == found[name], "as without the flip"
    assert ranks[1]["sharded", "resync", "total"] == ranks[3]["sharded", "resync", "total"]
    assert ranks[2]["pipelines", "resync", "total"] == ranks[3]["pipelines", "resync", "total"]


def on_three(folder: str) -> dict[str, Any]:
    rank = init_distributed(use_cpu=True).rank
    check = ReplicaCheckCallback(2, "abort")
    args = {"max_steps": 8, "save_steps": 1, "save_total_limit": None}
    trainer = make(DDPTrainer, f"{folder}/majority", [Flip(2, 2, 20), check], **args)
    step = trainer.train().global_step
    saved = Path(folder, "majority", f"checkpoint-{step}").exists()
    found: dict[str, Any] = {
        "majority": check.differences,
        "end": (step, trainer.state.outcome, saved),
    }

    # Shards are of one rank each: nothing to compare, and the slices of meshes are kept.
    patcher = MonkeyPatcherCallback(enabled=True)
    check = ReplicaCheckCallback(1)
    sharded = make(FSDP2Trainer, f"{folder}/sharded", [check, patcher], max_steps=2)
    sharded.train()
    found["sharded"] = (check._active, patcher.active, sharded.state.outcome)

    # A file that only one rank sees stops all of them.
    notice = Path(folder, f"notice-{rank}")
    watcher = PreemptionCallback(file=str(notice), poll_interval_s=0.01)

    class Announce(TrainerCallback):
        def on_step_end(self, state: Any) -> None:
            if state.global_step == 2 and rank == 1:
                notice.touch()

    args = {"max_steps": 100_000, "save_steps": 100_000, "logging_steps": 1000}
    trainer = make(DDPTrainer, f"{folder}/noticed", [Announce(), watcher], **args)
    output = trainer.train()
    saved = [path.name for path in Path(folder, "noticed").glob("checkpoint-*")]
    found["noticed"] = (output.interrupted_by, output.global_step, saved, watcher.notice)

    # Only rank 0's clock counts.
    limit = TimeLimitCallback(3600.0)

    class Leap(TrainerCallback):
        def on_step_end(self, state: Any) -> None:
            if state.global_step == (3 if rank == 0 else 1):
                limit._end_s = time.monotonic() if rank == 0 else limit._end_s
                limit._made_at_s = 0.0

    output = make(DDPTrainer, f"{folder}/limit", [Leap(), limit], **args).train()
    found["limit"] = (output.interrupted_by, output.global_step)
    return found


def test_ranks_decide_together(tmp_path: Path) -> None:
    all_found = run_ranks(on_three, 3, str(tmp_path), timeout_s=120)
    for rank, found in enumerate(all_found):
        (told,) = found["majority"]
        assert "rank 2 of 3 holds other values than most" in told
        # Added up at step 2, compared when the sums are there: at the end of the next one.
        assert found["end"] == (3, "aborted", False)
        assert found["sharded"] == (False, False, "completed")
        by, step, saved, notice = found["noticed"]
        assert by == "SIGTERM" and step == all_found[0]["noticed"][1] < 100_000
        assert saved == [f"checkpoint-{step}"]
        assert (notice is not None) == (rank == 1)
        assert found["limit"] == ("stop_at", 3)


class Stand(TrainerCallback):
    """Rank 1 stands still in the forward of a step until it was told of."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def hook(self, module: Any, inputs: Any) -> None:
        deadline = time.monotonic() + 60
        while not self.path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def on_step_begin(self, state: Any, model: Any) -> None:
        if state.global_step == 3 and dist.get_rank() == 1:
            self.handle = model.register_forward_pre_hook(self.hook)

    def on_step_end(self, state: Any) -> None:
        if state.global_step == 4 and dist.get_rank() == 1:
            self.handle.remove()


class Busy(TrainerCallback):
    """A callback on one rank that takes longer than a step may, at work."""

    def on_step_end(self, state: Any, trainer: Any) -> None:
        if state.global_step == 3 and dist.get_rank() == 1:
            for _ in range(25):
                time.sleep(0.1)
                trainer.timing.note_progress()


class Upload(TrainerCallback):
    """A callback on one rank that does not come back until it was told of."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step_end(self, state: Any) -> None:
        if state.global_step == 3 and dist.get_rank() == 1:
            deadline = time.monotonic() + 60
            while not self.path.exists() and time.monotonic() < deadline:
                time.sleep(1.5)  # longer than a look takes: it is always found here


def hang(folder: str) -> dict[str, Any]:
    rank = init_distributed(use_cpu=True).rank
    options = {"step_factor": 1.0, "first_step_limit_s": 60.0}
    quiet = HangWatchdogCallback(0.8, **options)
    make(DDPTrainer, f"{folder}/busy", [Busy(), quiet], max_steps=5).train()
    dog = HangWatchdogCallback(1.0, **options)
    stand = Stand(Path(folder, "hang", "hang-rank1.txt"))
    trainer = make(DDPTrainer, f"{folder}/hang", [stand, dog], max_steps=6)
    step = trainer.train().global_step
    written = Path(folder, "hang", f"hang-rank{rank}.txt")
    # The same process, healthy, and strict: what was told before is not told again.
    after = HangWatchdogCallback(2.0, "abort", **options)
    make(DDPTrainer, f"{folder}/after", [Busy(), after], max_steps=6).train()
    patient = HangWatchdogCallback(0.8, "abort", **options)
    upload = Upload(Path(folder, "upload", "hang-rank1.txt"))
    make(DDPTrainer, f"{folder}/upload", [upload, patient], max_steps=5).train()
    return {
        "quiet": quiet.alarms,
        "after": after.alarms,
        "handler": patient.alarms,
        "step": step,
        "alarms": dog.alarms,
        "dump": written.read_text() if written.exists() else "",
    }


def test_the_stuck_rank_is_named_with_its_stack(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(hang, 2, str(tmp_path), timeout_s=120)):
        assert found["quiet"] == [], "a callback at work is no hang"
        assert found["step"] == 6, "a report ends no run"
        assert found["after"] == []
        assert "stuck is rank 1 of 2" in found["handler"][0]
        assert "in on_step_end" in found["handler"][0]
        assert found["alarms"], rank
        told = found["alarms"][0]
        assert "nothing has come of training" in told and "after step 3" in told
        assert "stuck is rank 1 of 2" in told and "in hook" in told
        where = " in hook" if rank else " in forward_backward"
        assert where in found["dump"] and told in found["dump"]


def end_all(folder: str) -> None:
    init_distributed(use_cpu=True)
    dog = HangWatchdogCallback(1.0, "abort", step_factor=1.0, first_step_limit_s=60.0)
    stand = Stand(Path(folder, "never"))
    make(DDPTrainer, folder, [stand, dog], max_steps=6).train()


@pytest.mark.slow
def test_a_run_that_hangs_is_ended_on_all_ranks(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(Exception, match=r"hang|stuck is rank 1|exit"):
        run_ranks(end_all, 2, str(tmp_path), timeout_s=100)
    assert time.monotonic() - began_s < 50
    assert (tmp_path / "hang-rank0.txt").exists() and (tmp_path / "hang-rank1.txt").exists()
    assert os.path.getsize(tmp_path / "hang-rank1.txt")
