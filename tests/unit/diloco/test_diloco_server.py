"""A real server over real sockets: the whole protocol, roles, refusals, restarts."""

from __future__ import annotations

import http.client
import json
import logging
import os
import shutil
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from headway.diloco import DiLoCoClient, DiLoCoServer, Specification, replay
from headway.diloco.compression import decode, encode
from headway.diloco.faults import Refused, RoundOver, UnknownSession, Unreachable, VersionMismatch
from headway.diloco.rounds import Refusal
from headway.diloco.specification import canonical_json
from headway.diloco.wire import CONTENT_TYPE, Message, compose
from headway.errors import ConfigError
from headway.testing.proofs.diloco_hostile import prove_hostile
from headway.testing.proofs.diloco_server_kills import prove_server_kills
from headway.testing.proofs.outcome import memory_folder

pytest.importorskip("aiohttp")
MODEL = {f"layers.{n}.w": torch.linspace(-1, 1, 20).reshape(4, 5) * (n + 1) for n in range(4)}
SPEC = Specification.of(MODEL)
READ = "read-" + "r" * 32


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as place:
        yield place


@pytest.fixture
def running(folder: Path) -> Iterator[Any]:
    """Starts servers in one folder; all are stopped at the end."""
    started: list[DiLoCoServer] = []

    def start(model: Any = MODEL, **options: Any) -> DiLoCoServer:
        given = {"output_dir": folder / "run", "num_workers": 2, **options}
        server = DiLoCoServer(model, **given)
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        assert server.stop()


class Player:
    """A worker that speaks the protocol by hand."""

    def __init__(self, server: DiLoCoServer, name: str, comm: str = "float32", **facts: Any):
        self.name, self.comm, self.server = name, comm, server
        self.client = DiLoCoClient(server.address, facts.pop("token", server.token))
        self.facts = {
            "worker_id": name, "sync_every": 10, "num_fragments": server.options.num_fragments,
            "comm": comm, "step": 0, "group": {"world_size": 1, "strategy": "single"},
            "model": {"fingerprint": SPEC.fingerprint, "layout": SPEC.layout}, **facts,
        }  # fmt: skip
        self.register()

    def register(self, **more: Any) -> dict[str, Any]:
        self.said = self.client.register({**self.facts, **more})
        self.session, self.rounds = self.said["session"], self.said["round_id"]
        return self.said

    def message(self, seed: int = 0, fragment: int = 0, **meta: Any) -> Message:
        names = self.server.core.state.fragments[fragment]
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {n: torch.randn(MODEL[n].shape, generator=generator) for n in names}
        return compose(meta, encode(self.tensors, self.comm).payloads)

    def submit(self, message: Message, fragment: int = 0, **query: Any) -> dict[str, Any]:
        said = {"worker": self.name, "session": self.session, "fragment": fragment, **query}
        round_id = said.pop("round", None) or self.rounds[fragment]
        return self.client.submit(message, **{"round": round_id, "local_steps": 5, **said})

    def wait(self, round_id: str | None = None, fragment: int = 0, wait_s: float = 20.0) -> Any:
        return self.client.ask_round(
            round_id or self.rounds[fragment], fragment, self.name, self.session, wait_s=wait_s
        )

    def fetch(self, fragment: int = 0, **query: Any) -> tuple[dict, dict[str, torch.Tensor]]:
        shapes = SPEC.select(self.server.core.state.fragments[fragment])
        header, payloads = self.client.fetch(
            fragment, shapes, worker=self.name, session=self.session, **query
        )
        self.rounds[fragment] = header.meta["round_id"]
        return header.meta, {n: decode(p) for n, p in payloads.items()}


