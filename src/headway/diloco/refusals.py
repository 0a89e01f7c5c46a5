"""What a request is answered with that cannot be served.

Owns: turning every error of a handler into a status, a word for programs and words for people.
Does not own: when something is refused (rounds.py, wire.py, request_fields.py).
"""

from __future__ import annotations

import errno
import logging
from typing import Any, NamedTuple

from headway.control.schema import BadRequest
from headway.diloco.rounds import Refusal
from headway.diloco.wire import WireError
from headway.errors import ConfigError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EROFS, errno.EIO)
_WIRE_REASONS = {422: "shape", 413: "too_large", 426: "version"}
HANDLED = (Refusal, WireError, BadRequest, ConfigError, OSError)

logger = logging.getLogger(__name__)


class Answer(NamedTuple):
    """Status, word, words, and what else is told."""

    status: int
    reason: str
    words: str
    more: dict[str, Any]


def explain(error: BaseException) -> Answer | None:
    """What is said of an error; None if it is none that a client should hear of."""
    if isinstance(error, Refusal):
        return Answer(error.status, error.reason, error.message, error.more)
    if isinstance(error, WireError):
        reason = _WIRE_REASONS.get(error.status, "bad_request")
        return Answer(error.status, reason, error.reason, {})
    if isinstance(error, BadRequest):
        more = dict(error.valid)
        reason = str(more.pop("reason", "bad_request"))
        return Answer(error.status, reason, error.message, more)
    if isinstance(error, ConfigError):
        return Answer(422, "bad_request", str(error), {})
    if isinstance(error, OSError) and error.errno in (*_FULL, *_CLOSED):
        logger.error("a body cannot be kept: %s", error)
        full = error.errno in _FULL
        words = "disk is full" if full else f"folder cannot be written to ({error.strerror})"
        return Answer(503, "no_room", f"the server's {words}", {})
    return None
