"""Cancelling a run by a tag that someone sets at an experiment tracker.

Owns: when tags are looked up (on a thread of its own) and which of them cancel. Does not own: how
a service is asked for tags (the trackers), nor the stop itself (the loop).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from headway.callbacks.remote.sender import Sender
from headway.errors import ConfigError

logger = logging.getLogger(__name__)

CANCEL_TAGS = ("cancel", "canceled", "cancelled")
_STEPS = 25
_LEAST_GAP_S = 5.0


class CancelWatch:
    """Looks up a run's tags every so many steps and remembers the one that cancels.

    Without an interval: every 25 steps, but no more often than every 5 seconds.
    """

    def __init__(self, kind: str, tags: Any, interval_steps: int | None) -> None:
        if isinstance(tags, str) or not isinstance(tags, Sequence):
            raise ConfigError(f"{kind}: cancel_tags must be a list of texts, not {tags!r}")
        for tag in tags:
            if not isinstance(tag, str) or not tag:
                raise ConfigError(f"{kind}: cancel_tags must hold texts only, not {tag!r}")
        if interval_steps is not None and (
            isinstance(interval_steps, bool)
            or not isinstance(interval_steps, int)
            or interval_steps < 1
        ):
            raise ConfigError(
                f"{kind}: cancel_check_interval must be a whole number of steps from 1, or None: "
                f"{interval_steps!r}"
            )
        self.kind = kind
        self.tags = frozenset(tag.lower() for tag in tags)
        self.interval_steps = interval_steps or _STEPS
        self.least_gap_s = _LEAST_GAP_S if interval_steps is None else 0.0
        self.found: str | None = None
        """The tag that cancels the run, once it was seen."""
        self._fetch: Callable[[], Sequence[str]] | None = None
        self._sender: Sender | None = None
        self._looked_s = float("-inf")
        self._told = False

    def start(self, fetch: Callable[[], Sequence[str]]) -> None:
        self.found, self._told = None, False
        if self.tags:
            self._fetch, self._sender = fetch, Sender(f"{self.kind}, cancel tags", capacity=1)

    def asks_to_stop(self, global_step: int) -> bool:
        """Once a step, at its end: whether a tag asks for the end of the run."""
        if self.found is not None:
            if not self._told:
                self._told = True
                logger.warning(
                    "%s: the tag %r asks to stop; the run ends after step %d",
                    self.kind,
                    self.found,
                    global_step,
                )
            return True
        if self._sender is not None and global_step % self.interval_steps == 0:
            now_s = time.monotonic()
            if now_s - self._looked_s >= self.least_gap_s and not self._sender.num_waiting:
                self._looked_s = now_s
                self._sender.submit(self._look)
        return False

    def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close(0.0, report=False)

    def _look(self) -> None:
        assert self._fetch is not None
        for tag in self._fetch():
            if tag.lower() in self.tags:
                self.found = tag