def refused(status: int, reason: str, act: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        act()
    assert (caught.value.status, caught.value.answer.get("reason")) == (status, reason)
    return caught.value


def ask(
    server: DiLoCoServer,
    method: str,
    path: str,
    token: str | None,
    body: Any = None,
    **headers: str,
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    try:
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


# -- rounds -------------------------------------------------------------------------------------


def test_two_workers_and_the_mean_of_what_they_sent(running: Any) -> None:
    server = running(outer_lr=1.0, outer_momentum=0.0, accumulate="float64")
    a, b = Player(server, "a"), Player(server, "b", "bf16")
    assert a.said["server"]["fragments"] == [list(MODEL)] and a.rounds == b.rounds
    assert a.said["server"]["mode"] == "sync" and a.said["server"]["has_parameters"] is True
    meta, start = a.fetch()
    assert meta["version"] == 0 and all(torch.equal(start[n], MODEL[n]) for n in MODEL)
    assert a.submit(a.message(1))["state"] == "accepted"
    waiting = a.wait(wait_s=0)
    assert (waiting["state"], waiting["num_submitted"], waiting["submitted"]) == ("open", 1, True)
    b.submit(b.message(2))
    done = a.wait()
    assert done["state"] == "committed" and done["counted"] is True
    meta, found = a.fetch()
    assert meta["round_id"] == done["next_round_id"] and meta["version"] == 1
    for name in MODEL:
        sent = a.tensors[name].double() + b.tensors[name].bfloat16().double()
        assert torch.equal(found[name], (MODEL[name].double() - sent / 2).float())


def test_one_worker_that_sends_its_parameters_gets_them_back_bit_for_bit(running: Any) -> None:
    server = running(num_workers=1, outer_lr=1.0, outer_momentum=0.0, accumulate="float64")
    worker = Player(server, "a")
    for seed in range(3):
        base = worker.rounds[0]
        worker.submit(worker.message(seed, payload="local", base=base))
        worker.wait()
        _, found = worker.fetch()
        for name, tensor in worker.tensors.items():
            assert torch.equal(found[name].view(torch.int32), tensor.view(torch.int32))
    old = worker.message(9, payload="local", base="r-1-00000000")
    refused(422, "shape", lambda: worker.submit(old))


def test_submissions_are_idempotent_and_others_refused(running: Any) -> None:
    server = running()
    a, b = Player(server, "a"), Player(server, "b")
    before = server.state_hash
    first = a.submit(a.message(1))
    assert a.submit(a.message(1)) == first
    refused(409, "duplicate", lambda: a.submit(a.message(2)))
    b.submit(b.message(3))
    old = a.rounds[0]
    assert a.wait()["state"] == "committed"
    after = server.state_hash
    assert after != before
    again = a.submit(a.message(1))
    assert again == {"state": "committed", "receipt": first["receipt"]}
    with pytest.raises(RoundOver) as caught:
        a.submit(a.message(2))
    assert caught.value.answer["round_id"] == server.core.book.rounds[0].id != old
    assert server.state_hash == after


def test_what_is_wrong_is_refused_with_a_reason_and_changes_nothing(running: Any) -> None:
    server = running(max_update_norm=50.0)
    a = Player(server, "a")
    before = (server.state_hash, server.core.book.known())
    a.fetch()
    names = server.core.state.fragments[0]

    def send(tensors: dict, comm: str = "float32", **query: Any) -> Any:
        return lambda: a.submit(compose({}, encode(tensors, comm).payloads), **query)

    good = {n: torch.ones(4, 5) for n in names}
    refused(422, "shape", send({**good, names[0]: torch.ones(5, 4)}))
    refused(422, "shape", send({n: good[n] for n in names[1:]}))
    refused(422, "shape", send(good, "bf16"))
    for bad in (float("nan"), float("inf")):
        poisoned = {**good, names[2]: torch.full((4, 5), bad)}
        refused(422, "non_finite", send(poisoned))
    refused(422, "norm", send({**good, names[1]: torch.full((4, 5), 50.0)}))
    refused(410, "round_over", send(good, round="r-1-00000000"))
    refused(404, "unknown_session", send(good, session="0" * 32))
    refused(404, "unknown_worker", send(good, worker="nobody"))
    refused(422, "bad_request", send(good, fragment=1, round=a.rounds[0]))
    refused(400, "bad_request", send(good, local_steps=0))
    assert (server.state_hash, server.core.book.known()) == before
    assert not server.core.book.rounds[0].submissions
    assert list(server.core.ledger.incoming.iterdir()) == []
    status = a.client.status()
    assert status["refused"]["non_finite"] == 2 and status["workers"][0]["num_refused"] > 5
    a.submit(compose({}, encode(good, "float32").payloads))


def test_a_body_of_many_megabytes_is_streamed_and_limits_hold(running: Any) -> None:
    large = {"w": torch.randn(3_000_000)}
    server = running(large, num_workers=1, outer_momentum=0.0, outer_lr=1.0)
    spec = Specification.of(large)
    client = DiLoCoClient(server.address, server.token)
    model = {"fingerprint": spec.fingerprint, "layout": spec.layout}
    said = client.register({"worker_id": "a", "model": model, "sync_every": 1, "comm": "float32"})
    gradient = {"w": torch.randn(3_000_000)}
    message = compose({}, encode(gradient, "float32").payloads)
    query = {"worker": "a", "session": said["session"], "round": said["round_id"][0],
             "fragment": 0, "local_steps": 1}  # fmt: skip
    client.submit(message, **query)
    assert client.ask_round(query["round"], 0, "a", said["session"], wait_s=20)["counted"]
    _, payloads = client.fetch(0, spec.shapes, worker="a", session=said["session"])
    assert torch.equal(decode(payloads["w"]), large["w"] - gradient["w"])
    bad = {"w": torch.full((3_000_000,), float("nan"))}
    query["round"] = server.core.book.rounds[0].id
    refused(422, "non_finite", lambda: client.submit(
        compose({}, encode(bad, "float32").payloads), **query))  # fmt: skip
    wrong = compose({}, encode({"w": torch.zeros(3_000_001)}, "float32").payloads)
    refused(422, "shape", lambda: client.submit(wrong, **query))


def test_a_round_goes_on_without_the_late_and_the_gone(running: Any) -> None:
    server = running(num_workers=3, min_workers=1, heartbeat_s=0.2, missed_heartbeats=1.0)
    a, _gone = Player(server, "a"), Player(server, "b")
    Player(server, "c").client.deregister(
        {"worker_id": "c", "session": server.core.book.workers["c"].session}
    )
    a.submit(a.message(1))
    deadline = time.monotonic() + 20
    while a.wait(wait_s=0.05)["state"] == "open":
        a.client.heartbeat({"worker_id": "a", "session": a.session, "step": 1})
        assert time.monotonic() < deadline
    status = a.client.status()
    assert status["num_evicted"] == 1 and [w["id"] for w in status["workers"]] == ["a"]
    assert status["last_num_workers"] == 1
    b = Player(server, "b")  # its id is free again
    assert b.rounds == [server.core.book.rounds[0].id]


def test_the_deadline_ends_a_round(running: Any) -> None:
    server = running(num_workers=2, deadline_s=0.3)
    a, b = Player(server, "a"), Player(server, "b")
    a.submit(a.message(1))
    assert a.wait()["state"] == "committed"
    with pytest.raises(RoundOver):
        b.submit(b.message(2))
    assert b.wait()["counted"] is False


def test_asynchronous_updates_are_applied_as_they_come(running: Any) -> None:
    server = running(mode="async", outer_lr=1.0, outer_momentum=0.5, async_delay=2,
                     accumulate="float64")  # fmt: skip
    a, b = Player(server, "a"), Player(server, "b")
    a.submit(a.message(1))
    assert a.wait()["counted"] is True
    b.submit(b.message(2))  # for the first round, which is over: one update stale
    assert b.wait()["counted"] is True
    _, found = b.fetch()
    for name, start in MODEL.items():
        one, two = a.tensors[name].double(), b.tensors[name].double()
        middle = (start.double() - one / 2).float().double()
        velocity = (one + two) / 2
        wanted = (middle - two / 2) - velocity * 0.5
        assert torch.equal(found[name], wanted.float())
    assert b.submit(b.message(2), round=a.rounds[0])["state"] == "committed"
    assert server.core.state.commit == 2


def test_fragments_have_rounds_of_their_own_over_the_wire(running: Any) -> None:
    server = running(num_fragments=2, num_workers=1, outer_lr=1.0, outer_momentum=0.0)
    worker = Player(server, "a")
    assert [n for part in worker.said["server"]["fragments"] for n in part] == list(MODEL)
    worker.submit(worker.message(1, 1), 1)
    worker.wait(fragment=1)
    moved = dict(worker.tensors)
    _, first = worker.fetch(0)
    _, second = worker.fetch(1)
    assert all(torch.equal(first[n], MODEL[n]) for n in first)
    assert all(torch.equal(second[n], MODEL[n] - moved[n]) for n in second)
    header, _ = worker.client.fetch(
        0, SPEC.select(list(first)), worker="a", session=worker.session, dtype="bf16"
    )
    assert {t[0] for t in header.tensors.values()} == {"bfloat16"}


def test_slower_workers_are_told_to_do_fewer_steps_and_count_for_less(running: Any) -> None:
    server = running(dylu=True, sync_every=100, outer_lr=1.0, outer_momentum=0.0)
    fast, slow = Player(server, "fast"), Player(server, "slow")
    for worker, speed in ((fast, 8.0), (slow, 2.0)):
        answer = worker.client.heartbeat(
            {"worker_id": worker.name, "session": worker.session, "step": 3,
             "steps_per_second": speed}
        )  # fmt: skip
    assert answer["sync_every"] == 25 and answer["round_id"] == slow.rounds
    fast.submit(fast.message(1), local_steps=75)
    slow.submit(slow.message(2), local_steps=25)
    fast.wait()
    _, found = fast.fetch()
    for name in MODEL:
        mean = (fast.tensors[name] * 75 + slow.tensors[name] * 25) / 100
        assert torch.equal(found[name], MODEL[name] - mean)


# -- the first parameters -----------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, SPEC])
def test_the_first_worker_brings_the_parameters(running: Any, model: Any) -> None:
    server = running(model)
    a, b = Player(server, "a"), Player(server, "b")
    assert a.said["server"]["has_parameters"] is False
    refused(409, "no_parameters", lambda: a.client.fetch(0, SPEC.shapes, worker="a",
                                                         session=a.session))  # fmt: skip
    message = compose({}, encode(MODEL, "float32").payloads)
    assert a.client.upload(message, worker="a", session=a.session)["round_id"] == a.rounds
    refused(409, "not_first", lambda: b.client.upload(message, worker="b", session=b.session))
    _, found = b.fetch()
    assert all(torch.equal(found[n], MODEL[n]) for n in MODEL)


def test_a_model_that_is_only_claimed_to_be_large_takes_no_memory(
    running: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = running(None, disable_auth=True)
    size = 1 << 44
    spec = Specification.from_layout([["w", [size], "float32", True]])
    model = {"fingerprint": spec.fingerprint, "layout": spec.layout}
    player = Player(server, "a", model=model)
    header: dict[str, Any] = {
        "meta": {},
        "tensors": [
            {
                "name": "w",
                "dtype": "float32",
                "shape": [size],
                "length": 4 * size,
                "digest": "0" * 32,
            }
        ],
    }
    header["digest"] = xxhash.xxh3_128_hexdigest(canonical_json(header))
    text = canonical_json(header)
    body = struct.pack("<4sHI", b"HWDL", 1, len(text)) + text + bytes(3 << 20)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.putrequest(
        "POST", f"/diloco/v1/parameters?worker={player.name}&session={player.session}"
    )
    for name, value in {
        "Headway-Diloco": "1",
        "Content-Type": CONTENT_TYPE,
        "Content-Length": str(1 << 43),
    }.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    while not server.core.totals.num_received_bytes and not list(
        server.core.ledger.incoming.iterdir()
    ):
        assert "failed to answer" not in caplog.text
        time.sleep(0.01)
    connection.close()
    while server._places.taken:
        time.sleep(0.01)
    assert "failed to answer" not in caplog.text
    assert list(server.core.ledger.incoming.iterdir()) == []


def test_first_parameters_are_those_that_the_request_announces(running: Any) -> None:
    server = running(None)
    a = Player(server, "a")
    message = compose({}, encode(MODEL, "float32").payloads)
    said = {"worker": "a", "session": a.session}
    refused(400, "bad_request", lambda: a.client.upload(message, **said, digest="0" * 32))
    assert server.state_hash is None
    a.client.upload(message, **said, digest=message.digest)
    assert server.state_hash is not None


def test_parameters_that_are_no_numbers_are_not_taken(running: Any) -> None:
    server = running(None)
    worker = Player(server, "a")
    bad = {**MODEL, "layers.1.w": torch.full((4, 5), float("inf"))}
    message = compose({}, encode(bad, "float32").payloads)
    refused(422, "bad_request", lambda: worker.client.upload(message, worker="a",
                                                             session=worker.session))  # fmt: skip
    assert server.state_hash is None


# -- who may do what ----------------------------------------------------------------------------


def test_registration_is_refused_for_another_model_version_or_id(running: Any) -> None:
    server = running()
    worker = Player(server, "a")
    other = Specification.of({**MODEL, "layers.0.w": torch.zeros(2, 2)})
    model = {"fingerprint": other.fingerprint, "layout": other.layout}
    error = refused(422, "model", lambda: Player(server, "b", model=model))
    assert "layers.0.w is float32 [2, 2] instead of float32 [4, 5]" in str(error)
    refused(422, "model", lambda: Player(server, "b", model={"fingerprint": "0" * 32}))
    refused(422, "fragments", lambda: Player(server, "b", num_fragments=2))
    refused(409, "id_taken", lambda: Player(server, "a"))
    assert worker.register(resume_session=worker.session)["session"]
    headers = {"Content-Type": "application/json", "Headway-Diloco": "7"}
    path = "/diloco/v1/register"
    status, body, _ = ask(server, "POST", path, server.token, b"{}", **headers)
    said = json.loads(body)
    assert (status, said["reason"], said["server_version"]) == (426, "version", 1)
    with pytest.raises(VersionMismatch):
        worker.client.register({**worker.facts, "protocol": 3})


def test_a_worker_has_a_token_of_its_own_or_that_of_all(running: Any, folder: Path) -> None:
    file = folder / "tokens"
    own, join = "own-" + "a" * 32, "join-" + "j" * 32
    file.write_text(f"# comment\n{join}\nalice {own}\nread {READ}\n")
    file.chmod(0o600)
    server = running(token_file=file)
    alice = Player(server, "alice", token=own)
    Player(server, "bob", token=join)
    refused(403, "unauthorized", lambda: Player(server, "carol", token=own))
    refused(403, "unauthorized", lambda: Player(server, "alice", token=join))
    refused(403, "unauthorized", lambda: Player(server, "x", token=READ))
    refused(401, "unauthorized", lambda: Player(server, "x", token="wrong-" + "w" * 32))
    alice.client = DiLoCoClient(server.address, join)
    refused(403, "unauthorized", lambda: alice.submit(alice.message()))
    for token, status in ((READ, 200), (own, 200), (None, 401)):
        assert ask(server, "GET", "/diloco/v1/status", token)[0] == status
        assert ask(server, "GET", "/metrics", token)[0] == status


ROUTES = [
    *(("GET", name) for name in ("status", "parameters", "round")),
    *(("POST", name) for name in ("parameters", "register", "heartbeat", "deregister", "submit")),
]


@pytest.mark.parametrize(("method", "name"), ROUTES)
def test_no_route_answers_without_a_token(running: Any, method: str, name: str) -> None:
    server = running()
    path, headers = f"/diloco/v1/{name}", {"Headway-Diloco": "1", "Content-Type": CONTENT_TYPE}
    for token in (None, "x" * 32):
        assert ask(server, method, path, token, **headers)[0] == 401
    origin = {**headers, "Origin": "http://evil.example"}
    assert ask(server, method, path, server.token, **origin)[0] == 403


def test_the_token_that_was_made_is_kept_for_its_owner_alone(running: Any, folder: Path) -> None:
    server = running()
    kept = folder / "run" / "token"
    assert kept.stat().st_mode & 0o777 == 0o600 and kept.read_text().strip() == server.token
    server.stop()
    assert running().token == server.token


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": "0.0.0.0", "disable_auth": True}, "needs a token"),
        ({"token": "short"}, "16 characters"),
        ({"token": "x" * 32, "disable_auth": True}, "allowed is one of them"),
        ({"token_file": "absent"}, "cannot be read"),
        ({"tls_key": "key.pem"}, "needs tls_cert"),
        ({"tls_cert": "absent.pem"}, "not a certificate"),
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_fragments": 5}, "num_fragments=5: allowed are 1 to 4"),
        ({"port": 99999999}, "port"),
        ({"min_worker": 1}, "unknown option 'min_worker'; did you mean 'min_workers'"),
        ({"model": 3}, "model: int given"),
        ({"model": {"w": torch.ones(3, dtype=torch.int64)}}, "w: dtype 'int64'; allowed: float32"),
    ],
)
def test_mistakes_are_told_before_it_listens(folder: Path, options: dict, words: str) -> None:
    given = {"model": MODEL, "output_dir": folder / "run", "num_workers": 1, **options}
    with pytest.raises(ConfigError, match=words):
        DiLoCoServer(**given).start()


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("x" * 32, 0o644, "can be read by others"),
        ("a b c", 0o600, "line 1"),
        ("a short", 0o600, "16 characters"),
        ("", 0o600, "no token for a worker"),
        (f"read {READ}", 0o600, "no token for a worker"),
        (f"a {READ}\nb {READ}", 0o600, "line 2"),
    ],
)
def test_token_files_are_checked(folder: Path, text: str, mode: int, words: str) -> None:
    file = folder / "tokens"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        DiLoCoServer(MODEL, output_dir=folder / "run", num_workers=1, token_file=file)


