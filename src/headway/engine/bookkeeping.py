"""Work beside training: operations in threads, their results back on the main thread.

Owns: the threads, the order, the time limits, and what a failed operation leads to. Does not own:
when results are taken (loop), nor what the operations do (callbacks).

Operations that talk to other ranks go through one thread, in the order in which they were begun,
and their results are taken at the same step on every rank. So whatever a rank's pace, ranks never
meet in different operations. A Python thread cannot be ended from outside: one that is past its
limit is left to itself, and does not keep the process from exiting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headway.engine.blame import name_culprit
from headway.engine.events import EventBus

logger = logging.getLogger(__name__)

SOFT_TIMEOUT_S = 30.0
HARD_TIMEOUT_S = 1800.0
_NUM_THREADS = 4
_AFTER_ERROR_S = 10.0
"""How long operations under way may still take once the run has failed."""
_LOOK_S = 0.1


class BookkeepingError(RuntimeError):
    """An operation beside training failed, or took longer than it may."""


@dataclass(eq=False)
class Operation:
    """One piece of work, from its beginning until its result is taken."""

    name: str
    call: Callable[[], Any]
    cb: Callable[[Any], Any] | None = None
    distributed: bool = False
    soft_timeout_s: float = SOFT_TIMEOUT_S
    hard_timeout_s: float = HARD_TIMEOUT_S
    owner: str | None = None
    """The callback that began it, whose policy holds when it fails."""
    started_s: float | None = None
    result: Any = None
    error: BaseException | None = None
    ended: bool = False
    given_up: bool = False
    told_late: bool = False


@dataclass
class _Lane:
    """Operations that go through the same threads."""

    num_threads: int
    waiting: deque[Operation] = field(default_factory=deque)
    num_running: int = 0


class Bookkeeping:
    """The operations of one trainer. Outside a run they are done at once, in the calling thread.

    `num_ranks`: how many take part in operations that are `distributed`.
    """

    def __init__(self, bus: EventBus, num_ranks: int = 1) -> None:
        self._bus, self._num_ranks = bus, num_ranks
        self._changed = threading.Condition()
        self._open = False
        self._reset()

    def _reset(self) -> None:
        self._operations: list[Operation] = []
        self._lanes = {False: _Lane(_NUM_THREADS), True: _Lane(1)}

    def open(self) -> None:
        """A run begins: operations go to threads from here on."""
        self._open = True

    # Beginning

    def begin(
        self, operation: Operation, *, allow_multiple: bool = True, cancel_in_progress: bool = False
    ) -> bool:
        """Begin an operation; returns whether it will be done."""
        operation.owner = self._bus.delivering
        if not self._open:
            result = operation.call()
            if operation.cb is not None:
                operation.cb(result)
            return True
        with self._changed:
            twins = [
                one
                for one in self._operations
                if one.name == operation.name and one.distributed == operation.distributed
            ]
            if not allow_multiple or cancel_in_progress:
                running = self._call_off(twins, also_running=cancel_in_progress)
                if running and not cancel_in_progress:
                    return False
            self._operations.append(operation)
            lane = self._lanes[operation.distributed]
            lane.waiting.append(operation)
            self._fill(lane)
        return True

    def _call_off(self, twins: list[Operation], *, also_running: bool) -> bool:
        """Drop operations that have not begun; returns whether others of them are under way."""
        running = False
        for twin in twins:
            lane = self._lanes[twin.distributed]
            if twin.distributed and self._num_ranks > 1:
                # Another rank may be in it already: it is done on all, or on none.
                running = True
                if also_running:
                    twin.cb = None
            elif twin.started_s is None:
                lane.waiting.remove(twin)
                self._operations.remove(twin)
            elif not twin.ended:
                running = True
                if also_running:
                    self._give_up(twin)
        return running

    def _give_up(self, operation: Operation) -> None:
        """Wait no longer for an operation under way; its result will be thrown away."""
        lane = self._lanes[operation.distributed]
        operation.given_up = True
        lane.num_running -= 1
        self._operations.remove(operation)
        self._fill(lane)

    def _fill(self, lane: _Lane) -> None:
        while lane.waiting and lane.num_running < lane.num_threads:
            operation = lane.waiting.popleft()
            operation.started_s = time.monotonic()
            lane.num_running += 1
            threading.Thread(
                target=self._work,
                args=(operation, lane),
                name=f"headway-{operation.name}",
                daemon=True,
            ).start()

    def _work(self, operation: Operation, lane: _Lane) -> None:
        try:
            operation.result = operation.call()
        except BaseException as error:
            operation.error = error
        with self._changed:
            operation.ended = True
            if not operation.given_up:
                lane.num_running -= 1
                self._fill(lane)
            self._changed.notify_all()

    # Taking results, on the main thread

    @property
    def shared_is_due(self) -> bool:
        """Whether the next operation of all ranks has ended here; then every rank must take it."""
        first = self._first_shared()
        return first is not None and first.ended

    @property
    def has_ended(self) -> bool:
        """Whether there is a result that could be taken now."""
        return self.shared_is_due or bool(self._takeable())

    def _takeable(self) -> list[Operation]:
        """What this rank takes alone: of one name in the order of its beginning."""
        behind: set[str] = set()
        found = []
        for operation in tuple(self._operations):
            if operation.distributed and self._num_ranks > 1:
                # A failure needs no agreement: it ends the run, which the others are told.
                if operation.ended and operation.error is not None:
                    found.append(operation)
            elif operation.ended and operation.name not in behind:
                found.append(operation)
            else:
                behind.add(operation.name)
        return found

    def _first_shared(self) -> Operation | None:
        if self._num_ranks == 1:
            return None
        return next((one for one in self._operations if one.distributed), None)

    def deliver(self) -> None:
        """Take what has ended, of one name in the order of its beginning; waits for nothing."""
        if not self._operations:
            return
        self._watch_times()
        for operation in self._takeable():
            self._take(operation)

    def deliver_shared(self) -> None:
        """Take the next operation of all ranks; every rank does so at this step."""
        operation = self._first_shared()
        if operation is None:
            raise BookkeepingError(
                "another rank has done a distributed operation that this one never began; such "
                "operations must be begun by every rank, in the same order"
            )
        self._wait(operation)
        self._take(operation)

    def drain(self) -> None:
        """Wait until all has ended, each within its limit, and take it; also what that begins."""
        while self._operations:
            first = self._operations[0]
            if first.distributed and self._num_ranks > 1:
                self.deliver_shared()
            elif self._wait(first):
                self._take(first)

    def close(self) -> None:
        """The run is over, and what went well is drained: drop what waits, leave what hangs."""
        self._open = False
        deadline_s = time.monotonic() + _AFTER_ERROR_S
        with self._changed:
            for lane in self._lanes.values():
                lane.waiting.clear()
            under_way = [
                one for one in self._operations if one.started_s is not None and not one.distributed
            ]
            while any(not one.ended for one in under_way):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            for one in under_way:
                if not one.ended:
                    logger.warning("background operation %r was still under way", one.name)
                elif one.error is not None:
                    logger.warning("background operation %r failed: %s", one.name, one.error)
            self._reset()

    def _wait(self, operation: Operation) -> bool:
        """Returns whether it has ended; False where its owner's policy is to go on without it."""
        with self._changed:
            while not operation.ended and not operation.given_up:
                self._changed.wait(_LOOK_S)
                self._watch_times()
        return not operation.given_up

    def _watch_times(self) -> None:
        """Tell who takes long; give up whoever is past the limit."""
        now_s = time.monotonic()
        with self._changed:
            for operation in tuple(self._operations):
                if operation.started_s is None or operation.ended:
                    continue
                taken_s = now_s - operation.started_s
                if taken_s > operation.hard_timeout_s:
                    self._give_up(operation)
                    error = BookkeepingError(
                        f"background operation {operation.name!r} did not end within "
                        f"{operation.hard_timeout_s:g} s"
                    )
                    self._fail(operation, error)
                elif taken_s > operation.soft_timeout_s and not operation.told_late:
                    operation.told_late = True
                    logger.warning(
                        "background operation %r has taken more than %g s",
                        operation.name,
                        operation.soft_timeout_s,
                    )

    def _take(self, operation: Operation) -> None:
        self._operations.remove(operation)
        error = operation.error
        if error is not None:
            told = BookkeepingError(
                f"background operation {operation.name!r} failed: {type(error).__name__}: {error}"
            )
            told.__cause__ = error
            self._fail(operation, told)
        elif operation.cb is not None and operation.owner not in self._bus.disabled:
            try:
                operation.cb(operation.result)
            except Exception as failed:
                self._fail(operation, failed)

    def _fail(self, operation: Operation, error: Exception) -> None:
        """Only an observer's own operation may fail without ending the run."""
        where = f"background operation {operation.name!r}"
        if operation.owner is not None:
            # Without the others this rank alone would no longer begin its operations.
            alone = not operation.distributed or self._num_ranks == 1
            if alone and self._bus.tolerate(operation.owner, where, error):
                return
            name_culprit(error, operation.owner, where)
        raise error
