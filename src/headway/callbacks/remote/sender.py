"""The background sender: calls to a slow or absent service, off the training thread.

Owns the bounded queue, its one thread, the drop policy and the rate of warnings. Does not know
any service: what is sent is a callable without arguments.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from headway.errors import ConfigError

logger = logging.getLogger(__name__)

Call = Callable[[], Any]


class Sender:
    """Runs submitted calls one after the other, in order, on a daemon thread.

    `submit` never waits. When `capacity` calls are queued, the oldest one that may be dropped
    gives way (calls that must arrive are few and always kept). A call that raises is a warning,
    at most one per `warn_every_s`; `close` tells how many calls failed or were dropped.
    """

    def __init__(self, name: str, capacity: int = 1000, *, warn_every_s: float = 60.0) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ConfigError(f"capacity must be a whole number from 1, not {capacity!r}")
        self.name = name
        self.capacity = capacity
        self.warn_every_s = warn_every_s
        self.num_sent = 0
        self.num_failed = 0
        self.num_dropped = 0
        # Two queues with one numbering: taking the oldest and dropping the oldest are both O(1).
        self._droppable: deque[tuple[int, Call]] = deque()
        self._certain: deque[tuple[int, Call]] = deque()
        self._count = 0
        self._busy = False
        self._closed = False
        self._ending = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._last_warning_s: float | None = None
        self._unreported = 0

    @property
    def num_waiting(self) -> int:
        """Calls that are queued, the one being run not counted."""
        return len(self._droppable) + len(self._certain)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def submit(self, call: Call, *, must_arrive: bool = False) -> bool:
        """Queue a call; False when it was not taken (closed, or full of calls that must arrive)."""
        with self._changed:
            if self._closed:
                return False
            dropped = False
            if self.num_waiting >= self.capacity:
                if self._droppable:
                    self._droppable.popleft()
                    dropped = True
                elif not must_arrive:
                    self._count_drop()
                    return False
            self._count += 1
            (self._certain if must_arrive else self._droppable).append((self._count, call))
            if dropped:
                self._count_drop()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name=f"headway-sender-{self.name}", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
            return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything queued has been run; False when the time was not enough."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def close(self, timeout_s: float = 10.0, *, report: bool = True) -> bool:
        """Take no more calls, run what is queued within the time, and tell of losses.

        Returns whether everything was run. What the time does not allow is given up.
        """
        with self._changed:
            if self._ending:
                return self._is_idle()
            self._closed = True
        complete = self.drain(timeout_s)
        with self._changed:
            self._ending = True
            left = self.num_waiting + self._busy
            self._droppable.clear()
            self._certain.clear()
            self._changed.notify_all()
            thread = self._thread
        if complete and thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        if report and (self.num_dropped or self.num_failed or left):
            logger.warning(
                "%s: %d calls arrived, %d failed, %d were dropped because the queue of %d was "
                "full, %d were not sent in the %.2g s at the end",
                self.name,
                self.num_sent,
                self.num_failed,
                self.num_dropped,
                self.capacity,
                left,
                timeout_s,
            )
        return complete

    def _is_idle(self) -> bool:
        return not self._busy and not self.num_waiting

    def _count_drop(self) -> None:
        self.num_dropped += 1
        if self.num_dropped == 1:
            logger.warning(
                "%s: the service does not keep up; of %d waiting calls the oldest are dropped "
                "from now on",
                self.name,
                self.capacity,
            )

    def _take(self) -> Call | None:
        """The oldest call of both queues; None when the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending or self.num_waiting)
            if not self.num_waiting:
                return None
            first, other = self._droppable, self._certain
            if not first or (other and other[0][0] < first[0][0]):
                first = other
            self._busy = True
            return first.popleft()[1]

    def _work(self) -> None:
        while (call := self._take()) is not None:
            failed = True
            try:
                call()
                failed = False
            except BaseException as error:  # a service's SystemExit must not end the thread
                self._warn(error)
            finally:
                # Released before the thread counts as idle: a drained call holds nothing alive.
                del call
                with self._changed:
                    self._busy = False
                    self.num_failed += failed
                    self.num_sent += not failed
                    self._changed.notify_all()

    def _warn(self, error: BaseException) -> None:
        now_s = time.monotonic()
        last_s = self._last_warning_s
        if last_s is not None and now_s - last_s < self.warn_every_s:
            self._unreported += 1
            return
        more = f" ({self._unreported} more since the last message)" if self._unreported else ""
        logger.warning(
            "%s: a call failed, training goes on: %s: %s%s",
            self.name,
            type(error).__name__,
            error,
            more,
        )
        self._last_warning_s = now_s
        self._unreported = 0
