"""The relay of commands, a pause, and the state of a run on the host meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway import TrainerCallback
from headway.control.inbox import Inbox
from headway.control.schema import Command
from headway.engine.commands import CommandRelay
from headway.engine.parking import StateParking
from headway.testing.trainer import tiny_trainer

CPU = torch.device("cpu")


def send(inbox: Inbox, name: str, number: int = 0, **data: Any) -> None:
    inbox.submit(Command(f"{name}-{number}", name, data, 0.0))


class Sends(TrainerCallback):
    """Has an inbox of its own; what comes out of it is done by `act`."""

    def __init__(self, act: Any, at: dict[int, list[str]]) -> None:
        self.act, self.at, self.inbox = act, at, Inbox()
        self.came: list[tuple[int, list[str]]] = []

    def on_train_begin(self, trainer: Any) -> None:
        trainer.commands.attach(self.inbox, self.take)
        self.trainer = trainer

    def take(self, messages: list[dict[str, Any]], deaf: list[int]) -> None:
        assert deaf == []
        names = [message["name"] for message in messages]
        self.came.append((self.trainer.state.global_step, names))
        for name in names:
            self.act(self.trainer, name)

    def on_gradients(self, state: Any) -> None:
        for name in self.at.get(state.global_step + 1, ()):
            send(self.inbox, name, state.global_step)

    def on_close(self, trainer: Any) -> None:
        trainer.commands.detach()


def test_what_comes_during_a_step_is_delivered_at_its_end(tmp_path: Path) -> None:
    sends = Sends(lambda trainer, name: None, {2: ["status", "resume"], 4: ["status"]})
    tiny_trainer(tmp_path, [sends], max_steps=4, logging_strategy="no").train()
    assert sends.came == [(2, ["status", "resume"]), (4, ["status"])]
    assert not sends.inbox.pending


def test_a_command_can_raise_any_flag(tmp_path: Path) -> None:
    def act(trainer: Any, name: str) -> None:
        control = trainer.bus.control
        control.should_save = True
        control.should_training_stop = name == "save_and_stop"

    sends = Sends(act, {1: ["save_checkpoint"], 3: ["save_and_stop"]})
    trainer = tiny_trainer(tmp_path, [sends], max_steps=9)
    assert trainer.train().global_step == 3
    saved = sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*"))
    assert saved == ["checkpoint-1", "checkpoint-3"]


class Pauses(Sends):
    """Pauses after step 2; `during` is called, from another thread, once the run is held."""

    def __init__(self, during: Any) -> None:
        super().__init__(self.follow, {2: ["pause"]})
        self.during, self.held, self.doing = during, 0, ""

    def follow(self, trainer: Any, name: str) -> None:
        if name == "pause":
            trainer.pause()
        elif name == "resume":
            trainer.commands.resume()
        elif name == "evaluate_now":
            trainer.bus.control.should_evaluate = True

    def on_train_begin(self, trainer: Any) -> None:
        super().on_train_begin(trainer)
        hold = trainer.commands.hold

        def watched(has_news: Any) -> None:
            self.held += 1
            self.doing = trainer.timing.doing
            if self.held == 1:
                threading.Thread(target=self.during, args=(self, trainer)).start()
            hold(has_news)

        trainer.commands.hold = watched


def test_a_paused_run_waits_until_it_is_resumed_and_is_the_same_run(tmp_path: Path) -> None:
    plain = tiny_trainer(tmp_path / "plain", max_steps=4)
    plain.train()
    pauses = Pauses(lambda own, trainer: send(own.inbox, "resume"))
    held = tiny_trainer(tmp_path / "held", [pauses], max_steps=4)
    assert held.train().global_step == 4
    assert pauses.held == 1 and pauses.doing == "pause"
    assert held.commands.paused is False and held.timing.doing == "close"
    for one, other in zip(plain.model.parameters(), held.model.parameters()):
        assert torch.equal(one, other)


def test_a_pause_is_no_time_of_training(tmp_path: Path) -> None:
    woken = threading.Event()

    def during(own: Pauses, trainer: Any) -> None:
        woken.wait(0.6)
        send(own.inbox, "resume")

    pauses = Pauses(during)
    trainer = tiny_trainer(tmp_path, [pauses], max_steps=3)
    trainer.train()
    assert trainer.timing.aside_s >= 0.5
    assert trainer.state.train_seconds < 0.5


def test_an_evaluation_in_a_pause_leaves_it_paused(tmp_path: Path) -> None:
    evaluated: list[int] = []

    class Sees(TrainerCallback):
        def on_evaluate(self, state: Any) -> None:
            evaluated.append(state.global_step)
            send(pauses.inbox, "resume")

    pauses = Pauses(lambda own, trainer: send(own.inbox, "evaluate_now"))
    assert tiny_trainer(tmp_path, [pauses, Sees()], max_steps=3).train().global_step == 3
    assert evaluated == [2] and pauses.held >= 1


def test_a_cancellation_ends_a_paused_run(tmp_path: Path) -> None:
    pauses = Pauses(lambda own, trainer: trainer.cancel_run("enough"))
    trainer = tiny_trainer(tmp_path, [pauses], max_steps=9)
    assert trainer.train().global_step == 2
    assert (trainer.state.outcome, trainer.state.cancel_reason) == ("canceled", "enough")


def test_a_request_to_stop_ends_a_paused_run_with_a_save(tmp_path: Path) -> None:
    pauses = Pauses(lambda own, trainer: trainer.ask_to_stop("SIGTERM"))
    trainer = tiny_trainer(tmp_path, [pauses], max_steps=9, save_strategy="steps", save_steps=100)
    assert trainer.train().global_step == 2
    assert trainer.state.outcome == "interrupted"
    assert (tmp_path / "out" / "checkpoint-2").is_dir()


def test_a_request_to_save_is_followed_in_a_pause(tmp_path: Path) -> None:
    class Resumes(TrainerCallback):
        def on_save(self, step: int) -> None:
            assert step == 2
            send(pauses.inbox, "resume")

    def during(own: Pauses, trainer: Any) -> None:
        trainer._loop.signals._on_save(0, None)

    pauses = Pauses(during)
    assert tiny_trainer(tmp_path, [pauses, Resumes()], max_steps=3).train().global_step == 3


def test_a_limit_of_time_ends_a_paused_run(tmp_path: Path) -> None:
    pauses = Pauses(lambda own, trainer: trainer.stop_by(0.0))
    trainer = tiny_trainer(tmp_path, [pauses], max_steps=9)
    assert trainer.train().global_step == 2
    assert trainer.state.outcome == "interrupted"


def test_a_run_that_is_paused_at_its_end_can_be_made_longer(tmp_path: Path) -> None:
    class Longer(Pauses):
        def follow(self, trainer: Any, name: str) -> None:
            super().follow(trainer, name)
            if name == "extend_max_steps":
                trainer.change_max_steps(4)

    def during(own: Pauses, trainer: Any) -> None:
        send(own.inbox, "extend_max_steps")
        send(own.inbox, "resume")

    trainer = tiny_trainer(tmp_path, [Longer(during)], max_steps=2)
    assert trainer.train().global_step == 4
    assert trainer.state.outcome == "completed"


def test_a_relay_without_a_source_never_has_anything() -> None:
    relay = CommandRelay()
    assert relay.pending is False
    relay.deliver()
    relay.end()


# The state on the host


def make_state() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[2].weight = nn.Parameter(model[0].weight.data.t())  # another look at the same memory
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(12.0).reshape(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_parked_state_comes_back_bit_by_bit_in_the_same_objects() -> None:
    model, optimizer = make_state()
    other, others = make_state()
    weights, before = list(model.parameters()), [p.detach().clone() for p in model.parameters()]
    parking = StateParking(model, optimizer, CPU)
    assert parking.find_obstacle() is None
    parking.park()
    assert parking.is_parked
    assert all(p.untyped_storage().nbytes() == 0 for p in weights)
    assert all(
        tensor.untyped_storage().nbytes() == 0
        for slots in optimizer.state.values()
        for tensor in slots.values()
    )
    parking.unpark()
    assert not parking.is_parked
    for parameter, same, value in zip(model.parameters(), weights, before):
        assert parameter is same and torch.equal(parameter, value)
    assert model[2].weight.data_ptr() == model[0].weight.data_ptr()
    step(model, optimizer)
    step(other, others)
    for one, two in zip(model.state_dict().values(), other.state_dict().values()):
        assert torch.equal(one, two)


class Full(StateParking):
    """A device that has no room any more after so many pieces."""

    room = 2

    def unpark(self) -> None:
        given = 0

        class Storage:
            def __init__(self, real: Any) -> None:
                self.real = real

            def resize_(self, size: int) -> None:
                nonlocal given
                given += size > 0
                if given > Full.room:
                    raise RuntimeError("CUDA out of memory")
                self.real.resize_(size)

            def copy_(self, host: Any) -> None:
                self.real.copy_(host)

        kept = self._parked
        self._parked = [(Storage(storage), host) for storage, host in kept]  # type: ignore[misc]
        try:
            super().unpark()
        except RuntimeError:
            self._parked = kept
            raise


def test_a_device_without_room_leaves_the_run_held_and_nothing_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = make_state()
    before = [p.detach().clone() for p in model.parameters()]
    parking, relay = Full(model, optimizer, CPU), CommandRelay()
    relay.begin(int)
    relay.pause(parking)
    relay.hold(lambda: True)
    assert parking.is_parked
    with pytest.raises(RuntimeError, match="could not be brought back to the device"):
        relay.resume()
    assert relay.paused and parking.is_parked
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    monkeypatch.setattr(Full, "room", 99)
    relay.resume()
    assert not relay.paused
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before))


def test_a_host_without_room_keeps_the_state_where_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = make_state()
    relay = CommandRelay()
    relay.begin(int)
    relay.pause(StateParking(model, optimizer, CPU))

    def refuse(size: int) -> Any:
        raise RuntimeError("no room on the host")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "UntypedStorage", refuse)
        relay.hold(lambda: True)
    assert "stays on the device: no room on the host" in caplog.text
    assert all(p.untyped_storage().nbytes() for p in model.parameters())
    relay.resume()
    assert not relay.paused


@pytest.mark.parametrize("error", [RuntimeError("no room on the host"), MemoryError()])
def test_a_host_that_filled_up_meanwhile_holds_a_run_whose_other_rank_has_no_room(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    model, optimizer = make_state()
    parking, relay = StateParking(model, optimizer, CPU), CommandRelay()
    others: list[int] = []  # what another rank says to the next questions, if it is not 0
    relay.begin(lambda own: max(own, others.pop(0) if others else 0))
    relay.pause(parking)
    relay.hold(lambda: True)
    assert relay.is_offloaded and parking.is_parked

    def refuse() -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(parking, "park", refuse)
        others.append(1)
        with pytest.raises(RuntimeError, match="another rank found no room for it"):
            relay.bring_back()
    assert relay.is_held and not relay.is_offloaded
    assert all(p.untyped_storage().nbytes() for p in model.parameters())
    relay.resume()
    assert not relay.paused


def test_memory_that_others_hold_is_not_given_up(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = make_state()
    relay = CommandRelay()
    relay.begin(int)
    relay.pause(StateParking(model, optimizer, CPU))
    held = next(model.parameters()).detach().numpy()
    relay.hold(lambda: True)
    assert "others have come to hold" in caplog.text
    relay.resume()
    assert not relay.paused and held.size and next(model.parameters()).untyped_storage().nbytes()


def test_what_cannot_be_moved_is_told() -> None:
    model, optimizer = make_state()
    cuda = StateParking(model, optimizer, torch.device("cuda"))
    assert cuda.find_obstacle() is None
    assert "CUDA graphs" in str(cuda.find_obstacle("reduce-overhead"))
    assert "mps" in str(StateParking(model, optimizer, torch.device("mps")).find_obstacle())
    next(model.parameters()).ds_id = 1  # type: ignore[attr-defined]
    assert "DeepSpeed" in str(StateParking(model, optimizer, CPU).find_obstacle())
    shared = nn.Linear(2, 2)
    shared.weight = nn.Parameter(torch.frombuffer(bytearray(16), dtype=torch.float32).reshape(2, 2))
    made = StateParking(shared, torch.optim.SGD(shared.parameters()), CPU)
    assert "did not allocate" in str(made.find_obstacle())


def test_a_run_that_ends_parked_has_its_state_back(tmp_path: Path) -> None:
    model, optimizer = make_state()
    relay = CommandRelay()
    relay.begin(int)
    relay.pause(StateParking(model, optimizer, CPU))
    relay.hold(lambda: True)
    relay.end()
    assert all(p.untyped_storage().nbytes() for p in model.parameters()) and not relay.paused


class Crowded(StateParking):
    """A device that others have filled while the state was away."""

    frees_memory = True
    refuses = True

    def unpark(self) -> None:
        if self.refuses:
            raise RuntimeError("CUDA out of memory")
        super().unpark()


class PausesAway(Pauses):
    def on_train_begin(self, trainer: Any) -> None:
        super().on_train_begin(trainer)
        parking = Crowded(trainer.model, trainer.optimizer, trainer.strategy.device)
        trainer._parking = lambda: parking

    def follow(self, trainer: Any, name: str) -> None:
        if name == "pause":
            trainer.pause(offload=True)
        else:
            super().follow(trainer, name)


@pytest.mark.parametrize("save_async", [True, False])
def test_a_run_that_must_end_is_saved_from_the_host_if_its_device_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, save_async: bool
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 100, "save_async": save_async}
    pauses = PausesAway(lambda own, trainer: trainer.ask_to_stop("SIGTERM"))
    held = tiny_trainer(tmp_path / "held", [pauses], max_steps=4, **saves)
    assert held.train().global_step == 2
    assert held.state.outcome == "interrupted"
    assert "saving from the host, since the device has no room: CUDA out of memory" in caplog.text
    assert (tmp_path / "held/out/checkpoint-2").is_dir()
    # It goes on as a run that was never held.
    again = tiny_trainer(tmp_path / "held", max_steps=4, **saves)
    assert again.train(resume_from_checkpoint=True).global_step == 4
    plain = tiny_trainer(tmp_path / "plain", max_steps=4, **saves)
    plain.train()
    for one, other in zip(plain.model.parameters(), again.model.parameters()):
        assert torch.equal(one, other)
    for one, other in zip(plain.optimizer.state.values(), again.optimizer.state.values()):
        assert torch.equal(one["exp_avg_sq"], other["exp_avg_sq"])


def test_a_run_that_need_not_end_stays_held_while_its_device_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def during(own: Pauses, trainer: Any) -> None:
        trainer._loop.signals._on_save(0, None)  # as SIGUSR1 asks
        while "nothing is saved or evaluated in this pause" not in caplog.text:
            pass
        assert trainer._parking().is_parked and trainer.commands.is_held
        Crowded.refuses = False
        send(own.inbox, "resume")

    Crowded.refuses = True
    try:
        trainer = tiny_trainer(tmp_path, [PausesAway(during)], max_steps=4)
        assert trainer.train().global_step == 4
    finally:
        Crowded.refuses = True


def test_lent_tensors_are_those_of_the_host_and_share_as_before() -> None:
    model, optimizer = make_state()
    before = [p.detach().clone() for p in model.parameters()]
    slots = [slot["exp_avg"].clone() for slot in optimizer.state.values()]
    parking = StateParking(model, optimizer, CPU)
    parking.park()
    parking.lend()
    assert not parking.is_parked
    for parameter, value in zip(model.parameters(), before):
        assert torch.equal(parameter, value)
    for slot, value in zip(optimizer.state.values(), slots):
        assert torch.equal(slot["exp_avg"], value)
    assert model[2].weight.data_ptr() == model[0].weight.data_ptr()