def test_without_a_token_only_names_of_this_machine_are_answered(running: Any) -> None:
    server = running(disable_auth=True)
    assert ask(server, "GET", "/diloco/v1/status", None)[0] == 200
    assert ask(server, "GET", "/diloco/v1/status", None, Host="localhost:1")[0] == 200
    assert ask(server, "GET", "/diloco/v1/status", None, Host="evil.example")[0] == 421
    Player(server, "a")


# -- what it tells ------------------------------------------------------------------------------


def test_status_and_metrics_tell_of_workers_rounds_drift_and_bytes(running: Any) -> None:
    server = running(num_workers=1)
    worker = Player(server, "a.b-c", "bf16", step=7)
    message = worker.message(1)
    worker.submit(message)
    worker.wait()
    worker.fetch()
    status = worker.client.status()
    assert (status["commit"], status["num_rounds"], status["last_num_workers"]) == (1, 1, 1)
    assert status["state_hash"] == server.state_hash and status["last_drift"] > 0
    assert status["received_bytes"] == message.num_bytes
    assert status["sent_bytes"] > 4 * SPEC.num_elements
    (told,) = status["workers"]
    assert (told["id"], told["step"], told["comm"]) == ("a.b-c", 7, "bf16")
    assert status["rounds"][0]["number"] == 2
    _, text, _ = ask(server, "GET", "/metrics", server.token)
    lines = text.decode().splitlines()
    assert "headway_diloco_round 1" in lines and "headway_diloco_workers 1" in lines
    assert 'headway_diloco_worker_step{worker="a.b-c"} 7' in lines
    samples = [line for line in lines if not line.startswith("#")]
    assert all(len(line.rsplit(" ", 1)) == 2 and float(line.rsplit(" ", 1)[1]) >= 0
               for line in samples)  # fmt: skip


