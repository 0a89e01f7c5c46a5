"""A notice that the machine goes away: by signal, file or server, it counts as a SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headway import ConfigError, TrainerCallback
from headway.callbacks import PreemptionCallback
from headway.callbacks.guard import notices, preemption
from headway.cli.train import exit_code
from headway.testing import tiny_trainer

LONG = 100_000


class Kick(TrainerCallback):
    """Does something at the third step, and goes on until that has led to an end."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def on_step_end(self, state: Any) -> None:
        if state.global_step == 3:
            self.act()


def train(folder: Path, callbacks: list[Any], **arguments: Any) -> Any:
    options = {"max_steps": LONG, "num_samples": 8, "save_strategy": "steps", "save_steps": LONG}
    trainer = tiny_trainer(folder, callbacks, **{**options, "logging_steps": 500, **arguments})
    output = trainer.train()
    saved = sorted(path.name for path in (folder / "out").glob("checkpoint-*"))
    return trainer, output, saved


def kill(name: str) -> Any:
    return lambda: os.kill(os.getpid(), signal.Signals[name])


@pytest.mark.parametrize(
    ("given", "slurm", "sent"),
    [
        (None, False, "SIGUSR2"), (None, True, "SIGUSR1"), (["SIGHUP"], False, "SIGHUP"),
        (["SIGTERM"], False, "SIGTERM"),
    ],
)  # fmt: skip
def test_a_signal_saves_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any, slurm: bool, sent: str
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "17")
    found = signal.getsignal(signal.Signals[sent])
    watcher = PreemptionCallback(given)

    def twice() -> None:  # a second notice does no harm
        kill(sent)()
        if sent != "SIGTERM":
            kill(sent)()

    trainer, output, saved = train(tmp_path, [Kick(twice), watcher])
    assert output.global_step == 3 and saved == ["checkpoint-3"]
    assert exit_code(output) == 143 and trainer.state.outcome == "interrupted"
    assert watcher.notice == (None if sent == "SIGTERM" else sent)
    assert signal.getsignal(signal.Signals[sent]) == found, "the handler is as before"


def test_elsewhere_than_in_slurm_sigusr1_still_saves_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    _, output, saved = train(tmp_path, [Kick(kill("SIGUSR1")), PreemptionCallback()], max_steps=5)
    assert output.interrupted_by is None and saved == ["checkpoint-3", "checkpoint-5"]


