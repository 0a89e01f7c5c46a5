"""What a request to the server says, checked field by field.

Owns: the shape of JSON bodies and queries. Does not own: whether the server agrees (rounds.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.diloco.rounds import WORKER_ID, Refusal
from headway.diloco.wire import VERSION, Header, WireError

COMMS = ("float32", "bf16", "int8")
MOST_STEPS = 1 << 40
_MOST_TEXT = 256


def check_version(given: object) -> None:
    """Both ends must speak one version."""
    if given != VERSION and given != str(VERSION):
        raise Refusal(
            426,
            "version",
            f"this server speaks version {VERSION} of the protocol, not {str(given)[:16]!r}",
            server_version=VERSION,
        )


def _bad(message: str) -> Refusal:
    return Refusal(400, "bad_request", message)


def check_id(value: Any) -> str:
    if not isinstance(value, str) or not WORKER_ID.fullmatch(value):
        raise _bad("a worker's id has 1 to 64 letters, digits, dots, underscores or hyphens")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MOST_TEXT or not value.isprintable():
        raise _bad(f"{name} must be a text of 1 to {_MOST_TEXT} characters")
    return value


def _whole(value: Any, name: str, least: int, most: int = MOST_STEPS) -> int:
    if type(value) is not int or not least <= value <= most:
        raise _bad(f"{name} must be a whole number from {least} to {most}")
    return value


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(f"{name} must be an object")
    return value


def parse_registration(said: Any) -> dict[str, Any]:
    """A registration with every field that there is."""
    said = _object(said, "the body")
    check_version(said.get("protocol"))
    model = _object(said.get("model"), "model")
    group = _object(said.get("group", {}), "group")
    resume, claim = said.get("resume_session"), said.get("claim")
    if said.get("comm") not in COMMS:
        raise _bad(f"comm must be one of {', '.join(COMMS)}")
    return {
        "worker_id": check_id(said.get("worker_id")),
        "model": {
            "fingerprint": _text(model.get("fingerprint"), "model.fingerprint"),
            "layout": model.get("layout"),
        },
        "sync_every": _whole(said.get("sync_every"), "sync_every", 1),
        "num_fragments": _whole(said.get("num_fragments", 1), "num_fragments", 1, 1 << 20),
        "comm": said["comm"],
        "step": _whole(said.get("step", 0), "step", 0),
        "resume_session": None if resume is None else _text(resume, "resume_session"),
        "claim": None if claim is None else _text(claim, "claim"),
        "group": {
            "world_size": _whole(group.get("world_size", 1), "group.world_size", 1, 1 << 20),
            "strategy": _text(group.get("strategy", "single"), "group.strategy"),
        },
    }


def parse_heartbeat(said: Any) -> tuple[str, str, int, float | None]:
    """Worker, session, step and speed."""
    said = _object(said, "the body")
    speed = said.get("steps_per_second")
    if speed is not None and (
        isinstance(speed, bool)
        or not isinstance(speed, int | float)
        or not 0 <= speed <= 1e9
        or not math.isfinite(speed)
    ):
        raise _bad("steps_per_second must be a number of 0 or more")
    step = _whole(said.get("step", 0), "step", 0)
    return check_id(said.get("worker_id")), _text(said.get("session"), "session"), step, speed


def parse_departure(said: Any) -> tuple[str, str]:
    """Worker and session."""
    said = _object(said, "the body")
    return check_id(said.get("worker_id")), _text(said.get("session"), "session")


def check_payload(header: Header, comm: str, mode: str, round_id: str) -> None:
    """What a submission says that it holds must be something that the server can use."""
    payload = header.meta.get("payload", "pseudo-gradient")
    if payload not in ("pseudo-gradient", "local"):
        raise WireError(422, "payload is pseudo-gradient or local")
    usable = (comm, mode, header.meta.get("base")) == ("float32", "sync", round_id)
    if payload == "local" and not usable:
        raise WireError(
            422, "local parameters are taken as float32, in synchronous rounds, for their base"
        )


@dataclass(frozen=True)
class Query:
    """The query of a request, of which every word may be there once."""

    words: Mapping[str, str]

    @classmethod
    def of(cls, query: Any, allowed: tuple[str, ...]) -> Query:
        """From aiohttp's query; what is not known or there twice is refused."""
        for name in query:
            if name not in allowed or len(query.getall(name)) != 1:
                raise _bad(f"the query takes {', '.join(allowed)}, each once")
        return cls(dict(query))

    def text(self, name: str) -> str:
        return _text(self.words.get(name), name)

    def worker(self) -> str:
        return check_id(self.words.get("worker"))

    def whole(self, name: str, least: int, most: int = MOST_STEPS) -> int:
        given = self.words.get(name, "")
        if not (given.isascii() and given.isdigit() and len(given) < 16):
            raise _bad(f"{name} must be a whole number from {least} to {most}")
        return _whole(int(given), name, least, most)

    def fragment(self) -> int | None:
        """None if none is named."""
        return self.whole("fragment", 0, 1 << 20) if "fragment" in self.words else None

    def seconds(self, name: str, most: float) -> float:
        """Not more than `most`; 0 if it is not there."""
        try:
            value = float(self.words.get(name, "0"))
        except ValueError:
            value = math.nan
        if not value >= 0:
            raise _bad(f"{name} must be a number of seconds")
        return min(value, most)