def test_the_page_shows_text_only_and_needs_nothing_from_elsewhere(running: Any) -> None:
    server = running()
    status, page, headers = ask(server, "GET", "/", None)
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    text = page.decode()
    assert "<script>" not in text and "onclick" not in text and "http" not in text
    for path in ("/page/page.js", "/page/page.css"):
        assert path in text
        status, body, _ = ask(server, "GET", path, None)
        assert status == 200
        for word in (b"innerHTML", b"insertAdjacent", b"document.write", b"eval(", b"outerHTML"):
            assert word not in body
    assert ask(server, "GET", "/page/../server.py", None)[0] in (400, 401, 404)
    assert server.token.encode() not in page


# -- robustness ---------------------------------------------------------------------------------


def test_a_restart_goes_on_and_workers_send_again(running: Any, folder: Path) -> None:
    options = {"keep_submissions": True, "token": "t" * 32}
    server = running(**options)
    a, b = Player(server, "a"), Player(server, "b")
    a.submit(a.message(1)), b.submit(b.message(2))
    a.wait()
    a.fetch(), b.fetch()
    a.submit(a.message(3))
    committed, open_round = server.state_hash, a.rounds[0]
    server.stop()
    again = running(**options)
    assert again.state_hash == committed
    for worker in (a, b):
        worker.server, worker.client = again, DiLoCoClient(again.address, again.token)
    with pytest.raises(UnknownSession):
        a.wait(wait_s=0)
    assert a.register(resume_session=a.session)["round_id"] == [open_round]
    assert not a.wait(wait_s=0)["submitted"]
    b.register()
    a.submit(a.message(3)), b.submit(b.message(4))
    assert a.wait(open_round)["counted"] is True
    hash_now = again.state_hash
    assert again.stop() and replay(folder / "run").hash == hash_now


