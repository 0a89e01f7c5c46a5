"""The words of the control plane: commands with their fields, receipts, job ids.

Owns: what may be asked of a run and what a well-formed request looks like; the server, the
clients, the shell and the dashboard read it from here. Does not own: transport (server.py,
client.py), nor what a command does to a run (callbacks).
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headway.errors import nearest

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
COMMAND_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
MOST_BODY_BYTES = 64 * 1024
_MOST_DEPTH = 8
_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


class BadRequest(Exception):
    """A request that cannot be taken: an HTTP status, a message, and what would be valid."""

    def __init__(self, status: int, message: str, **valid: Any) -> None:
        super().__init__(message)
        self.status, self.message, self.valid = status, message, valid

    def to_dict(self) -> dict[str, Any]:
        return {"error": self.message, **self.valid}


@dataclass(frozen=True)
class Field:
    """One value that a command takes."""

    kind: str
    """`integer`, `number`, `boolean` or `string`."""
    help: str
    default: Any = None
    """None: it may be left out and then has no value."""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    most_characters: int = 4096

    def describe(self) -> str:
        """What is allowed, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        kinds = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}
        text = kinds.get(self.kind, f"text of at most {self.most_characters} characters")
        limits = [
            f"{words} {limit:g}"
            for words, limit in (
                ("at least", self.least),
                ("above", self.above),
                ("at most", self.most),
            )
            if limit is not None
        ]
        return " ".join([text, " and ".join(limits)]).strip()

    def takes(self, value: Any) -> bool:
        if self.kind == "boolean":
            return isinstance(value, bool)
        if self.kind == "string":
            return (
                isinstance(value, str)
                and len(value) <= self.most_characters
                and (not self.choices or value in self.choices)
            )
        kinds = (int,) if self.kind == "integer" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        try:
            finite = math.isfinite(value)
        except OverflowError:  # a whole number beyond any float
            return False
        return (
            finite
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )


@dataclass(frozen=True)
class CommandKind:
    """A command: what it does, the fields it takes, and which of them exclude each other."""

    help: str
    fields: Mapping[str, Field] = field(default_factory=dict)
    exactly_one_of: tuple[str, ...] = ()


COMMANDS: dict[str, CommandKind] = {
    "graceful_stop": CommandKind("End the run after this step, as if it were complete."),
    "save_checkpoint": CommandKind("Save a checkpoint after this step and go on."),
    "save_and_stop": CommandKind("Save a checkpoint after this step, then end the run."),
    "abort": CommandKind("End the run after this step without a save."),
    "pause": CommandKind(
        "Hold the run after this step until it is resumed.",
        {
            "offload": Field(
                "boolean", "move weights and optimizer state to the host meanwhile", default=False
            )
        },
    ),
    "resume": CommandKind("Go on with a run that is held."),
    "evaluate_now": CommandKind("Evaluate after this step."),
    "generate_now": CommandKind(
        "Write samples after this step.",
        {
            "prompt": Field("string", "what to continue; without it, the run's own prompts"),
            "max_new_tokens": Field("integer", "tokens to write", least=1, most=8192),
        },
    ),
    "set_learning_rate": CommandKind(
        "Change the learning rate from the next step on.",
        {
            "scale": Field("number", "factor of every group's rate", above=0, most=1e6),
            "value": Field(
                "number", "the first group's new rate; others by ratio", least=0, most=1e6
            ),
            "keep": Field("boolean", "keep the change when the run is resumed", default=True),
        },
        exactly_one_of=("scale", "value"),
    ),
    "set_log_level": CommandKind(
        "Change how much the run tells.",
        {"level": Field("string", "the least level that is told", choices=_LOG_LEVELS)},
        exactly_one_of=("level",),
    ),
    "profile_next_steps": CommandKind(
        "Write a trace of the steps that follow.",
        {"num_steps": Field("integer", "steps to trace", default=3, least=1, most=100)},
    ),
    "extend_max_steps": CommandKind(
        "Change the length of a run that counts steps.",
        {
            "max_steps": Field("integer", "the new length", least=1, most=2**53),
            "by": Field("integer", "steps to add", least=1, most=2**53),
        },
        exactly_one_of=("max_steps", "by"),
    ),
    "status": CommandKind("Nothing; answered at the next step."),
}


