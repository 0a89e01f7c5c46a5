"""A pause with offload: nobody is told that the device is free before it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from headway import TrainerCallback
from headway.callbacks import TrainerControlCallback
from headway.control.client import Client, ControlError
from headway.control.discovery import find_job
from headway.engine.parking import StateParking
from headway.testing.trainer import tiny_trainer

pytestmark = pytest.mark.timeout(60)
WAIT_S = 30.0


class Device(StateParking):
    """As if the host were a device: it is freed when the test says so, if at all."""

    frees_memory = True
    trouble: str | None = None

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.parked_times = 0

    def park(self) -> None:
        self.begun.set()
        assert self.may_go_on.wait(WAIT_S)
        if self.trouble is not None:
            raise RuntimeError(self.trouble)
        super().park()
        self.parked_times += 1


class Visitor(TrainerCallback):
    """Has `visit` steer the run from another thread; the run ends when it does."""

    def __init__(self, visit: Callable[[Client, Device], Any]) -> None:
        self.visit, self.error = visit, None
        self.thread: threading.Thread | None = None

    def on_train_begin(self, trainer: Any) -> None:
        device = Device(trainer.model, trainer.optimizer, trainer.strategy.device)
        trainer._parking = lambda: device
        self.thread = threading.Thread(target=self._work, args=(trainer, device))

    def on_step_begin(self, state: Any) -> None:
        if self.thread is not None and state.global_step == 0:
            self.thread.start()

    def _work(self, trainer: Any, device: Device) -> None:
        try:
            self.visit(Client(find_job("kite")), device)
        except BaseException as error:
            self.error = error
        finally:
            device.may_go_on.set()
            trainer.cancel_run("the visit is over")


def visit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: Any, *others: TrainerCallback, **args: Any
) -> Any:
    monkeypatch.setenv("HEADWAY_JOBS_DIR", str(folder / "jobs"))
    visitor = Visitor(how)
    settings = {"max_steps": 100_000, "logging_strategy": "no", **args}
    callbacks = [TrainerControlCallback(job_id="kite"), visitor, *others]
    trainer = tiny_trainer(folder, callbacks, **settings)
    trainer.train()
    assert visitor.thread is not None
    visitor.thread.join(WAIT_S)
    if visitor.error is not None:
        raise visitor.error
    return trainer


def wait_for(client: Client, phase: str) -> dict[str, Any]:
    while (status := client.status())["status"] != phase:
        pass
    return status


def test_the_status_is_paused_once_the_device_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steer(client: Client, device: Device) -> None:
        accepted = client.send("pause", {"offload": True}, wait=False)
        assert device.begun.wait(WAIT_S)
        for _ in range(5):
            status = client.status()
            assert (status["status"], status["offloaded"]) == ("pausing", False)
            assert client.receipt(accepted["id"])["state"] == "accepted"
        assert not device.is_parked
        device.may_go_on.set()
        status = wait_for(client, "paused")
        assert device.is_parked and status["offloaded"] is True
        receipt = client.send("pause", {"offload": True}, command_id=accepted["id"])
        assert receipt["state"] == "applied"
        assert receipt["message"] == "the run is held, its weights and optimizer state on the host"
        client.resume()
        while client.status()["offloaded"]:
            pass

    visit(tmp_path, monkeypatch, steer)


def test_a_device_that_is_used_meanwhile_is_not_called_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steer(client: Client, device: Device) -> None:
        device.may_go_on.set()
        client.pause(offload=True)
        events = client.events(after=0)
        device.begun.clear()
        device.may_go_on.clear()
        client.save_checkpoint(wait=False)
        assert device.begun.wait(WAIT_S)
        assert client.status()["status"] != "paused" and not client.status()["offloaded"]
        device.may_go_on.set()
        wait_for(client, "paused")
        assert device.is_parked and device.parked_times == 2
        phases = []
        for event in events:
            if event["event"] == "phase":
                phases.append(event["status"])
            if phases.count("paused") == 2:
                break
        first = phases.index("paused")
        assert phases[first - 1] == "pausing" and phases[-2:] == ["pausing", "paused"]
        assert "saving" in phases[first:]

    visit(tmp_path, monkeypatch, steer)


def test_a_state_that_a_save_still_copies_is_not_moved_before_that_is_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []

    class Copying(TrainerCallback):
        def on_train_begin(self, trainer: Any, state: Any) -> None:
            trainer.strategy.before_apply = lambda: waited.append(state.global_step)

    def steer(client: Client, device: Device) -> None:
        device.may_go_on.set()
        client.pause(offload=True)
        assert device.is_parked
        # In the step itself it is one less: that is counted after its update.
        assert waited[-1] == client.status()["global_step"]

    visit(tmp_path, monkeypatch, steer, Copying())


def test_a_state_that_stays_on_the_device_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "trouble", "no room on the host")

    def steer(client: Client, device: Device) -> None:
        device.may_go_on.set()
        with pytest.raises(ControlError) as failed:
            client.pause(offload=True)
        why = "the state stays on the device: no room on the host"
        assert str(failed.value) == f"the run is held, but {why}"
        status = client.status()
        assert (status["status"], status["offloaded"]) == ("paused", False)
        assert why in [incident["message"] for incident in status["incidents"]]
        first = client.resume()["step"]
        while client.status()["global_step"] <= first:
            pass

    visit(tmp_path, monkeypatch, steer)


def test_a_pause_is_not_told_before_an_evaluation_of_its_step_is_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def steer(client: Client, device: Device) -> None:
        client.evaluate_now(wait=False)
        client.pause()
        seen.extend(event["status"] for event in _until_paused(client))

    def _until_paused(client: Client) -> Any:
        for event in client.events(after=0):
            if event["event"] == "phase":
                yield event
                if event["status"] == "paused":
                    return

    visit(tmp_path, monkeypatch, steer)
    assert seen[-1] == "paused" and seen.count("paused") == 1
    assert "evaluating" in seen