def test_broken_connections_leave_nothing_behind(running: Any) -> None:
    server = running()
    worker = Player(server, "a")
    message = worker.message(1)
    head = (
        f"POST /diloco/v1/submit?worker=a&session={worker.session}&round={worker.rounds[0]}"
        f"&fragment=0&local_steps=1&digest={message.digest} HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {server.token}\r\nHeadway-Diloco: 1\r\n"
        f"Content-Type: {CONTENT_TYPE}\r\nContent-Length: 9000000\r\n\r\n"
    ).encode()
    for part in (0, 100, message.num_bytes // 2):
        body = b"".join(bytes(chunk) for chunk in message.chunks())[:part]
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head + body)
    deadline = time.monotonic() + 20
    while server._places.taken or list(server.core.ledger.incoming.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    worker.submit(message)


def test_those_who_do_not_take_what_they_asked_for_are_let_go(
    running: Any, caplog: pytest.LogCaptureFixture
) -> None:
    large = {"w": torch.zeros(4_000_000)}
    server = running(large)
    spec = Specification.of(large)
    model = {"fingerprint": spec.fingerprint, "layout": spec.layout}
    worker = Player(server, "a", model=model)
    head = (
        f"GET /diloco/v1/parameters?worker=a&session={worker.session} HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {server.token}\r\nHeadway-Diloco: 1\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    _, payloads = worker.client.fetch(0, spec.shapes, worker="a", session=worker.session)
    assert torch.equal(decode(payloads["w"]), large["w"])
    assert "Traceback" not in caplog.text and not caplog.records


LARGE = {"w": torch.arange(4_000_000.0)}
LARGE_SPEC = Specification.of(LARGE)
LARGE_MODEL = {"fingerprint": LARGE_SPEC.fingerprint, "layout": LARGE_SPEC.layout}


def begin_download(player: Player) -> socket.socket:
    """Ask for all parameters, and read the beginning of the answer only."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", player.server.port))
    connection.sendall(
        f"GET /diloco/v1/parameters?worker={player.name}&session={player.session}&fragment=0 "
        f"HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {player.server.token}\r\n"
        "Headway-Diloco: 1\r\n\r\n".encode()
    )
    assert connection.recv(15) == b"HTTP/1.1 200 OK"
    return connection


def is_cut_off(connection: socket.socket) -> bool:
    """Whether the rest of a download ends before all of it has come."""
    num_bytes = 0
    try:
        while chunk := connection.recv(1 << 20):
            num_bytes += len(chunk)
            if num_bytes > 4 * LARGE_SPEC.num_elements:
                return False
    except ConnectionError:
        pass
    return True


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_that_asks_again_ends_its_earlier_download(
    running: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = running(LARGE)
    a, b = Player(server, "a", model=LARGE_MODEL), Player(server, "b", model=LARGE_MODEL)
    of_b = begin_download(b)
    with begin_download(a) as first, begin_download(a) as second, of_b:
        _, payloads = a.client.fetch(0, LARGE_SPEC.shapes, worker="a", session=a.session)
        assert torch.equal(decode(payloads["w"]), LARGE["w"])
        assert is_cut_off(first) and is_cut_off(second)
        wait_for(lambda: list(server._deliveries.under_way) == ["b"])
        assert not is_cut_off(of_b)
    assert not caplog.records


def test_a_worker_that_asks_again_before_its_parameters_are_ready_gets_them(
    running: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = running()
    a = Player(server, "a")
    begun, go_on, make = threading.Event(), threading.Event(), server.core.make_message
    first = [True]

    def slowly(*given: Any) -> Any:
        if first.pop() if first else False:
            begun.set()
            assert go_on.wait(20)
        return make(*given)

    monkeypatch.setattr(server.core, "make_message", slowly)
    told: list[BaseException] = []

    def ask_early() -> None:
        try:
            DiLoCoClient(server.address, server.token).fetch(
                0, SPEC.shapes, worker="a", session=a.session
            )
        except Unreachable as error:
            told.append(error)

    thread = threading.Thread(target=ask_early)
    thread.start()
    try:
        assert begun.wait(20)
        _, found = a.fetch()
        assert all(torch.equal(found[n], MODEL[n]) for n in MODEL)
        thread.join(20)  # the one that nobody reads any more does not wait for its parameters
    finally:
        go_on.set()
        thread.join(20)
    wait_for(lambda: not server._deliveries.under_way)
    assert len(told) == 1 and not caplog.records


def test_downloads_of_workers_that_have_left_end_with_the_next_one(running: Any) -> None:
    """Else one that comes and goes under new names would hold any number of old states."""
    server = running(LARGE)
    a, b = Player(server, "a", model=LARGE_MODEL), Player(server, "b", model=LARGE_MODEL)
    with begin_download(a) as left:
        a.client.deregister({"worker_id": "a", "session": a.session})
        b.client.fetch(0, LARGE_SPEC.shapes, worker="b", session=b.session)
        assert is_cut_off(left)


def test_a_whole_download_has_a_limit_in_proportion_to_its_size(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = running(LARGE)
    a = Player(server, "a", model=LARGE_MODEL)
    monkeypatch.setattr("headway.diloco.delivery.PATIENCE_S", 0.0)
    monkeypatch.setattr("headway.diloco.delivery.LEAST_BYTES_PER_S", 8e6)  # two seconds
    with begin_download(a) as connection:
        wait_for(lambda: not server._deliveries.under_way)
        assert is_cut_off(connection)
    monkeypatch.setattr("headway.diloco.delivery.LEAST_BYTES_PER_S", 64 << 10)
    with begin_download(a) as connection:
        assert not is_cut_off(connection)


def test_a_download_holds_no_more_of_an_old_state_than_it_sends(running: Any) -> None:
    server = running(LARGE, num_workers=1)
    a, b = Player(server, "a", model=LARGE_MODEL), Player(server, "b", model=LARGE_MODEL)
    momentum = weakref.ref(server.core.state.velocity["w"])
    with begin_download(b) as connection:
        message = compose({}, encode(LARGE, "float32").payloads)
        a.submit(message)
        assert a.wait()["counted"]
        wait_for(lambda: momentum() is None)
        assert list(server._deliveries.under_way) == ["b"]
        assert not is_cut_off(connection)


def test_one_that_returns_while_its_update_is_applied_is_told_of_the_next_round(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the round of before it would bring what it has learned a second time."""
    server = running(num_workers=1)
    begun, go_on, carry_out = threading.Event(), threading.Event(), server.core.carry_out

    def slowly(job: Any) -> Any:
        begun.set()
        assert go_on.wait(20)
        return carry_out(job)

    monkeypatch.setattr(server.core, "carry_out", slowly)
    player = Player(server, "a")
    player.submit(player.message())
    assert begun.wait(20)
    told: list[dict[str, Any]] = []
    again = threading.Thread(
        target=lambda: told.append(player.register(resume_session=player.session))
    )
    again.start()
    again.join(0.3)
    assert not told
    go_on.set()
    again.join(20)
    assert told[0]["round_id"] == [server.core.book.rounds[0].id]
    assert server.core.book.rounds[0].number == 2


def test_uploads_are_limited(running: Any) -> None:
    server = running(max_uploads=1)
    a, b = Player(server, "a"), Player(server, "b")
    server._places.taken.add(("z", 0))
    client = b.client
    with pytest.raises(Exception, match="on their way"):
        client.submit(b.message(1), worker="b", session=b.session, round=b.rounds[0], fragment=0,
                      local_steps=1)  # fmt: skip
    server._places.taken.clear()
    a.submit(a.message(1)), b.submit(b.message(2))


def test_a_disk_that_is_full_holds_the_round_until_it_is_not(
    running: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headway.diloco.server._RETRY_S", 0.05)
    server = running(num_workers=1)
    worker = Player(server, "a")
    commit, left = server.core.ledger.commit, 2

    def failing(*given: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(28, "No space left on device")
        return commit(*given)

    server.core.ledger.commit = failing
    with caplog.at_level(logging.ERROR):
        worker.submit(worker.message(1))
        assert worker.wait()["counted"] is True
    assert left < 0 and "No space left" in caplog.text


def test_a_round_that_fails_in_any_way_is_tried_again(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.diloco.server._RETRY_S", 0.01)
    server = running(num_workers=1)
    carry_out, failures = server.core.carry_out, [MemoryError(), ValueError("odd")]

    def fail_first(job: Any) -> Any:
        if failures:
            raise failures.pop()
        return carry_out(job)

    monkeypatch.setattr(server.core, "carry_out", fail_first)
    player = Player(server, "a")
    player.submit(player.message())
    assert player.wait(wait_s=10)["counted"]


@pytest.mark.parametrize(("mode", "deed"), [("sync", "rm"), ("async", "rm"), ("sync", "cut")])
def test_a_body_that_somebody_has_deleted_or_cut_is_asked_for_again(
    running: Any, monkeypatch: pytest.MonkeyPatch, mode: str, deed: str
) -> None:
    server = running(num_workers=1, mode=mode)
    first, carry_out = [True], server.core.carry_out

    def tidy_up(job: Any) -> Any:
        if first.pop() if first else False:
            if deed == "cut":
                os.truncate(job.submissions[0].path, 100)
            else:
                shutil.rmtree(server.core.ledger.incoming)
        return carry_out(job)

    monkeypatch.setattr(server.core, "carry_out", tidy_up)
    player = Player(server, "a")
    message = player.message()
    player.submit(message)
    wait_for(lambda: not player.wait(wait_s=0)["submitted"])
    assert player.wait(wait_s=0)["state"] == "open"
    player.submit(message)  # the folder is there again
    assert player.wait(wait_s=20)["counted"]


def test_being_late_is_no_fault(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often: only bodies that are wrong count against a worker."""
    server = running(num_workers=1)
    book, player = server.core.book, Player(server, "a")
    with monkeypatch.context() as patch:

        def too_late(*_: Any) -> None:
            raise Refusal(410, "round_over", "while it came")

        patch.setattr(book, "accept", too_late)
        refused(410, "round_over", lambda: player.submit(player.message()))
    assert book.workers["a"].num_refused == 0
    player.submit(player.message())
    assert player.wait(wait_s=20)["counted"]


def test_a_folder_that_is_deleted_under_a_server_is_told_to_the_workers(
    running: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = running(num_workers=1)
    player = Player(server, "a")
    shutil.move(folder / "run", folder / "elsewhere")
    with pytest.raises(Unreachable, match="folder cannot be written to"):
        player.submit(player.message())
    assert "Traceback" not in caplog.text and not (folder / "run").exists()
    shutil.move(folder / "elsewhere", folder / "run")
    player.submit(player.message())
    assert player.wait()["counted"]


def test_a_body_that_does_not_fit_on_the_disk_can_be_sent_again(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = running(num_workers=1)
    worker = Player(server, "a")

    def full(self: Any, data: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("headway.diloco.intake.Spool.write", full)
        with pytest.raises(Unreachable, match="disk is full"):
            worker.submit(worker.message(1))
    worker.submit(worker.message(1))
    assert worker.wait()["counted"] is True


def test_stopping_does_not_wait_for_those_who_wait(running: Any) -> None:
    server = running()
    worker = Player(server, "a")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(worker.wait(wait_s=25)))
    thread.start()
    while not server._changed._waiters:
        time.sleep(0.01)
    began = time.monotonic()
    server.stop()
    thread.join(10)
    assert time.monotonic() - began < 8 and not thread.is_alive()


@pytest.mark.timeout(120)
def test_hostile_requests_are_refused_and_change_nothing() -> None:
    outcome = prove_hostile(400, seed=11)
    outcome.require_success()
    assert outcome.counts["requests"] == 400


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("mode", "phases"),
    [
        ("sync", ("accepted", "storage", "line", "committed")),
        pytest.param("async", ("apply", "committed", "upload"), marks=pytest.mark.slow),
    ],
)
def test_a_killed_server_loses_no_round_and_counts_none_twice(mode: str, phases: tuple) -> None:
    outcome = prove_server_kills(len(phases), 5, phases, mode)
    outcome.require_success()
    assert outcome.counts["kills"] == len(phases)
