"""One outcome of a command for all ranks, whichever of them it comes from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headway.callbacks.control.receipts import Desk
from headway.control.inbox import Inbox
from headway.control.schema import Command
from headway.control.status import StatusBoard


class Acts:
    """This rank can do everything."""

    samples: list[dict[str, str]] = []

    def __init__(self) -> None:
        self.done: list[str] = []

    def find_obstacle(self, command: Command) -> str | None:
        return None

    def act(self, command: Command) -> str:
        self.done.append(command.name)
        return "done"


class Together:
    """This rank, and another one that says what it is told to, question by question."""

    def __init__(self, *answers: tuple[Any, str | None]) -> None:
        self.answers = list(answers)

    def __call__(self, own: Any) -> list[Any]:
        return [own, list(self.answers.pop(0)) if self.answers else own]


def make(*answers: tuple[Any, str | None]) -> tuple[Desk, Acts, Inbox, StatusBoard]:
    acts, inbox, board = Acts(), Inbox(), StatusBoard("kite")
    state = SimpleNamespace(global_step=3)
    return Desk(acts, state, Together(*answers), inbox, board), acts, inbox, board  # type: ignore[arg-type]


def send(desk: Desk, inbox: Inbox, name: str, deaf: list[int] | None = None) -> tuple[str, str]:
    inbox.submit(Command(name, name))
    desk.take(inbox.take_messages(), deaf or [])
    receipt = inbox.receipt(name)
    assert receipt is not None
    assert receipt.step == (3 if receipt.settled_at else None)
    return receipt.state, receipt.message


def test_a_command_that_all_ranks_can_do_is_applied() -> None:
    desk, acts, inbox, board = make()
    assert send(desk, inbox, "resume") == ("applied", "done")
    assert acts.done == ["resume"]
    ((_, event),) = board.events_after(0)[1]
    assert (event["event"], event["command"], event["step"]) == ("command", "resume", 3)


def test_a_pause_is_applied_when_the_run_waits() -> None:
    desk, _, inbox, _ = make()
    assert send(desk, inbox, "pause")[0] == "accepted" and desk.has_open
    desk.note_held(None)
    receipt = inbox.receipt("pause")
    assert receipt is not None and (receipt.state, receipt.message) == ("applied", "done")
    assert not desk.has_open


def test_a_pause_whose_state_stays_on_the_device_says_so() -> None:
    desk, _, inbox, _ = make()
    send(desk, inbox, "pause")
    desk.note_held("the state of rank 1 stays on the device: no room")
    receipt = inbox.receipt("pause")
    assert receipt is not None and receipt.state == "failed"
    assert receipt.message == (
        "the run is held, but the state of rank 1 stays on the device: no room"
    )


def test_a_pause_that_is_taken_back_before_the_run_waits_is_settled() -> None:
    desk, _, inbox, _ = make()
    send(desk, inbox, "pause")
    assert send(desk, inbox, "resume")[0] == "applied" and not desk.has_open
    receipt = inbox.receipt("pause")
    assert receipt is not None and "before it waited" in receipt.message


def test_what_one_rank_cannot_do_none_does() -> None:
    desk, acts, inbox, _ = make(("its device is full", None))
    assert send(desk, inbox, "pause") == ("refused", "its device is full")
    assert acts.done == []


def test_a_run_with_a_rank_that_does_not_listen_refuses() -> None:
    desk, acts, inbox, _ = make()
    state, message = send(desk, inbox, "pause", deaf=[1, 2])
    assert state == "refused" and "no TrainerControlCallback on ranks 1, 2 of the run" in message
    assert acts.done == []


def test_a_failure_names_the_rank() -> None:
    desk, _, inbox, _ = make((None, None), (None, "out of ink"))
    assert send(desk, inbox, "generate_now") == ("failed", "rank 1: out of ink")


def test_ranks_that_would_train_differently_end_the_run() -> None:
    desk, _, inbox, _ = make((None, None), (None, "RuntimeError: no"))
    with pytest.raises(RuntimeError, match="set_learning_rate was done by halves: rank 1"):
        send(desk, inbox, "set_learning_rate")
    receipt = inbox.receipt("set_learning_rate")
    assert receipt is not None and receipt.state == "failed"


def test_a_save_is_applied_when_it_is_committed() -> None:
    desk, _, inbox, _ = make()
    assert send(desk, inbox, "save_checkpoint")[0] == "accepted" and desk.has_open
    desk.note_save(2, "/checkpoint-2")
    desk._state.global_step = 5
    desk.note_step(last_save_step=3)
    assert desk.has_open, "it is still being written"
    desk.note_save(3, "/checkpoint-3")
    receipt = inbox.receipt("save_checkpoint")
    assert receipt is not None and (receipt.state, receipt.step) == ("applied", 3)
    assert receipt.message == "/checkpoint-3" and not desk.has_open


def test_what_did_not_come_about_has_failed() -> None:
    desk, _, inbox, _ = make()
    send(desk, inbox, "save_checkpoint")
    send(desk, inbox, "evaluate_now")
    desk._state.global_step = 4
    desk.note_step(last_save_step=1)
    for name in ("save_checkpoint", "evaluate_now"):
        receipt = inbox.receipt(name)
        assert receipt is not None and (receipt.state, receipt.step) == ("failed", 3)
