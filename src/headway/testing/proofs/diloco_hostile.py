"""Proof that a DiLoCo server refuses what is malformed or poisoned, and is none the worse for it.

Owns: the requests, thousands of them from a seed, sent over real sockets to a real server, and what
is looked at after each one. Does not own: the server, faults of the network (proxy.py).

Every request must be answered with a 4xx and its reason, and nothing that counts may change:
neither parameters nor momentum, nor the rounds, nor who has submitted.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import torch
import xxhash

from headway.diloco.compression import encode
from headway.diloco.server import DiLoCoServer
from headway.diloco.specification import Specification, canonical_json
from headway.diloco.wire import CONTENT_TYPE, MAGIC, VERSION, Message, compose
from headway.testing.proofs.outcome import Outcome, memory_folder

JOIN, READ = "join-" + "j" * 32, "read-" + "r" * 32
TOKENS = {"honest": "honest-" + "h" * 32, "other": "other-" + "o" * 32}
MODEL = {f"layers.{n}.weight": torch.ones(4, 5) for n in range(3)} | {"bias": torch.zeros(7)}
MAX_NORM = 100.0
COMMS = {"honest": "float32", "other": "bf16", "third": "int8"}
_PREFIX = "/diloco/v1"


@dataclass
class Request:
    """One request, and what kind of mischief it is."""

    family: str
    path: str
    body: bytes | None = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)


class Target:
    """A server with three workers, one of which has submitted to the open round."""

    def __init__(self, folder: str) -> None:
        token_file = f"{folder}/tokens"
        with open(token_file, "x", opener=_open_private) as file:
            lines = [f"join {JOIN}", f"read {READ}", *(f"{n} {t}" for n, t in TOKENS.items())]
            file.write("\n".join(lines))
        self.server = DiLoCoServer(
            MODEL, output_dir=f"{folder}/run", num_workers=len(COMMS), token_file=token_file,
            num_fragments=2, max_update_norm=MAX_NORM, max_attempts=1 << 30, heartbeat_s=3600.0,
        )  # fmt: skip
        self.server.start()
        self.spec = Specification.of(MODEL)
        self.sessions = {name: self._register(name) for name in COMMS}
        self.old_rounds = [self.round(0)]
        for name in COMMS:
            self.submit(name)
        self.wait_for_commit()
        self.submit("other")  # the round that stays open has one submission
        self.submitted = "other"

    def token(self, name: str) -> str:
        return TOKENS.get(name, JOIN)

    def round(self, fragment: int) -> str:
        return self.server.core.book.rounds[fragment].id

    def fingerprint(self) -> str:
        """Of all that counts."""
        book = self.server.core.book
        waiting = [sorted((k, s.digest) for k, s in r.submissions.items()) for r in book.rounds]
        sessions = sorted((w.id, w.session) for w in book.workers.values())
        said = [self.server.state_hash, book.known(), waiting, sessions]
        return xxhash.xxh3_128_hexdigest(canonical_json(said))

    def send(self, request: Request) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port or 0, timeout=60)
        try:
            connection.request(
                request.method, request.path, body=request.body, headers=request.headers
            )
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    # -- honest requests ------------------------------------------------------------------------

    def headers(self, name: str, kind: str = CONTENT_TYPE) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {self.token(name)}",
            "Headway-Diloco": str(VERSION),
            "Content-Type": kind,
        }

    def registration(self, name: str) -> dict[str, Any]:
        model = {"fingerprint": self.spec.fingerprint, "layout": self.spec.layout}
        return {
            "worker_id": name, "protocol": VERSION, "model": model, "sync_every": 10,
            "num_fragments": 2, "comm": COMMS.get(name, "bf16"), "step": 0,
            "group": {"world_size": 1, "strategy": "single"},
        }  # fmt: skip

    def _register(self, name: str) -> str:
        body = json.dumps(self.registration(name)).encode()
        headers = self.headers(name, "application/json")
        status, answer = self.send(Request("", f"{_PREFIX}/register", body, headers=headers))
        assert status == 200, answer
        return str(json.loads(answer)["session"])

    def tensors(self, fragment: int, scale: float = 0.01) -> dict[str, torch.Tensor]:
        assert self.server.core.state is not None
        names = self.server.core.state.fragments[fragment]
        return {name: torch.full(MODEL[name].shape, scale) for name in names}

    def message(self, name: str, fragment: int = 0, scale: float = 0.01) -> Message:
        return compose({}, encode(self.tensors(fragment, scale), COMMS[name]).payloads)

    def submission(self, name: str, message: Message, **query: Any) -> Request:
        said = {
            "worker": name, "session": self.sessions[name], "round": self.round(0),
            "fragment": 0, "local_steps": 5, "digest": message.digest, **query,
        }  # fmt: skip
        path = f"{_PREFIX}/submit?{urlencode(said)}"
        body = b"".join(bytes(chunk) for chunk in message.chunks())
        return Request("", path, body, headers=self.headers(name))

    def submit(self, name: str) -> None:
        status, answer = self.send(self.submission(name, self.message(name)))
        assert status == 202, answer

    def wait_for_commit(self) -> None:
        query = {"worker": "honest", "session": self.sessions["honest"], "wait": 20}
        path = f"{_PREFIX}/round?{urlencode({**query, 'round': self.old_rounds[0]})}"
        _, answer = self.send(Request("", path, None, "GET", self.headers("honest")))
        assert json.loads(answer)["state"] == "committed", answer


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


# -- mischief -----------------------------------------------------------------------------------

Maker = Callable[[Target, random.Random], Request]


def _damage_body(target: Target, chance: random.Random) -> Request:
    """Bits, lengths and the beginning of a body."""
    name = chance.choice(["honest", "third"])
    request = target.submission(name, target.message(name))
    assert request.body is not None
    body = bytearray(request.body)
    kind = chance.randrange(5)
    if kind == 0:
        for _ in range(chance.randint(1, 4)):
            body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
        if bytes(body) == request.body:
            body[0] ^= 1
    elif kind == 1:
        del body[chance.randrange(len(body)) :]
    elif kind == 2:
        body += chance.randbytes(chance.randint(1, 70_000))
    elif kind == 3:
        body[: chance.randint(1, 40)] = chance.randbytes(chance.randint(0, 80))
        if bytes(body) == request.body:
            body[0] ^= 1
    else:
        body[4:10] = struct.pack("<HI", chance.choice([0, 1, 2, 65535]), chance.getrandbits(32))
    request.body, request.family = bytes(body), "damaged body"
    return request


def _rewrite_header(target: Target, chance: random.Random) -> Request:
    """A header that is whole and digested, and says something else than the model."""
    name = chance.choice(["honest", "third"])
    request = target.submission(name, target.message(name))
    assert request.body is not None
    (length,) = struct.unpack_from("<I", request.body, 6)
    header = json.loads(request.body[10 : 10 + length])
    rest = request.body[10 + length :]
    del header["digest"]
    tensor = chance.choice(header["tensors"])
    odd: list[Any] = [None, True, -1, 1 << 62, "x", [], {}, 1.5, [1 << 40], "\ud800", "a" * 3000]
    kind = chance.randrange(8)
    if kind == 0:
        tensor[chance.choice(list(tensor))] = chance.choice(odd)
    elif kind == 1:
        tensor["name"] = tensor["name"] + chance.choice(["x", "\0", "../", " "])
    elif kind == 2:
        tensor["shape"] = [*tensor["shape"], chance.choice([1, 0, -1, 2, 1 << 50])]
    elif kind == 3:
        tensor["dtype"] = chance.choice(["float64", "int64", "bfloat16", "object", "F32"])
    elif kind == 4:
        tensor["length"] += chance.choice([-1, 1, 4, 1 << 40, -tensor["length"] - 1])
    elif kind == 5:
        header["tensors"].insert(0, dict(tensor))
    elif kind == 6:
        header["tensors"].remove(tensor)
    else:
        header["meta"] = chance.choice([[], {"k": []}, {"k": "x" * 5000}, {"payload": "pickle"},
                                        {"payload": "local", "base": "r-1-0"}, None])  # fmt: skip
    header["digest"] = xxhash.xxh3_128_hexdigest(canonical_json(header))
    text = canonical_json(header)
    request.body = struct.pack("<4sHI", MAGIC, VERSION, len(text)) + text + rest
    request.path = request.path.rpartition("=")[0] + "=" + header["digest"]
    request.family = "header that does not fit"
    return request


def _poison(target: Target, chance: random.Random) -> Request:
    """Values that are no numbers, or out of all proportion."""
    name = chance.choice(["honest", "third"])
    tensors = target.tensors(0)
    victim = chance.choice(list(tensors))
    flat = tensors[victim].reshape(-1)
    large = [1e38, -3e38, 1e5, MAX_NORM + 1, -MAX_NORM * 2]
    bad = chance.choice([float("nan"), float("inf"), float("-inf"), *large])
    flat[chance.randrange(flat.numel())] = bad
    message = compose({}, encode(tensors, COMMS[name]).payloads)
    request = target.submission(name, message, local_steps=chance.randint(1, 1000))
    request.family = "poisoned values"
    return request


def _pretend(target: Target, chance: random.Random) -> Request:
    """Somebody who is not there, or is somebody else."""
    request = target.submission("honest", target.message("honest"))
    kind = chance.randrange(7)
    if kind == 0:
        name = chance.choice(["nobody", "Honest", "honest.", "x" * 64])
        request.path = request.path.replace("worker=honest", f"worker={name}")
        request.headers["Authorization"] = f"Bearer {JOIN}"
    elif kind == 1:
        session = chance.choice(["0" * 32, "x", target.sessions["other"], "%00", "a" * 300])
        request.path = request.path.replace(target.sessions["honest"], session)
    elif kind == 2:
        request.headers["Authorization"] = f"Bearer {TOKENS['other']}"
    elif kind == 3:
        request.headers["Authorization"] = f"Bearer {READ}"
    elif kind == 4:
        request.headers["Authorization"] = chance.choice(
            ["", "Bearer", "Bearer x", f"Basic {TOKENS['honest']}", f"Bearer {TOKENS['honest']}x",
             TOKENS["honest"], f"Bearer {TOKENS['honest'][:-1]}"]
        )  # fmt: skip
    elif kind == 5:
        del request.headers["Authorization"]
    else:
        bad = chance.choice(["", "a/b", "..", "a b", "<script>", "é", "x" * 65, "%2e%2e"])
        request.path = request.path.replace("worker=honest", urlencode({"worker": bad}))
    request.family = "somebody else"
    return request


def _misplace(target: Target, chance: random.Random) -> Request:
    """Rounds that are over or were never there, a second body, another digest."""
    message = target.message("honest")
    kind = chance.randrange(6)
    number = chance.randint(1, 9)
    if kind == 0:
        request = target.submission(
            "honest", target.message("honest", scale=0.02 + number), round=target.old_rounds[0]
        )
    elif kind == 1:
        invented = chance.choice(
            [f"r-{number}-{chance.getrandbits(32):08x}", "r-2", "r--1-0", "0", "x" * 200]
        )
        request = target.submission("honest", message, round=invented)
    elif kind == 2:
        fragment = chance.choice([-1, 2, 99, 1 << 30, "x", "", "0x1", "1e0"])
        request = target.submission("honest", message, fragment=fragment)
    elif kind == 3:
        second = target.message(target.submitted, scale=0.02 + 0.01 * number)
        request = target.submission(target.submitted, second)
    elif kind == 4:
        digest = chance.choice([f"{chance.getrandbits(128):032x}", "x", "", "0" * 300])
        request = target.submission("honest", message, digest=digest)
    else:
        steps = chance.choice([0, -1, 1 << 50, "x", "", "nan", "1.5", "9" * 30])
        request = target.submission("honest", message, local_steps=steps)
    request.family = "wrong place"
    return request


_ODD: list[Any] = [None, True, [], {}, "", -1, 1.5, 1 << 70, "\x00", "x" * 400, [[[]]], {"a": {}}]


def _garble_json(target: Target, chance: random.Random) -> Request:
    """Registrations, heartbeats and departures with one field that cannot be right."""
    verb = chance.choice(["register", "heartbeat", "deregister"])
    said: dict[str, Any]
    if verb == "register":
        said = target.registration("newcomer")
        spoil: list[tuple[str, list[Any]]] = [
            ("worker_id", [*_ODD, "a b", "../x", "<b>", "honest"]),
            ("protocol", [0, 2, "2", None, [], {}]),
            ("sync_every", [0, -1, 1.5, "1", None, True, 1 << 60]),
            ("num_fragments", [0, 1, 3, -1, "2", None, 1 << 40]),
            ("comm", ["fp16", "", None, 1, [], "float64"]),
            ("step", [-1, "1", None, 1.5, True, 1 << 70]),
            ("group", [[], "x", 1, {"world_size": 0}, {"strategy": ""}, {"world_size": "2"}]),
            ("resume_session", ["", 1, [], {}, "x" * 300]),
            ("claim", ["", 1, [], {}, "x" * 300]),
            ("model", _other_models(target)),
        ]
        key, values = chance.choice(spoil)
        said[key] = chance.choice(values)
        name = "honest" if said.get("worker_id") == "honest" else "newcomer"
    else:
        name = "honest"
        said = {"worker_id": name, "session": target.sessions[name], "step": 1}
        key = chance.choice(["worker_id", "session", *(["step"] if verb == "heartbeat" else [])])
        said[key] = chance.choice([v for v in _ODD if v is not None or key != "step"])
        if verb == "heartbeat" and chance.random() < 0.3:
            said["steps_per_second"] = chance.choice([-1, "1", True, 1e300, [], {}])
    body = json.dumps(said).encode()
    if chance.random() < 0.2:
        body = chance.choice(
            [b"", b"null", b"[]", b"{", b"[" * 3000, b'{"a": NaN}', b"\xff\xfe", body[:-1],
             b'"' + b"x" * 60000, body + b"x", b"[" * 100 + b"]" * 100, b"1" * 5000]
        )  # fmt: skip
    headers = target.headers(name, "application/json")
    return Request("garbled JSON", f"{_PREFIX}/{verb}", body, headers=headers)


def _other_models(target: Target) -> list[Any]:
    layout = target.spec.layout
    layouts: list[Any] = [
        layout[:-1],
        [*layout, ["more", [1], "float32", True]],
        [[*layout[0][:1], [5, 4], *layout[0][2:]], *layout[1:]],
        [[*layout[0][:2], "bfloat16", True], *layout[1:]],
        list(reversed(layout)),
        [[n, [1 << 47, 1 << 47], d, t] for n, _, d, t in layout],
        [["x", [-1], "float32", True]],
        [[]],
        [],
        {},
        "x",
        [["a", [1], "float32", True]] * 3,
    ]
    models: list[Any] = [{"fingerprint": "0" * 32, "layout": one} for one in layouts]
    models += [{"fingerprint": "0" * 32}, {"fingerprint": 1}, {}, [], None, "x"]
    return models


def _bend_http(target: Target, chance: random.Random) -> Request:
    """Methods, types, versions, paths and queries."""
    request = target.submission("honest", target.message("honest"))
    kind = chance.randrange(9)
    if kind == 0:
        request.method = chance.choice(["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
    elif kind == 1:
        request.headers["Content-Type"] = chance.choice(
            ["text/plain", "application/json", "application/octet-stream",
             "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
        )  # fmt: skip
    elif kind == 2:
        request.headers["Headway-Diloco"] = chance.choice(["0", "2", "", "1.0", "one", "1, 1"])
    elif kind == 3:
        del request.headers["Headway-Diloco"]
    elif kind == 4:
        request.headers[chance.choice(["Content-Encoding", "Transfer-Encoding", "Expect"])] = (
            chance.choice(["gzip", "chunked", "100-continue"])
        )
    elif kind == 5:
        more = chance.choice(["&x=1", "&worker=honest", "&round=r-1-0", "&pickle=1", "&fragment=0"])
        request.path += more
    elif kind == 6:
        bad = ["/submit", "/diloco/v2/submit", "/diloco/v1/submit/", "/diloco/v1/../v1/submit",
               "/diloco/v1/pickle", "//diloco/v1/submit", "/export-0/diloco.json"]  # fmt: skip
        request.path = chance.choice(bad)
    elif kind == 7:
        request.headers["Origin"] = chance.choice(["http://evil.example", "null"])
    else:
        said = {"worker": "honest", "session": target.sessions["honest"]}
        request.path = f"{_PREFIX}/parameters?{urlencode(said)}"  # there are parameters already
    request.family = "bent HTTP"
    return request


_BAD_WORDS = {
    "round": {
        "round": ["r-9-0", "", "x" * 500],
        "fragment": ["2", "-1", "x"],
        "wait": ["-1", "nan", "x", ""],
        "session": ["x"],
    },
    "parameters": {
        "fragment": ["2", "-1", "x"],
        "dtype": ["int8", "float64", ""],
        "session": ["x", ""],
        "worker": ["nobody", "", "a/b"],
    },
}


def _ask_badly(target: Target, chance: random.Random) -> Request:
    """Questions about rounds and parameters that have no answer."""
    said: dict[str, Any] = {"worker": "honest", "session": target.sessions["honest"]}
    path = chance.choice(list(_BAD_WORDS))
    spoil = _BAD_WORDS[path]
    if path == "round":
        said["round"] = target.round(0)
    key = chance.choice(list(spoil))
    said[key] = chance.choice(spoil[key])
    headers = target.headers("honest")
    del headers["Content-Type"]
    if said["worker"] != "honest":
        headers["Authorization"] = f"Bearer {JOIN}"
    return Request("bad question", f"{_PREFIX}/{path}?{urlencode(said)}", None, "GET", headers)


MAKERS: tuple[tuple[Maker, int], ...] = (
    (_damage_body, 5),
    (_rewrite_header, 5),
    (_poison, 4),
    (_misplace, 4),
    (_garble_json, 4),
    (_pretend, 2),
    (_bend_http, 2),
    (_ask_badly, 2),
)


def prove_hostile(num_cases: int, seed: int) -> Outcome:
    """So many requests; afterwards the honest workers finish their round."""
    outcome = Outcome("hostile requests to a DiLoCo server", seed)
    chance = random.Random(seed)
    makers, weights = zip(*MAKERS)
    with memory_folder() as folder:
        target = Target(str(folder))
        try:
            wanted = target.fingerprint()
            for number in range(num_cases):
                request = chance.choices(makers, weights)[0](target, chance)
                _judge(target, request, number, wanted, outcome)
                if target.fingerprint() != wanted:
                    break
            _finish(target, outcome)
        finally:
            target.server.stop()
    return outcome


def _judge(target: Target, request: Request, number: int, wanted: str, outcome: Outcome) -> None:
    try:
        status, answer = target.send(request)
    except (OSError, http.client.HTTPException) as error:
        status, answer = 0, repr(error).encode()
    outcome.counts["requests"] += 1
    outcome.counts[request.family] += 1
    outcome.counts[f"answered {status}"] += 1
    what = f"case {number}: {request.family}: {request.method} {request.path[:200]}"
    if not 400 <= status < 500:
        outcome.fail(f"{what} was answered {status}: {answer[:200]!r}")
    elif b'"error"' not in answer:
        outcome.fail(f"{what} was refused without a reason: {answer[:200]!r}")
    if target.fingerprint() != wanted:
        outcome.fail(f"{what} changed the server's state")


def _finish(target: Target, outcome: Outcome) -> None:
    """The round that was open all the time ends as if nothing had been."""
    if outcome.failures:
        return
    open_round = target.old_rounds[0] = target.round(0)
    for name in COMMS:
        if name != target.submitted:
            target.submit(name)
    target.wait_for_commit()
    book = target.server.core.book
    if not all(book.applied[0][n][0] == book.passed[0][open_round] for n in COMMS):
        outcome.fail("the honest workers' submissions were not applied")
    if len(list(target.server.core.ledger.incoming.iterdir())) != 0:
        outcome.fail("bodies that were refused are left on the disk")
