"""What a worker may be told by a server, or by its absence.

Owns: the kinds of failure that callers tell apart. Does not own: retries (flight.py, client.py),
what the server refuses and why (rounds.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class DiLoCoError(Exception):
    """Something between a worker and its server went wrong."""


class Unreachable(DiLoCoError):
    """No answer, or none that can be trusted; asking again may help."""


class NotThere(Unreachable):
    """There was no connection: nothing was sent."""


class Busy(Unreachable):
    """The server is there, and has no place for a body just now."""


class Refused(DiLoCoError):
    """The server answered, and said no. `status` is HTTP's, `answer` what came with it."""

    def __init__(self, status: int, reason: str, answer: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.answer = status, reason, dict(answer or {})


class NotAllowed(Refused):
    """No token, a wrong one, or one that is for another worker."""


class VersionMismatch(Refused):
    """The server speaks another version of the protocol."""


class ModelMismatch(Refused):
    """The server trains another model."""


class IdTaken(Refused):
    """Another worker that is alive has this id."""


class UnknownSession(Refused):
    """The server does not know this worker, or no more."""


class RoundOver(Refused):
    """The round was committed before the submission came."""


MISTAKES = (NotAllowed, VersionMismatch, ModelMismatch, IdTaken)
"""What no repetition mends: a worker that meets it stops."""
