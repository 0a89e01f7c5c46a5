"""A run's events as signed JSON messages to a web server."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from headway.callbacks.log.json_values import plain_value
from headway.callbacks.remote.credentials import variable
from headway.callbacks.remote.http_post import Make
from headway.callbacks.remote.notifier import MOMENTS, Notifier, Report
from headway.errors import ConfigError, unknown

SECRET_VARIABLE = "HEADWAY_WEBHOOK_SECRET"
SIGNATURE_HEADER = "X-Headway-Signature"
TIMESTAMP_HEADER = "X-Headway-Timestamp"
DELIVERY_HEADER = "X-Headway-Delivery"
_OWN_HEADERS = ("content-type", "content-length", "user-agent") + tuple(
    name.lower() for name in (SIGNATURE_HEADER, TIMESTAMP_HEADER, DELIVERY_HEADER)
)
DEFAULT_EVENTS = ("start", "evaluate", "save", "end", "failure")
_OLDEST_S = 300.0


def sign(secret: str, timestamp: str, body: bytes) -> str:
    """The signature of a message: HMAC-SHA256 over timestamp, a dot, and the body."""
    made = hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256)
    return f"sha256={made.hexdigest()}"


def verify(
    secret: str, headers: Mapping[str, str], body: bytes, *, oldest_s: float = _OLDEST_S
) -> bool:
    """Whether a message that a server got is ours, whole, and not an old one sent again."""
    given = {name.lower(): value for name, value in headers.items()}
    timestamp = given.get(TIMESTAMP_HEADER.lower(), "")
    signature = given.get(SIGNATURE_HEADER.lower(), "")
    if not timestamp.isascii() or not timestamp.isdigit() or not signature.isascii():
        return False
    if abs(time.time() - int(timestamp)) > oldest_s:
        return False
    return hmac.compare_digest(sign(secret, timestamp, body), signature)


class WebhookCallback(Notifier):
    """Posts JSON to `url` (or the variable `HEADWAY_WEBHOOK_URL`) at the chosen `events`.

    Of start, log, evaluate, save, epoch, end and failure. With a `secret` (or the variable
    `HEADWAY_WEBHOOK_SECRET`) every message is signed, over the time and the body. A busy, broken
    or absent server is tried `max_retries` times more, on a thread of its own; the end of a run
    waits `close_timeout_s` for what is left. A message has the same delivery id in every attempt.
    """

    url_variable = "HEADWAY_WEBHOOK_URL"

    def __init__(
        self,
        url: str | None = None,
        secret: str | None = None,
        events: Sequence[str] = DEFAULT_EVENTS,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
        max_retries: int = 5,
        *,
        name: str | None = None,
        enabled: bool = True,
        queue_size: int = 100,
        close_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(
            url=url,
            name=name,
            enabled=enabled,
            timeout_s=timeout_s,
            max_retries=max_retries,
            queue_size=queue_size,
            close_timeout_s=close_timeout_s,
        )
        if isinstance(events, str) or not isinstance(events, Sequence) or not events:
            raise ConfigError(f"events: {events!r} given; allowed: a list of {', '.join(MOMENTS)}")
        problems = [unknown("events", str(e), MOMENTS) for e in events if e not in MOMENTS]
        if problems:
            raise ConfigError(problems)
        if secret is not None and (not isinstance(secret, str) or not secret):
            raise ConfigError("secret: must be text that is not empty, or none")
        self.events = tuple(events)
        self._secret = secret
        self._headers = _check_headers(headers)

    def wants(self, moment: str) -> bool:
        return moment in self.events

    def compose(self, report: Report) -> Make:
        body, delivery = make_body(report), uuid.uuid4().hex
        secret = self._secret or variable(SECRET_VARIABLE)

        def make() -> tuple[bytes, dict[str, str]]:
            # A server refuses what is old: an attempt that comes late has its own time.
            timestamp = str(int(time.time()))
            headers = {
                **self._headers,
                "Content-Type": "application/json",
                "User-Agent": "headway",
                DELIVERY_HEADER: delivery,
                TIMESTAMP_HEADER: timestamp,
            }
            if secret is not None:
                headers[SIGNATURE_HEADER] = sign(secret, timestamp, body)
            return body, headers

        return make


def make_body(report: Report) -> bytes:
    """A message: what is known of the moment; what is not is left out."""
    facts: dict[str, Any] = asdict(report)
    facts["event"] = facts.pop("moment")
    facts["timestamp"] = facts.pop("time_s")
    facts["metrics"] = facts.pop("figures")
    facts["traceback"] = "\n".join(facts.pop("trace"))
    known = {key: value for key, value in facts.items() if value not in (None, "", {})}
    return json.dumps(plain_value(known), allow_nan=False, sort_keys=True).encode()


def _check_headers(given: Mapping[str, str] | None) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError("headers: must be a mapping of name to text, or none")
    for name, value in given.items():
        texts = isinstance(name, str) and isinstance(value, str)
        # The value may be a secret and is not shown.
        if not texts or not name or not (name + value).isprintable() or ":" in name:
            raise ConfigError(f"headers: {name!r}: must be a name and a text in one line")
        if name.lower() in _OWN_HEADERS:
            raise ConfigError(f"headers: {name!r} is set by WebhookCallback itself")
    return dict(given)
