"""The Python clients against a real server: events, the end of a run, and being cut off."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import headway.control
from headway.control import AsyncClient, Client, ControlError
from headway.control.discovery import Registration, list_jobs
from headway.control.inbox import Inbox
from headway.control.server import ControlServer
from headway.control.status import StatusBoard
from headway.errors import ConfigError

pytest.importorskip("aiohttp")
JOB = "job-1"
HERE = Path(__file__).parent


class Running:
    def __init__(self) -> None:
        self.board, self.inbox = StatusBoard(JOB), Inbox()
        self.registration = Registration(JOB)
        tokens = {"control": "c" * 64}
        self.server = ControlServer(
            self.board, self.inbox, nonce=self.registration.nonce, tokens=tokens, version="1"
        )
        self.server.start()
        self.registration.write_tokens(tokens)
        self.registration.write_endpoint(
            "127.0.0.1",
            self.server.port,
            None,
            output_dir="out",
            logging_dir=None,
            run_name=None,
            version="1",
        )

    def close(self) -> None:
        self.server.stop()
        self.registration.remove()


@pytest.fixture
def running(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_JOBS_DIR", str(tmp_path / "jobs"))
    job = Running()
    yield job
    job.close()


def answer_one(job, then=lambda: None, **how):
    """In the place of training: take one command, settle it."""

    def take() -> None:
        assert job.inbox.wait_for_command(30)
        (command,) = job.inbox.take()
        if how:
            job.inbox.settle(command.id, **how)
        then()

    thread = threading.Thread(target=take)
    thread.start()
    return thread


def test_commands_are_methods_and_their_receipts_come_back(running):
    thread = answer_one(running, state="applied", step=4)
    receipt = Client("job").pause(offload=True)
    thread.join()
    assert (receipt["command"], receipt["state"], receipt["step"]) == ("pause", "applied", 4)
    with pytest.raises(ConfigError, match="set_learning_rate: give exactly one of scale, value"):
        Client("job").set_learning_rate()
    with pytest.raises(AttributeError):
        Client("job").save  # noqa: B018
    with pytest.raises(AttributeError):
        AsyncClient("job").job  # noqa: B018
    assert not running.inbox.pending


def test_a_run_that_takes_its_files_away_still_answers_who_asked_before(running):
    client = Client(JOB)
    client.status()
    running.registration.remove()
    assert client.status()["job_id"] == JOB


def test_the_same_from_asyncio(running):
    thread = answer_one(running, state="applied", step=5)

    async def steer():
        client = AsyncClient(JOB)
        return (await client.status())["job_id"], await client.set_learning_rate(scale=0.5)

    job_id, receipt = asyncio.run(steer())
    thread.join()
    assert job_id == JOB and receipt["step"] == 5


def test_of_a_run_that_ends_without_a_word_nothing_is_claimed(running):
    thread = answer_one(running, then=running.close)
    with pytest.raises(ControlError, match="what became of graceful_stop is not known"):
        Client(JOB).graceful_stop(timeout_s=30)
    thread.join()


def test_the_receipt_of_a_run_that_ended_comes_with_its_last_events(running):
    def end():
        running.board.announce(
            "command", id="mine", command="abort", state="applied", step=9, message="it ends"
        )
        running.close()

    thread = answer_one(running, then=end)
    receipt = Client(JOB).send("abort", command_id="mine", timeout_s=30)
    thread.join()
    assert (receipt["state"], receipt["step"], receipt["message"]) == ("applied", 9, "it ends")


def test_the_last_events_come_before_the_end(running):
    """Also to a reader whose turn has not come when the server is told to stop."""
    running.board.announce("log", step=1)
    events = Client(JOB).events(after=0)
    assert next(events)["step"] == 1
    running.board.announce("end", step=2)
    assert running.server.stop()
    assert [event["event"] for event in events] == ["end"]


def test_an_unknown_job_is_told_with_the_one_there_is(running):
    client = Client(JOB)
    with pytest.raises(ControlError, match="Not Found") as refused:
        client._request("GET", "/jobs/nope/status", client._headers("read"), None)
    assert refused.value.status == 404 and refused.value.answer["valid_jobs"] == [JOB]


@pytest.mark.parametrize(
    ("command", "end"),
    [("graceful_stop", lambda job: job.server.stop()), ("save_checkpoint", Running.close)],
    ids=["its files are left", "it was not asked to end"],
)
def test_a_run_that_goes_otherwise_has_not_done_what_was_asked(running, command, end):
    thread = answer_one(running, then=lambda: end(running))
    with pytest.raises(ControlError, match="does not answer"):
        Client(JOB).send(command, timeout_s=30)
    thread.join()


def test_events_come_in_order_and_end_with_the_run(running):
    for step in (1, 2):
        running.board.announce("log", step=step)
    running.board.close()
    assert [event["step"] for event in Client(JOB).events(after=0)] == [1, 2]
    assert [event["step"] for event in Client(JOB).events(after=1)] == [2]

    async def read():
        return [event["step"] async for event in AsyncClient(JOB).events(after=0)]

    assert asyncio.run(read()) == [1, 2]


@pytest.mark.timeout(60)
def test_a_reader_that_is_cancelled_lets_go_at_once(running):
    """A thread that goes on reading would keep the program from ending until the run does."""
    running.board.announce("log", step=1)

    async def read():
        seen = []

        async def follow():
            async for event in AsyncClient(JOB).events(after=0):
                seen.append(event["step"])

        task = asyncio.create_task(follow())
        while not seen:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return seen

    assert asyncio.run(read()) == [1]


SERVE = """\
import sys, time
from test_control_client import Running
job = Running()
job.board.announce("log", step=1)
print("up", flush=True)
time.sleep(600)
"""


def test_the_stream_of_a_killed_job_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_JOBS_DIR", str(tmp_path / "jobs"))
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(HERE)!r})\n{SERVE}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "up\n"
        events = Client(JOB).events(after=0)
        assert next(events)["step"] == 1
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(ControlError, match="the job job-1 is gone"):
            next(events)
        (left,) = list_jobs()
        assert not left.alive
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def test_what_the_package_offers():
    assert headway.control.COMMANDS["pause"].fields["offload"].default is False
    assert headway.control.find_job and headway.control.Job
