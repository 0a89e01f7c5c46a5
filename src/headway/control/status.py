"""What a run shows to the outside: its status, and the stream of what happens to it.

Owns: the board that the training thread writes and server threads read, made safe for JSON as it
is written. Does not own: what is worth showing (callbacks), nor the wire (server.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

PHASES = (
    "starting",
    "training",
    "evaluating",
    "saving",
    "pausing",
    "paused",
    "stopping",
    "finished",
    "failed",
)
_MOST_EVENTS = 1024
_MOST_INCIDENTS = 100
_MOST_CHARACTERS = 4096
_MOST_DEPTH = 6


class StatusBoard:
    """Few writers, many readers; a reader of the status waits for nobody, nor holds a writer up."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        now = time.time()
        self._status: Mapping[str, Any] = {
            "job_id": job_id,
            "status": "starting",
            "timestamp": now,
            "started_at": now,
            "incidents": [],
        }
        self._lock = threading.Lock()
        self._events: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_MOST_EVENTS)
        self._last_number = 0
        self._closed = False

    @property
    def status(self) -> Mapping[str, Any]:
        """The newest status; it is replaced, never changed."""
        return self._status

    def publish(self, **values: Any) -> None:
        """Replace some values of the status."""
        phase = values.get("status", "training")
        assert phase in PHASES, phase
        changed = {key: json_safe(value) for key, value in values.items()}
        with self._lock:
            self._status = {**self._status, **changed, "timestamp": time.time()}

    def announce(self, kind: str, /, **values: Any) -> None:
        """Add an event to the stream."""
        event = {"event": kind, "timestamp": time.time()}
        event.update({key: json_safe(value) for key, value in values.items()})
        with self._lock:
            self._last_number += 1
            self._events.append((self._last_number, event))

    def report_incident(self, kind: str, message: str, step: int) -> None:
        """Note something that a person should look at; the newest are kept."""
        incident = {"kind": kind, "message": message, "step": step, "timestamp": time.time()}
        incident = json_safe(incident)
        with self._lock:
            kept = [*self._status["incidents"], incident][-_MOST_INCIDENTS:]
            self._status = {**self._status, "incidents": kept, "timestamp": time.time()}
        self.announce("incident", **incident)

    def events_after(self, number: int) -> tuple[int, list[tuple[int, dict[str, Any]]]]:
        """(how many of them are lost, the events after that number)."""
        with self._lock:
            kept = list(self._events)
            first = kept[0][0] if kept else self._last_number + 1
        number = min(number, self._last_number)
        return max(0, first - number - 1), [entry for entry in kept if entry[0] > number]

    @property
    def last_number(self) -> int:
        """The number of the newest event."""
        return self._last_number

    @property
    def closed(self) -> bool:
        """Whether there will be no more events."""
        return self._closed

    def close(self) -> None:
        """The last event was announced."""
        self._closed = True


def json_safe(value: Any, depth: int = 0) -> Any:
    """A copy that JSON can say: no NaN, no tensor, nothing endless."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value[:_MOST_CHARACTERS]
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else float(value) if abs(value) < 1e300 else None
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if depth >= _MOST_DEPTH:
        return str(value)[:_MOST_CHARACTERS]
    if isinstance(value, Mapping):
        return {str(key)[:256]: json_safe(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [json_safe(inner, depth + 1) for inner in value]
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():  # a number of torch or numpy
        return json_safe(item(), depth)
    return str(value)[:_MOST_CHARACTERS]