def test_a_file_that_appears_is_a_notice(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "notice"
    watcher = PreemptionCallback(file=str(path), poll_interval_s=0.01)
    _, output, saved = train(tmp_path, [Kick(path.touch), watcher])
    assert 3 <= output.global_step < LONG and saved == [f"checkpoint-{output.global_step}"]
    assert exit_code(output) == 143 and str(path) in str(watcher.notice)
    assert str(path) in caplog.text
    assert not any(thread.name == "headway-preemption" for thread in threading.enumerate())


def test_a_file_of_an_earlier_notice_does_not_end_the_next_run(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "notice"
    path.touch()
    os.utime(path, (1, 1))
    watcher = PreemptionCallback(file=str(path), poll_interval_s=0.001)
    _, output, _ = train(tmp_path, [watcher], max_steps=20)
    assert output.global_step == 20 and "written anew" in caplog.text
    _, output, _ = train(tmp_path, [Kick(path.touch), watcher], resume_from_checkpoint=False,
                         overwrite_output_dir=True)  # fmt: skip
    assert output.global_step < LONG


class Metadata:
    """A server of metadata, as clouds have them: the notice comes when a test says so."""

    def __init__(self) -> None:
        self.is_ending = threading.Event()
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.url = ""

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        ending = self.is_ending.is_set()
        if path == "/latest/api/token":
            return (200, "kite") if method == "PUT" else (405, "")
        if path == "/latest/meta-data/spot/instance-action":
            if headers.get("x-aws-ec2-metadata-token") != "kite":
                return 401, ""
            return (200, '{"action": "terminate"}') if ending else (404, "")
        if path.startswith("/metadata/scheduledevents") and headers.get("metadata") == "true":
            return 200, '{"Events": [%s]}' % ('{"EventType": "Preempt"}' if ending else "")
        if path == "/computeMetadata/v1/instance/preempted":
            return 200, "TRUE" if ending else "FALSE"
        if path == "/own":
            return 200, "soon" if ending else "never"
        return 500, ""


@contextmanager
def serve() -> Iterator[Metadata]:
    known = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {key.lower(): value for key, value in self.headers.items()}
            known.asked.append((self.command, self.path, headers))
            status, text = known.answer(self.command, self.path, headers)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    known.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield known
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("cloud", ["aws", "azure", "gce", "own"])
def test_a_server_that_announces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cloud: str
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with serve() as server:
        if cloud == "own":
            options = {"metadata_url": f"{server.url}/own", "metadata_pattern": "soon"}
        else:
            options = {"cloud": cloud}
            monkeypatch.setattr(
                preemption, "cloud_source", lambda name: notices.cloud_source(name, server.url)
            )
        watcher = PreemptionCallback(poll_interval_s=0.01, **options)

        class AfterTwoAnswers(TrainerCallback):
            def on_step_end(self) -> None:
                if len(server.asked) > 3:
                    server.is_ending.set()

        _, output, saved = train(tmp_path, [AfterTwoAnswers(), watcher])
    assert output.global_step < LONG and exit_code(output) == 143
    assert saved == [f"checkpoint-{output.global_step}"] and watcher.notice


def test_an_event_of_another_machine_of_the_set_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {"name": "Kite_1\n", "events": '{"EventType": "Preempt", "Resources": ["kite_%d"]}'}

    def answer(self: Metadata, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if path.startswith("/metadata/instance/compute/name"):
            return (200, answers["name"]) if answers["name"] else (500, "")
        return 200, '{"Events": [%s]}' % (answers["events"] % number)

    monkeypatch.setattr(Metadata, "answer", answer)
    with serve() as server:
        source = notices.cloud_source("azure", server.url)
        number = 2
        assert source.look() is None
        number = 1
        assert source.look() == "a scheduled event: Preempt"
        answers["name"], number = "", 2
        # Where nobody tells this machine's name, it is safer to believe the event.
        assert notices.cloud_source("azure", server.url).look() is not None


def test_a_server_that_is_away_is_told_once_and_costs_nothing(tmp_path: Path, caplog: Any) -> None:
    with serve() as server:
        away = server.url
    watcher = PreemptionCallback(metadata_url=away, poll_interval_s=0.001)
    _, output, _ = train(tmp_path, [watcher], max_steps=20)
    assert output.global_step == 20
    assert caplog.text.count("nobody can tell") == 1


def test_a_server_that_talks_nonsense_is_asked_again(tmp_path: Path, caplog: Any) -> None:
    answers = [b"nonsense\r\n\r\n", b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\ncut",
               b"HTTP/1.0 200 OK\r\n\r\nsoon"]  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve_each() -> None:
            for answer in answers:
                connection, _ = server.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve_each, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        watcher = PreemptionCallback(
            metadata_url=url, metadata_pattern="soon", poll_interval_s=0.001
        )
        _, output, _ = train(tmp_path, [watcher])
        thread.join(10)
    assert output.interrupted_by == "SIGTERM" and watcher.notice
    assert caplog.text.count("nobody can tell") == 1 and "BadStatusLine" in caplog.text


def test_a_file_in_what_is_no_folder_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    watcher = PreemptionCallback(file=str(tmp_path / "plain" / "notice"), poll_interval_s=0.001)
    _, output, _ = train(tmp_path, [watcher], max_steps=3)
    assert output.global_step == 3


def test_a_file_that_cannot_be_looked_at_is_told_at_the_start(tmp_path: Path) -> None:
    watcher = PreemptionCallback(file=str(tmp_path / ("x" * 300)))
    with pytest.raises(ConfigError, match=r"PreemptionCallback: file: .*name too long"):
        train(tmp_path, [watcher], max_steps=3)
