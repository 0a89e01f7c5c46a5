"""Slow sockets, floods and hoarders: the server stays within its limits and answers others."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest

from headway.control.listener import ACCEPT_BURST, MOST_CONNECTIONS

BEGUN = b"GET /healthz HTTP/1.1\r\nHost: local"


@contextlib.contextmanager
def holding(target, number, begun=BEGUN):
    """So many connections that have begun a request and do not end it, all at once."""
    held = []
    try:
        for _ in range(number):
            mine = socket.socket()
            mine.setblocking(False)
            mine.connect_ex(("127.0.0.1", target.port))
            held.append(mine)
        for mine in held:
            with contextlib.suppress(OSError):
                mine.setblocking(False)
                mine.send(begun)
        yield held
    finally:
        for mine in held:
            mine.close()


def is_ended(mine):
    try:
        return mine.recv(1) == b""
    except ConnectionError:
        return True
    except OSError:
        return False


def time_answer(target):
    began = time.monotonic()
    answer = target.ask("GET", f"/jobs/{target.job_id}/status", target.tokens["read"])
    assert answer.status == 200, answer.raw[:200]
    return time.monotonic() - began


@pytest.fixture
def limited(make_target):
    """With all limits, and few descriptors to spare for the run."""
    return make_target(num_descriptors=MOST_CONNECTIONS + 100)


def test_a_thousand_slow_sockets_keep_nobody_out_and_take_no_descriptors(limited):
    before = limited.look()
    done = limited.begin_steps(6.0)
    with holding(limited, 1000) as held:
        times = [time_answer(limited) for _ in range(10)]
        done()
        during = limited.look()
        assert sum(map(is_ended, held)) > 20  # the first had to make room for those after them
    # Linux tries again after a second where the queue of connections was full, then after two.
    assert max(times) < 4.0 and sorted(times)[len(times) // 2] < 1.0, times
    assert during["num_descriptors"] <= before["num_descriptors"] + MOST_CONNECTIONS + 1
    assert during["can_open"] and during["num_threads"] <= before["num_threads"] + 1
    assert during["rss_bytes"] - before["rss_bytes"] < 10 << 20
    assert limited.take() == [] and limited.end() == 0


def test_connections_that_come_to_nothing_are_ended(make_target):
    limited = make_target(patience_s=1.0)
    with holding(limited, 5) as held:
        limited.ask("GET", "/healthz")  # so all five were accepted
        deadline = time.monotonic() + 30
        for mine in held:
            mine.setblocking(True)
            mine.settimeout(max(0.1, deadline - time.monotonic()))
            with contextlib.suppress(ConnectionError):
                assert mine.recv(1) == b""
    assert limited.look()["num_descriptors"] < 30
    assert limited.end() == 0


def test_byte_by_byte_wakes_the_server_a_few_times_only(limited):
    """What it costs is what training loses."""

    def cpu_s():
        text = Path(f"/proc/{limited.pid}/stat").read_text()
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    sent = 0
    with holding(limited, 50, b"GET /") as held:
        assert time_answer(limited) < 4.0
        before, began = cpu_s(), time.monotonic()
        while time.monotonic() - began < 2.0:
            for mine in held:
                with contextlib.suppress(OSError):
                    sent += mine.send(b"a")
        used = cpu_s() - before
    assert sent > 2000
    assert used < 0.4, (used, sent)
    assert limited.end() == 0


def flood(target, request, seconds):
    """As many requests as two threads can send; returns how many were answered how."""
    counts = {}
    lock = threading.Lock()
    end = time.monotonic() + seconds

    def run():
        while time.monotonic() < end:
            try:
                status = target.raw(request, timeout_s=5.0).status
            except OSError:
                status = -1
            with lock:
                counts[status] = counts.get(status, 0) + 1

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


@pytest.mark.slow
def test_a_flood_of_strangers_is_slowed_down(make_target):
    target = make_target()
    request = f"GET /jobs HTTP/1.1\r\nHost: {target.host}\r\n\r\n".encode()
    flood(target, request, 20.0)
    counts = flood(target, request, 4.0)  # the burst is over
    assert set(counts) <= {401, 0, -1}
    assert sum(counts.values()) < 250, counts
    assert time_answer(target) < 10.0
    assert target.take() == [] and target.end() == 0


def test_a_flood_of_the_owner_is_slowed_down(make_target):
    target = make_target()
    head = f"GET /jobs/{target.job_id}/status HTTP/1.1\r\nHost: {target.host}\r\n"
    request = f"{head}Authorization: Bearer {target.tokens['read']}\r\n\r\n".encode()
    counts = flood(target, request, 5.0)
    assert set(counts) == {200}
    assert counts[200] < ACCEPT_BURST, counts
    assert target.end() == 0


def test_streams_are_few_and_a_reader_that_does_not_read_is_let_go(make_target):
    target = make_target(limited=False)
    head = f"GET /jobs/{target.job_id}/events HTTP/1.1\r\nHost: {target.host}\r\n"
    request = f"{head}Authorization: Bearer {target.tokens['read']}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(16):
            mine = stack.enter_context(target.connect())
            mine.sendall(request)
            assert mine.recv(200).startswith(b"HTTP/1.1 200 ")
        assert target.raw(request).status == 429
    deadline = time.monotonic() + 30
    while target.raw(request).status != 200:  # the places of those that left are free again
        target.publish(global_step=1)
        assert time.monotonic() < deadline


def test_commands_are_refused_when_too_many_wait(target):
    body = [target.command("status", id=f"wait-{i}") for i in range(100)]
    token = target.tokens["control"]
    statuses = [target.ask("POST", target.control_path, token, each).status for each in body]
    assert statuses.count(200) == 64 and statuses.count(429) == 36
    assert len(target.take()) == 64
