"""A real server over real sockets: routes, roles, and what it refuses."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import stat
import threading

import pytest

from headway.control.client import Client, ControlError
from headway.control.discovery import Registration, list_jobs
from headway.control.inbox import Inbox
from headway.control.openapi import describe
from headway.control.schema import BadRequest, Command
from headway.control.server import ControlServer
from headway.control.status import StatusBoard
from headway.errors import ConfigError

pytest.importorskip("aiohttp")
CONTROL, READ = "c" * 64, "r" * 64
JOB = "job-1"
ROUTES = {
    ("GET", "/metrics"): "read",
    ("GET", "/openapi.json"): "read",
    ("GET", "/jobs"): "read",
    ("GET", f"/jobs/{JOB}/status"): "read",
    ("GET", f"/jobs/{JOB}/commands/known"): "read",
    ("GET", f"/jobs/{JOB}/events"): "read",
    ("POST", f"/jobs/{JOB}/control"): "control",
    ("GET", "/nothing"): "read",
}


class Running:
    """A server, its job's files, and a training thread's side of it."""

    def __init__(self, root, **options):
        self.board, self.inbox = StatusBoard(JOB), Inbox()
        self.registration = Registration(JOB, root)
        tokens = {"control": CONTROL, "read": READ}
        self.server = ControlServer(
            self.board,
            self.inbox,
            **{"nonce": self.registration.nonce, "tokens": tokens, "version": "1", **options},
        )
        self.server.start()
        self.registration.write_tokens(tokens)
        self.registration.write_endpoint(
            self.server.host,
            self.server.port,
            self.server.unix_socket,
            output_dir="out",
            logging_dir=None,
            run_name=None,
            version="1",
        )
        self.root = root

    @property
    def host(self):
        return f"127.0.0.1:{self.server.port}"

    def client(self, **options):
        (job,) = list_jobs(self.root)
        return Client(job, **options)

    def ask(self, method, path, token=CONTROL, body=None, **headers):
        """(status, answer, headers) of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        if token is not None:
            headers.setdefault("Authorization", f"Bearer {token}")
        if body is not None:
            headers.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            if answer.getheader("Content-Type", "").startswith("text/event-stream"):
                return answer.status, None, dict(answer.getheaders())
            return answer.status, answer.read(), dict(answer.getheaders())
        finally:
            connection.close()

    def raw(self, data, timeout_s=30):
        """What comes back on a socket of its own, to the end."""
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=timeout_s) as mine:
            mine.sendall(data)
            received = b""
            while block := mine.recv(65536):
                received += block
            return received


@pytest.fixture
def running(tmp_path):
    found = Running(tmp_path / "jobs")
    found.inbox.submit(Command("known", "status"))
    found.inbox.take()
    yield found
    assert found.server.stop()


def test_every_route_asks_for_its_role(running):
    body = json.dumps({"command": "pause", "id": "p"})
    for (method, path), needs in ROUTES.items():
        sent = body if method == "POST" else None
        for token in (None, "", "x", CONTROL[:-1], CONTROL + "c", "é" * 64):
            status, answer, headers = running.ask(method, path, token, sent)
            assert status == 401, (path, token)
            assert headers["WWW-Authenticate"] == 'Bearer realm="headway"'
            assert json.loads(answer) == {"error": "authentication required"}
        expected = 404 if path == "/nothing" else 200
        assert running.ask(method, path, READ, sent)[0] == (expected if needs == "read" else 403)
        assert running.ask(method, path, CONTROL, sent)[0] == expected
    assert [c.name for c in running.inbox.take()] == ["pause"]


def test_routes_are_those_of_the_description(running):
    paths = set(describe("1")["paths"])
    known = {
        route.replace(JOB, "{job_id}").replace("/commands/known", "/commands/{command_id}")
        for _, route in ROUTES
    }
    assert paths == (known - {"/nothing"}) | {"/healthz"}


