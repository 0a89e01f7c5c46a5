"""The background sender: order, drop policy, failures, draining and closing."""

from __future__ import annotations

import logging
import threading

import pytest

from headway.callbacks.remote.sender import Sender
from headway.errors import ConfigError


def _blocked(sender: Sender) -> tuple[threading.Event, threading.Event]:
    """Occupy the thread with a call that waits for the returned second event."""
    started, release = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        release.wait(10)

    sender.submit(wait)
    assert started.wait(10)
    return started, release


def test_calls_run_in_the_order_of_submission_whatever_their_kind() -> None:
    sender, seen = Sender("test"), []
    _, release = _blocked(sender)
    for i in range(20):
        assert sender.submit(lambda i=i: seen.append(i), must_arrive=i % 3 == 0)
    release.set()
    assert sender.close(10)
    assert seen == list(range(20))


def test_submit_does_not_wait_and_the_oldest_droppable_call_gives_way(caplog) -> None:
    sender, seen = Sender("test", capacity=3), []
    _, release = _blocked(sender)
    sender.submit(lambda: seen.append("kept"), must_arrive=True)
    for i in range(5):
        sender.submit(lambda i=i: seen.append(i))
    assert sender.num_waiting == 3
    assert sender.num_dropped == 3
    release.set()
    with caplog.at_level(logging.WARNING):
        assert sender.close(10)
    assert seen == ["kept", 3, 4]
    assert "3 were dropped" in caplog.text


def test_a_queue_full_of_calls_that_must_arrive_refuses_others_and_takes_its_own_kind() -> None:
    sender, seen = Sender("test", capacity=2), []
    _, release = _blocked(sender)
    for i in range(3):
        assert sender.submit(lambda i=i: seen.append(i), must_arrive=True)
    assert not sender.submit(lambda: seen.append("late"))
    release.set()
    assert sender.close(10)
    assert seen == [0, 1, 2]


def test_the_drop_warning_comes_once(caplog) -> None:
    sender = Sender("test", capacity=1)
    _, release = _blocked(sender)
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            sender.submit(lambda: None)
    release.set()
    assert len([r for r in caplog.records if "does not keep up" in r.message]) == 1
    sender.close(10)


def test_a_failing_call_is_a_warning_and_the_next_call_runs(caplog) -> None:
    sender, seen = Sender("service"), []

    def fail(error: BaseException) -> None:
        raise error

    with caplog.at_level(logging.WARNING):
        sender.submit(lambda: fail(OSError("unreachable")))
        for _ in range(50):
            sender.submit(lambda: fail(SystemExit(3)))
        sender.submit(lambda: seen.append("after"))
        assert sender.drain(10)
        told = [r.message for r in caplog.records]
        assert len(told) == 1 and "OSError: unreachable" in told[0] and "service" in told[0]
        assert seen == ["after"]
        sender.close(10)
    assert "51 failed" in caplog.records[-1].message


def test_drain_tells_when_the_time_was_not_enough() -> None:
    sender = Sender("test")
    _, release = _blocked(sender)
    assert not sender.drain(0.01)
    release.set()
    assert sender.drain(10)
    sender.close(10)


def test_close_gives_up_after_its_time_and_takes_nothing_more(caplog) -> None:
    sender, seen = Sender("test"), []
    _, release = _blocked(sender)
    sender.submit(lambda: seen.append("late"), must_arrive=True)
    with caplog.at_level(logging.WARNING):
        assert not sender.close(0.01)
    assert "2 were not sent" in caplog.text
    assert not sender.submit(lambda: None)
    release.set()
    thread = sender._thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive() and seen == []


def test_closing_twice_or_unused_is_harmless() -> None:
    sender = Sender("test")
    assert sender.close(1) and sender.close(1)
    assert sender.is_closed


@pytest.mark.parametrize("capacity", [0, -1, 2.5, True])
def test_a_capacity_that_is_no_count_is_refused(capacity) -> None:
    with pytest.raises(ConfigError, match="capacity"):
        Sender("test", capacity=capacity)