@dataclass(frozen=True)
class Command:
    """Something that was asked of a run. Two with one id are the same request."""

    id: str
    name: str
    data: Mapping[str, Any] = field(default_factory=dict)
    received_at: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "data": dict(self.data)}

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Command:
        """As another rank, or this one, wrote it."""
        return cls(said["id"], said["name"], dict(said["data"]), said["received_at"])


@dataclass(frozen=True)
class Receipt:
    """What became of a command."""

    id: str
    command: str
    state: str
    """`accepted`, then `applied`, `refused` (the run cannot do it) or `failed`."""
    step: int | None = None
    """The step after which it took effect, the same on all ranks."""
    message: str = ""
    accepted_at: float = 0.0
    settled_at: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def new_command_id() -> str:
    return secrets.token_hex(16)


def parse_json(body: bytes) -> Any:
    """A JSON value of limited size and depth; anything else is a `BadRequest`."""
    if len(body) > MOST_BODY_BYTES:
        raise BadRequest(413, f"the body is larger than {MOST_BODY_BYTES} bytes")
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, f"the body is not JSON: {str(error)[:200]}") from None
    if _depth(value) > _MOST_DEPTH:
        raise BadRequest(400, f"the body is nested deeper than {_MOST_DEPTH} levels")
    return value


def parse_command(value: Any) -> Command:
    """A request's body as a command with every field checked and defaults filled in."""
    if not isinstance(value, dict):
        raise BadRequest(400, "the body must be an object with the key 'command'")
    for key in value:
        if key not in ("command", "data", "id"):
            raise BadRequest(
                400, f"unknown key {_shown(key)}", valid_keys=["command", "data", "id"]
            )
    name = value.get("command")
    if not isinstance(name, str) or name not in COMMANDS:
        hint = nearest(name[:64], COMMANDS) if isinstance(name, str) else None
        more = f"; did you mean {hint!r}?" if hint else ""
        raise BadRequest(
            400, f"unknown command {_shown(name)}{more}", valid_commands=sorted(COMMANDS)
        )
    command_id = value.get("id")
    if command_id is None:
        command_id = new_command_id()
    elif not isinstance(command_id, str) or not COMMAND_ID.fullmatch(command_id):
        raise BadRequest(
            400,
            "id must be 1 to 64 letters, digits, dots, underscores or hyphens",
            valid_id=COMMAND_ID.pattern,
        )
    data = value.get("data")
    return Command(command_id, name, check_data(name, {} if data is None else data), time.time())


def check_data(name: str, data: Any) -> dict[str, Any]:
    """The fields of a command, checked, with the defaults of those that are not there."""
    kind = COMMANDS[name]
    if not isinstance(data, dict):
        raise BadRequest(400, f"{name}: data must be an object", valid_fields=_fields_of(kind))
    for key, value in data.items():
        wanted = kind.fields.get(key)
        if wanted is None:
            hint = nearest(str(key)[:64], kind.fields)
            more = f"; did you mean {hint!r}?" if hint else ""
            raise BadRequest(
                400, f"{name}: unknown field {_shown(key)}{more}", valid_fields=_fields_of(kind)
            )
        if not wanted.takes(value):
            raise BadRequest(
                400,
                f"{name}: {key} must be {wanted.describe()}, not {_shown(value)}",
                valid_fields=_fields_of(kind),
            )
    given = [key for key in kind.exactly_one_of if key in data]
    if kind.exactly_one_of and len(given) != 1:
        raise BadRequest(
            400,
            f"{name}: give exactly one of {', '.join(kind.exactly_one_of)}, not {len(given)}",
            valid_fields=_fields_of(kind),
        )
    defaults = {key: f.default for key, f in kind.fields.items() if f.default is not None}
    return {**defaults, **data}


def _fields_of(kind: CommandKind) -> dict[str, str]:
    return {key: wanted.describe() for key, wanted in kind.fields.items()}


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _depth(value: Any) -> int:
    """How deep a value is nested, at most one more than is allowed."""
    depth, level = 0, [value]
    while level and depth <= _MOST_DEPTH:
        depth += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth


def _shown(value: Any) -> str:
    """A value from outside, as short as a message can bear."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