@pytest.mark.parametrize("method", ["DELETE", "PUT", "PATCH", "OPTIONS", "HEAD", "TRACE", "POST"])
def test_other_methods_do_nothing(running, method):
    status, _, _ = running.ask(method, f"/jobs/{JOB}/status", body="{}")
    assert status == 405
    headers = {"X-HTTP-Method-Override": "POST"}
    body = json.dumps({"command": "abort"})
    assert running.ask("GET", f"/jobs/{JOB}/control", body=body, **headers)[0] == 405
    assert not running.inbox.pending


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:{port}"},
        {"Host": "127.0.0.1.evil.example:{port}"},
        {"Host": "localhost:x"},
        {"Host": "10.0.0.1:{port}"},
        {"Host": ""},
        {"Host": "[::1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:{port}"},
        {"Origin": "file://"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
@pytest.mark.parametrize("path", [f"/jobs/{JOB}/control", "/healthz"])
def test_pages_of_other_sites_are_refused(running, headers, path):
    sent = {key: value.format(port=running.server.port) for key, value in headers.items()}
    method = "POST" if path.endswith("control") else "GET"
    body = json.dumps({"command": "abort"}) if method == "POST" else None
    status, _, answered = running.ask(method, path, CONTROL, body, **sent)
    assert status == (421 if "Host" in headers else 403)
    assert not any(name.lower().startswith("access-control") for name in answered)
    assert not running.inbox.pending


@pytest.mark.parametrize("host", ["{host}", "127.0.0.1:8000", "localhost:8000", "localhost"])
def test_the_page_of_this_server_is_not_refused(running, host):
    """Also where it comes by a tunnel, `ssh -L 8000:127.0.0.1:PORT`."""
    host = host.format(host=running.host)
    headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    body = json.dumps({"command": "pause"})
    assert running.ask("POST", f"/jobs/{JOB}/control", CONTROL, body, **headers)[0] == 200


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""],
)
def test_what_a_form_can_send_is_refused(running, kind):
    body = json.dumps({"command": "abort"})
    status, _, _ = running.ask("POST", f"/jobs/{JOB}/control", body=body, **{"Content-Type": kind})
    assert status == 415 and not running.inbox.pending


def test_answers_tell_browsers_to_trust_nothing(running):
    for path in ("/healthz", f"/jobs/{JOB}/status", "/nothing"):
        headers = running.ask("GET", path)[2]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Content-Security-Policy"].startswith(
            "default-src 'none'; script-src 'self'"
        )
        assert "unsafe-inline" not in headers["Content-Security-Policy"].split("style-src")[0]
        assert headers["Cache-Control"] == "no-store" and headers["X-Frame-Options"] == "DENY"
        assert "aiohttp" not in headers.get("Server", "")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\r\n\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /jobs HTTP/1.1\r\n\r\n",
        b"GET /jobs HTTP/1.1\r\nHost: localhost:{port}\r\nHost: localhost:{port}\r\n\r\n",
        b"POST /jobs/job-1/control HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /jobs/job-1/control HTTP/1.1\r\nHost: localhost:{port}\r\n"
        b"Content-Length: -1\r\n\r\n",
        b"POST /jobs/job-1/control HTTP/1.1\r\nHost: localhost:{port}\r\n"
        b"Content-Length: 9223372036854775808\r\n\r\n",
        b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 20000 + b"\r\n\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n\r\n",
        b"GET /jobs/..%2f..%2fetc HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_malformed_requests_are_refused_and_the_server_lives(running, request_bytes):
    port = str(running.server.port).encode()
    with socket.create_connection(("127.0.0.1", running.server.port), timeout=30) as mine:
        mine.sendall(request_bytes.replace(b"{port}", port))
        mine.shutdown(socket.SHUT_WR)
        received = mine.recv(65536)
    assert received == b"" or received.split()[1][:1] == b"4", received[:100]
    assert running.ask("GET", "/healthz", None)[0] == 200
    assert not running.inbox.pending


def test_bodies_are_limited(running):
    path = f"/jobs/{JOB}/control"
    assert running.ask("POST", path, body=b" " * 70000)[0] == 413
    bomb = {"Content-Encoding": "gzip"}
    assert running.ask("POST", path, body=b"\x1f\x8b\x08", **bomb)[0] == 415
    status, answer, _ = running.ask("POST", path, body=b'{"command": "explode"}')
    assert status == 400 and "abort" in json.loads(answer)["valid_commands"]
    assert running.ask("GET", f"/jobs/{JOB}/commands/never")[0] == 404
    assert running.ask("GET", "/jobs/other/status")[0] == 404
    assert not running.inbox.pending


