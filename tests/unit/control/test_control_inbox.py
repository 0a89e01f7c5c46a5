"""Commands between threads: taken once, in order, and answered for."""

from __future__ import annotations

import math
import threading

import pytest

from headway.control.inbox import Inbox
from headway.control.schema import BadRequest, Command
from headway.control.status import StatusBoard


def command(number, name="pause", **data):
    return Command(f"id-{number}", name, data)


def test_commands_are_taken_once_and_in_order():
    inbox = Inbox()
    assert not inbox.pending
    for number in range(3):
        assert inbox.submit(command(number)).state == "accepted"
    assert inbox.pending
    assert [c.id for c in inbox.take()] == ["id-0", "id-1", "id-2"]
    assert not inbox.pending and inbox.take() == []


def test_the_same_request_again_is_the_same_request():
    inbox = Inbox()
    inbox.submit(command(1, offload=True))
    assert inbox.submit(command(1, offload=True)).id == "id-1"
    assert len(inbox.take()) == 1
    inbox.settle("id-1", "applied", 7)
    again = inbox.submit(command(1, offload=True))
    assert (again.state, again.step) == ("applied", 7) and not inbox.pending
    with pytest.raises(BadRequest, match="another pause") as raised:
        inbox.submit(command(1, offload=False))
    assert raised.value.status == 409


def test_a_full_inbox_refuses_and_keeps_what_it_has():
    inbox = Inbox(most_waiting=2)
    inbox.submit(command(1)), inbox.submit(command(2))
    with pytest.raises(BadRequest, match="2 commands wait") as raised:
        inbox.submit(command(3))
    assert raised.value.status == 429
    assert [c.id for c in inbox.take()] == ["id-1", "id-2"]
    assert inbox.submit(command(3)).state == "accepted"


def test_receipts_are_bounded_but_open_ones_stay():
    inbox = Inbox(most_waiting=5000)
    inbox.submit(command("open"))
    inbox.take()
    for number in range(2000):
        inbox.submit(command(number))
        inbox.take()
        inbox.settle(f"id-{number}", "applied", number)
    assert inbox.receipt("id-open").state == "accepted"
    assert inbox.receipt("id-1999").step == 1999 and inbox.receipt("id-0") is None


def test_the_end_of_a_run_refuses_what_waits_and_what_comes():
    inbox = Inbox()
    inbox.submit(command(1))
    inbox.close("the run has ended (completed)", step=9)
    assert inbox.receipt("id-1").state == "refused" and inbox.receipt("id-1").step == 9
    with pytest.raises(BadRequest, match="has ended") as raised:
        inbox.submit(command(2))
    assert raised.value.status == 410
    assert inbox.submit(command(1)).state == "refused"  # what is known stays known


def test_a_waiting_thread_is_woken():
    inbox, woken = Inbox(), threading.Event()

    def wait():
        if inbox.wait_for_command(30):
            woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    inbox.submit(command(1))
    thread.join(30)
    assert woken.is_set()
    assert not Inbox().wait_for_command(0.0)


def test_a_status_is_json_whatever_is_published():
    board = StatusBoard("job")

    class Odd:
        shape = ()

        def item(self):
            return float("nan")

    loop = {}
    loop["me"] = loop
    board.publish(
        metrics={"loss": math.inf, 1: Odd(), "deep": loop, "big": 10**400}, note="x" * 9999
    )
    import json

    said = json.loads(json.dumps(board.status, allow_nan=False))
    assert said["metrics"]["loss"] == "inf" and said["metrics"]["1"] == "nan"
    assert said["metrics"]["big"] is None and len(said["note"]) == 4096
    assert said["status"] == "starting"


def test_a_reader_that_is_late_is_told_what_it_missed():
    board = StatusBoard("job")
    for number in range(2000):
        board.announce("step", step=number)
    lost, events = board.events_after(0)
    assert lost == 2000 - len(events) and events[-1][1]["step"] == 1999
    assert board.events_after(board.last_number) == (0, [])
    assert board.events_after(10**9) == (0, [])  # a number of another run


def test_incidents_are_kept_and_announced():
    board = StatusBoard("job")
    board.publish(status="training")
    for number in range(150):
        board.report_incident("nan", "<b>loss</b>", number)
    kept = board.status["incidents"]
    assert len(kept) == 100 and kept[-1]["step"] == 149 and board.status["status"] == "training"
    assert board.events_after(149)[1][0][1]["event"] == "incident"
