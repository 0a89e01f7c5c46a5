"""Commands to a run of several ranks: every one takes effect after the same step on all of them.

All strategies of one number of ranks share one start of the processes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("aiohttp")

from headway import (
    AccelTrainer,
    AccelTrainingArguments,
    DDPTrainer,
    DDPTrainingArguments,
    FSDP2Trainer,
    FSDP2TrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    TrainerCallback,
)
from headway.callbacks import HangWatchdogCallback, TrainerControlCallback
from headway.checkpoint.manifest import verify
from headway.control.schema import parse_command
from headway.data.tokenizer import ByteTokenizer
from headway.dist import init_distributed
from headway.testing import run_ranks, tiny_dataset, tiny_decoder

STRATEGIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ddp": (DDPTrainer, DDPTrainingArguments, {}),
    "fsdp2": (FSDP2Trainer, FSDP2TrainingArguments, {}),
    "pipeline": (
        PipelineTrainer,
        PipelineTrainingArguments,
        {"pipe_schedule": "GPipe", "n_microbatches": 2},
    ),
    "accelerate": (AccelTrainer, AccelTrainingArguments, {}),
}
MAX_STEPS = 12
# Step -> what is asked for while it is under way. The run is longer than planned in the end.
SCRIPT: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [("status", {}), ("resume", {})],
    2: [("set_learning_rate", {"scale": 0.5})],
    3: [("extend_max_steps", {"by": 4}), ("extend_max_steps", {"max_steps": 3})],
    4: [("evaluate_now", {})],
    5: [("save_checkpoint", {})],
    6: [("generate_now", {"prompt": "the tide", "max_new_tokens": 3})],
    7: [("set_log_level", {"level": "error"})],
    8: [("pause", {"offload": True})],
    9: [("profile_next_steps", {"num_steps": 1})],
    10: [("set_learning_rate", {"value": 1e-5, "keep": False})],
    13: [("save_and_stop", {})],
}
PAUSE_S = 0.5
COLLECTIVE_LIMIT_S = 8.0


class Script(TrainerCallback):
    """Sends commands from rank 0 while a step is under way; sees on every rank what comes of it."""

    priority = 100

    def __init__(
        self,
        script: Any,
        control: TrainerControlCallback,
        pause_s: float,
        kill: int | None = None,
        full: int | None = None,
        crowded: int | None = None,
    ) -> None:
        self.script, self.control, self.pause_s = script, control, pause_s
        self.kill, self.full, self.crowded = kill, full, crowded
        self.sent: list[tuple[int, str]] = []
        self.seen: list[Any] = []
        """What must be the same on all ranks."""
        self.held_s = 0.0
        self.before = self.after = ""
        self.freed = False

    def on_train_begin(self, trainer: Any) -> None:
        hold, seen = trainer.commands.hold, self.seen

        def watched(has_news: Any) -> None:
            if ("paused", trainer.state.global_step) not in seen:
                seen.append(("paused", trainer.state.global_step))
                self.before = digest(trainer)
                threading.Timer(self.pause_s, self._end_pause, (trainer,)).start()
            began_s = time.monotonic()

            def look() -> bool:
                self.freed = sum(tensor.untyped_storage().nbytes() for tensor in held(trainer)) == 0
                return has_news()

            hold(look)
            self.held_s += time.monotonic() - began_s

        trainer.commands.hold = watched

        def pause(offload: bool) -> str:
            # As on a device that is not the host.
            parking = trainer._parking()
            if trainer.env.rank == self.full:
                parking.park = find_no_room
            if trainer.env.rank == self.crowded:
                parking.unpark = find_no_room
            must_end = lambda: trainer.asked_to_end  # noqa: E731
            trainer.commands.pause(parking if offload else None, must_end)
            return ""

        trainer.pause = pause

    def _end_pause(self, trainer: Any) -> None:
        rank = trainer.env.rank
        if self.kill is None and rank == 0:
            self._send(trainer.state.global_step, "resume", {})
        elif self.kill == rank:
            os.kill(os.getpid(), signal.SIGTERM)

    def _send(self, step: int, name: str, data: dict[str, Any]) -> None:
        assert self.control.inbox is not None
        values = "-".join(str(value) for value in data.values() if not isinstance(value, str))
        command_id = f"{step}-{name}-{values}"
        self.control.inbox.submit(parse_command({"command": name, "data": data, "id": command_id}))
        self.sent.append((step, command_id))

    def on_gradients(self, state: Any, trainer: Any) -> None:
        step = state.global_step + 1
        if trainer.env.rank == 0:
            for name, data in self.script.get(step, ()):
                self._send(step, name, data)

    def on_step_begin(self, state: Any, trainer: Any) -> None:
        if self.before and not self.after:
            self.after = digest(trainer)
        rate = trainer.optimizer.param_groups[0]["lr"]
        level = logging.getLogger("headway").level
        acts = self.control._acts
        assert acts is not None
        self.seen.append(
            (state.global_step, rate, state.max_steps, level, len(acts.samples), acts.samples)
        )

    def on_evaluate(self, state: Any) -> None:
        self.seen.append(("evaluated", state.global_step))

    def on_save(self, step: int) -> None:
        self.seen.append(("saved", step))


def find_no_room() -> None:
    raise RuntimeError("no room here")


def held(trainer: Any) -> list[torch.Tensor]:
    """What this rank has of weights and optimizer state, wherever it is."""
    found = [*trainer.model.parameters()]
    for slots in trainer.optimizer.state.values():
        found += [slot for slot in slots.values() if isinstance(slot, torch.Tensor)]
    return [one._local_tensor if hasattr(one, "_local_tensor") else one.detach() for one in found]


def digest(trainer: Any) -> str:
    content = hashlib.sha256()
    for tensor in held(trainer):
        content.update(tensor.clone().numpy().tobytes())  # NumPy would hold the memory
    return content.hexdigest()


def train(
    folder: str,
    name: str,
    script: Any,
    pause_s: float = 0.2,
    kill: int | None = None,
    full: int | None = None,
    crowded: int | None = None,
) -> dict[str, Any]:
    trainer_class, arguments_class, more = STRATEGIES[name]
    control = TrainerControlCallback(job_id=Path(folder).name)
    watched = Script(script, control, pause_s, kill, full, crowded)
    hang = HangWatchdogCallback(limit_s=COLLECTIVE_LIMIT_S)
    ranks, given = int(os.environ["WORLD_SIZE"]), {}
    if name == "accelerate":
        from accelerate import Accelerator

        given["accelerator"] = Accelerator(cpu=True)
    trainer = trainer_class(
        args=arguments_class(
            output_dir=folder, per_device_train_batch_size=2, per_device_eval_batch_size=2,
            max_steps=MAX_STEPS, logging_steps=1, seed=0, use_cpu=True,
            save_strategy="no" if crowded is None else "steps", save_steps=1000,
            lr_scheduler_type="cosine", learning_rate=1e-3, **more,
        ),
        model_init=lambda: tiny_decoder(num_layers=ranks),
        train_dataset=tiny_dataset(64, sequence_length=8),
        eval_dataset=tiny_dataset(8, sequence_length=8, seed=1),
        processing_class=ByteTokenizer(),
        callbacks=[control, watched, hang],
        **given,
        default_callbacks=False,
    )  # fmt: skip
    step = trainer.train().global_step
    receipts = {}
    if control.inbox is not None:
        for _, command_id in watched.sent:
            found = control.inbox.receipt(command_id)
            assert found is not None
            receipts[command_id] = (found.state, found.step, found.message)
    return {
        "step": step,
        "outcome": trainer.state.outcome,
        "seen": watched.seen,
        "held_s": watched.held_s,
        "receipts": receipts,
        "alarms": hang.alarms,
        "disabled": trainer.bus.disabled,
        "factors": (trainer.state.rate_factor, trainer.state.temporary_rate_factor),
        "lengths": trainer.state.lengths,
        "saved": None if crowded is None else is_saved(trainer, f"{folder}/checkpoint-{step}"),
        "serves": control.inbox is not None,
        "parked": (watched.freed, watched.before == watched.after != ""),
    }


def is_saved(trainer: Any, folder: str) -> bool:
    """Whether a checkpoint is sound, and has the weights that the ranks have together."""
    stored: dict[str, torch.Tensor] = {}
    for path in Path(folder).glob("model*.safetensors"):
        stored |= load_file(path)
    weights = dict(trainer.strategy.unwrap().named_parameters())
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in weights.items()}
    same = all(torch.equal(stored[name], value.detach()) for name, value in whole.items())
    return same and not verify(Path(folder))


def steer(folder: str, names: list[str]) -> dict[str, Any]:
    init_distributed(use_cpu=True)
    facts = {name: train(f"{folder}/{name}", name, SCRIPT, PAUSE_S) for name in names}
    stop, abort = {2: [("graceful_stop", {})]}, {2: [("abort", {})]}
    for name in names:
        facts[f"stop-{name}"] = train(f"{folder}/stop-{name}", name, stop)
        facts[f"abort-{name}"] = train(f"{folder}/abort-{name}", name, abort)
    facts["signal"] = train(f"{folder}/signal", "ddp", {1: [("pause", {})]}, kill=1)
    offload = {1: [("pause", {"offload": True})]}
    facts["full"] = train(f"{folder}/full", "ddp", offload, full=1)
    facts["crowded"] = train(f"{folder}/crowded", "fsdp2", offload, kill=0, crowded=1)
    return facts


def pause_long(folder: str) -> dict[str, Any]:
    # Ranks meet in the pause's own agreements too: all of them have this limit.
    rank = init_distributed(use_cpu=True, timeout_s=COLLECTIVE_LIMIT_S).rank
    os.makedirs(folder, exist_ok=True)
    # Here the watch over the ranks says who is late.
    with open(f"{folder}/said-{rank}.txt", "wb") as said:
        os.dup2(said.fileno(), 2)
    return train(folder, "ddp", {1: [("pause", {})]}, COLLECTIVE_LIMIT_S + 1.5)


def start(folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    pytest.importorskip("accelerate")
    env, names = {"HEADWAY_JOBS_DIR": str(folder / "jobs")}, list(STRATEGIES)
    return run_ranks(steer, num_ranks, str(folder), names, timeout_s=300, backend=None, env=env)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return start(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return start(tmp_path_factory.mktemp("four"), 4)


@pytest.fixture(params=[2, 4], ids=["two", "four"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = request.getfixturevalue({2: "two", 4: "four"}[request.param])
    return found


def check(ranks: list[dict[str, Any]], name: str) -> None:
    facts = [rank[name] for rank in ranks]
    first = facts[0]
    for other in facts[1:]:
        for key in ("step", "outcome", "seen", "factors", "lengths"):
            assert other[key] == first[key], key
        assert not other["serves"]
    assert (first["step"], first["outcome"]) == (13, "stopped")
    for fact in facts:
        assert fact["disabled"] == {} and fact["alarms"] == []
        assert fact["held_s"] > 0
        assert fact["parked"] == (True, True), "the state was away, and came back bit by bit"
    seen = first["seen"]
    assert [entry for entry in seen if entry[0] == "evaluated"] == [("evaluated", 4)]
    assert [entry for entry in seen if entry[0] == "paused"] == [("paused", 8)]
    saves = [entry for entry in seen if entry[0] == "saved"]
    assert saves == [("saved", 5), ("saved", 13)]
    by_step = {entry[0]: entry[1:] for entry in seen if isinstance(entry[0], int)}
    # The beginning of a step has what was done after the one before.
    assert by_step[2][1] == 12 and by_step[3][1] == 16
    assert by_step[6][4][0]["prompt"] == "the tide" and by_step[5][3] == 0
    assert by_step[6][2] != logging.ERROR and by_step[7][2] == logging.ERROR
    assert by_step[10][0] == pytest.approx(1e-5)
    assert first["lengths"] == [12, 16]
    total, temporary = first["factors"]
    assert total == pytest.approx(0.5 * temporary) and temporary != 1.0
    states = {key: value[:2] for key, value in first["receipts"].items()}
    refused = {key for key, (state, _) in states.items() if state == "refused"}
    assert refused == {"1-resume-", "3-extend_max_steps-3"}
    assert all(state == "applied" for key, (state, _) in states.items() if key not in refused)
    assert all(step == int(key.partition("-")[0]) for key, (_, step) in states.items())
    assert len(states) == sum(map(len, SCRIPT.values())) + 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_command_takes_effect_after_the_same_step_on_all_ranks(ranks: Any, name: str) -> None:
    check(ranks, name)


def test_a_pause_longer_than_the_limit_of_a_collective_trips_nothing(tmp_path: Path) -> None:
    env = {"HEADWAY_JOBS_DIR": str(tmp_path / "jobs"), "HEADWAY_WAITING_AFTER_S": "2"}
    folder = str(tmp_path / "long")
    for rank in run_ranks(pause_long, 2, folder, timeout_s=100, backend=None, env=env):
        assert rank["held_s"] > COLLECTIVE_LIMIT_S
        assert (rank["step"], rank["outcome"]) == (MAX_STEPS, "completed")
        assert rank["alarms"] == []
    said = "".join(path.read_text() for path in Path(folder).glob("said-*.txt"))
    assert "waiting" not in said and "error" not in said


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("way", "outcome"), [("stop", "stopped"), ("abort", "aborted")])
def test_ends_by_command_come_after_one_step(ranks: Any, name: str, way: str, outcome: str) -> None:
    facts = [rank[f"{way}-{name}"] for rank in ranks]
    assert [(fact["step"], fact["outcome"]) for fact in facts] == [(2, outcome)] * len(ranks)


def test_a_rank_whose_state_stays_on_its_device_is_told_and_the_run_is_held(ranks: Any) -> None:
    for rank in ranks:
        assert (rank["full"]["step"], rank["full"]["outcome"]) == (MAX_STEPS, "completed")
        assert rank["full"]["seen"].count(("paused", 1)) == 1
    state, step, message = ranks[0]["full"]["receipts"]["1-pause-True"]
    assert (state, step) == ("failed", 1)
    assert message == ("the run is held, but the state of rank 1 stays on the device: no room here")


def test_a_run_that_must_end_is_saved_though_a_device_is_full(ranks: Any) -> None:
    for rank in ranks:
        facts = rank["crowded"]
        assert (facts["step"], facts["outcome"], facts["saved"]) == (1, "interrupted", True)


def test_a_signal_to_any_rank_ends_a_paused_run_with_a_save(ranks: Any) -> None:
    for rank in ranks:
        facts = rank["signal"]
        assert (facts["step"], facts["outcome"]) == (1, "interrupted")
        assert facts["seen"].count(("paused", 1)) == 1
