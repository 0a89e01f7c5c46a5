"""A control server in a real process, and the ways to speak to it: politely, and by raw socket."""

from __future__ import annotations

import dataclasses
import json

import pytest

pytest.importorskip("aiohttp")

from headway.testing.controlled import ControlledProcess, Options


@dataclasses.dataclass
class Answer:
    """What came back on a connection."""

    raw: bytes

    @property
    def status(self):
        """0: nothing came."""
        return int(self.raw.split(b" ", 2)[1]) if self.raw.startswith(b"HTTP/1.") else 0

    @property
    def headers(self):
        lines = self.raw.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}

    @property
    def body(self):
        return self.raw.partition(b"\r\n\r\n")[2]

    @property
    def json(self):
        return json.loads(self.body)


class Target(ControlledProcess):
    """The process under attack."""

    def raw(self, data, *, half_close=False, timeout_s=30.0):
        """Send bytes as they are; returns all that comes back until the other side closes, or
        until an event stream has begun."""
        with self.connect(timeout_s) as mine:
            received = b""
            try:
                mine.sendall(data)
                if half_close:
                    mine.shutdown(1)
                while block := mine.recv(65536):
                    received += block
                    if b"text/event-stream" in received:
                        break
            except ConnectionError:
                pass
            return Answer(received)

    def ask(self, method, path, token=None, body=None, headers=(), host=None):
        """One request with a right Host; `headers` is a list of (name, value), sent as it is."""
        names = {name.lower() for name, _ in headers}
        lines = [f"{method} {path} HTTP/1.1"]
        if "host" not in names:
            lines.append(f"Host: {self.host if host is None else host}")
        if token is not None:
            lines.append(f"Authorization: Bearer {token}")
        if body is not None:
            if "content-type" not in names:
                lines.append("Content-Type: application/json")
            lines.append(f"Content-Length: {len(body)}")
        lines += [f"{name}: {value}" for name, value in headers]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        return self.raw(head + (body or b""))

    def command(self, name="abort", **more):
        return json.dumps({"command": name, **more}).encode()

    def filled(self, path):
        """A route's path with something in place of each of its fields."""
        parts = path.replace("{run_id}", str(self.run_id)).split("/")
        return "/".join("x" if part.startswith("{") else part for part in parts)

    @property
    def control_path(self):
        return f"/jobs/{self.job_id}/control"

    def is_well(self):
        """It answers, and its run was asked nothing."""
        assert self.ask("GET", "/healthz").status == 200
        assert self.take() == []
        return True


@pytest.fixture(scope="session")
def make_target(tmp_path_factory):
    made = []

    def make(*, dashboard=False, **options):
        options.setdefault("root", str(tmp_path_factory.mktemp("jobs")))
        if dashboard:
            folder = tmp_path_factory.mktemp("run")
            lines = [{"type": "train", "global_step": s, "loss": 1.0} for s in range(1, 9)]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / "trainer_logs.jsonl").write_text(text)
            options["output_dir"] = str(folder)
        made.append(Target(Options(**options)))
        return made[-1]

    yield make
    for target in made:
        target.kill()


@pytest.fixture(scope="session")
def _target(make_target, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log.txt"
    found = make_target(limited=False, log=str(log), dashboard=True)
    found.log = log
    return found


@pytest.fixture
def target(_target):
    """A server without limits per second; at the end of a test it lives and was asked nothing."""
    yield _target
    assert _target.is_well()