def test_a_flood_of_idle_connections_keeps_nobody_out(running):
    held = []
    for _ in range(150):
        held.append(socket.create_connection(("127.0.0.1", running.server.port), timeout=30))
        held[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: local")
    try:
        assert running.ask("GET", f"/jobs/{JOB}/status")[0] == 200
    finally:
        for each in held:
            each.close()


def test_the_client_drives_a_run(running):
    running.board.publish(status="training", global_step=4, metrics={"loss": 1.5})
    client = running.client()
    assert client.status()["global_step"] == 4
    done = threading.Event()

    def train():
        while not done.is_set():
            if running.inbox.wait_for_command(0.1):
                for command in running.inbox.take():
                    refused = command.name == "extend_max_steps"
                    running.inbox.settle(
                        command.id, "refused" if refused else "applied", 5, "no" * refused
                    )

    thread = threading.Thread(target=train)
    thread.start()
    try:
        receipt = client.set_learning_rate(scale=0.5)
        assert (receipt["state"], receipt["step"]) == ("applied", 5)
        with pytest.raises(ControlError, match="no"):
            client.extend_max_steps(by=10)
        with pytest.raises(ConfigError, match="scale must be a number above 0"):
            client.set_learning_rate(scale=-1)
        with pytest.raises(ConfigError, match="did you mean 'pause'"):
            client.send("pausee")
    finally:
        done.set()
        thread.join(30)
    with pytest.raises(ControlError, match="took no effect within 0 s"):
        client.pause(timeout_s=0.0)


def test_the_client_follows_events_to_the_end_of_the_run(running):
    for step in range(3):
        running.board.announce("step", step=step)
    events = running.client().events(after=1)
    assert next(events)["step"] == 1
    assert next(events)["step"] == 2
    running.board.announce("end", outcome="completed")
    assert next(events)["outcome"] == "completed"
    running.board.close()
    assert list(events) == []


def test_a_client_sends_no_token_to_somebody_else(running, tmp_path):
    (job,) = list_jobs(running.root)
    impostor = Running(tmp_path / "elsewhere")
    try:
        path = job.folder / "endpoint.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "port": impostor.server.port}))
        with pytest.raises(ControlError, match="is not that job"):
            running.client().abort()
        assert not impostor.inbox.pending and not running.inbox.pending
    finally:
        impostor.server.stop()


def test_prometheus_reads_the_status(running):
    running.board.publish(
        status="paused", global_step=7, metrics={'a"b\n\\': 2.5, "bad": float("nan"), "text": "x"}
    )
    text = running.ask("GET", "/metrics")[1].decode()
    assert f'headway_step{{job_id="{JOB}"}} 7' in text
    assert f'headway_phase{{job_id="{JOB}",phase="paused"}} 1' in text
    assert f'headway_metric{{job_id="{JOB}",name="a\\"b\\n\\\\"}} 2.5' in text
    assert 'name="bad"} NaN' in text and 'name="text"' not in text


def test_a_unix_socket_is_for_its_user_only(tmp_path):
    path = str(tmp_path / "s")
    running = Running(tmp_path / "jobs", unix_socket=path)
    try:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert running.client().status()["job_id"] == JOB
        with pytest.raises(ConfigError, match=r"unix_socket=.*cannot listen"):
            Running(tmp_path / "more", unix_socket=path)
    finally:
        running.server.stop()


@pytest.mark.parametrize(
    ("port", "tls", "passes"), [(80, False, True), (443, True, True), (443, False, False)]
)
def test_a_host_without_a_port_means_the_usual_one_of_the_protocol(port, tls, passes):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if tls else None
    server = ControlServer(
        StatusBoard(JOB),
        Inbox(),
        nonce="n",
        tokens={"read": READ},
        version="1",
        host="::",
        tls=context,
    )
    server.port = port  # one that a test cannot listen on
    guard = server._make_guard()
    for host in ("10.1.2.3", "[fd00::1]"):
        if passes:
            guard.check("GET", {}, "public", [host])
        else:
            with pytest.raises(BadRequest, match="does not answer to that Host"):
                guard.check("GET", {}, "public", [host])


def test_an_open_address_needs_a_token(tmp_path):
    with pytest.raises(ConfigError, match=r"host='0.0.0.0' can be reached .* needs a token"):
        Running(tmp_path, host="0.0.0.0", tokens={})
    running = Running(tmp_path, host="0.0.0.0")
    try:
        assert running.client().status()["job_id"] == JOB
        for host, expected in (("10.1.2.3", 200), ("evil.example", 421)):
            sent = {"Host": f"{host}:{running.server.port}"}
            assert running.ask("GET", f"/jobs/{JOB}/status", **sent)[0] == expected
    finally:
        running.server.stop()


def test_a_port_that_is_taken_is_an_error_at_once(running, tmp_path):
    with pytest.raises(ConfigError, match=f"port {running.server.port}: Address already in use"):
        Running(tmp_path / "second", port=running.server.port)


def test_without_authentication_only_this_machine_and_no_page_of_another_site(tmp_path):
    running = Running(tmp_path, tokens={})
    try:
        assert running.ask("GET", f"/jobs/{JOB}/status", None)[0] == 200
        status = running.ask("GET", f"/jobs/{JOB}/status", None, Host="evil.example")[0]
        assert status == 421
    finally:
        running.server.stop()
