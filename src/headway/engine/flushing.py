"""A flush: the buffered metrics of all ranks, brought to the host and joined.

Owns: the order transfer, then joining; the thread in which a flush goes on while the next step is
computed; what happens when it fails, or when a rank does not come. Does not own: when a flush
happens and what its result leads to (delivery).

At most one flush is under way, and the main thread takes its result before it begins another. So
the ranks, which begin and finish flushes at the same steps, join them in the same order.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass, field
from queue import SimpleQueue

from torch import Tensor

from headway.dist.agreement import spell_ranks
from headway.dist.channel import RankChannel
from headway.engine.host_copy import HostCopy
from headway.engine.joining import Joined, Key, join
from headway.engine.metrics import MetricBuffer, Steps

logger = logging.getLogger(__name__)

WARN_AFTER_S = 30.0
_POSTING_S = 2.0
"""How long the other ranks may take to note that they wait as well."""


@dataclass
class _Flush:
    """One flush under way."""

    number: int
    steps: Steps
    """As recorded; kept until the result is taken, for a run that fails before."""
    keys: list[Key] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Where in `numbers` those belong that come from a device."""
    result: Joined | None = None
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)
    at_ranks: bool = False
    """Whether this rank's numbers are here, so that it waits for the others' alone."""


class Flusher:
    """Brings what a buffer holds to the host and joins it over ranks.

    `flush` does so at once. `start` begins it and `finish` takes the result: in between a thread
    works where there are several ranks; a single process has nothing to do but the transfer.
    """

    def __init__(
        self,
        buffer: MetricBuffer,
        channel: RankChannel | None = None,
        *,
        warn_after_s: float = WARN_AFTER_S,
        limit_s: float | None = None,
    ) -> None:
        self._buffer, self._channel = buffer, channel
        self._copy = HostCopy()
        self._number = 0
        self._under_way: _Flush | None = None
        self._told_apart = False
        self._warn_after_s = warn_after_s
        # Before the channel's own limit, whose error does not say who is missing.
        self._limit_s = limit_s or (channel.timeout_s * 0.9 if channel is not None else math.inf)
        self._queue: SimpleQueue[_Flush | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a flush is under way whose result nobody has taken."""
        return self._under_way is not None

    def start(self) -> None:
        """Begin to flush what is buffered; the one before must be finished."""
        flush = self._begin()
        if self._channel is not None:
            if self._thread is None:
                # A daemon: a rank that never answers must not keep this process from ending.
                self._thread = threading.Thread(
                    target=self._work, name="headway-metrics", daemon=True
                )
                self._thread.start()
            self._queue.put(flush)

    def finish(self) -> list[tuple[int, dict[str, float]]]:
        """The steps of the flush under way, in order; raises what it failed with."""
        flush = self._under_way
        assert flush is not None
        if self._channel is None:
            self._complete(flush)
        elif not flush.done.wait(self._warn_after_s):
            self._wait_long(flush)
        return self._take_result(flush)

    def flush(self) -> list[tuple[int, dict[str, float]]]:
        """Every buffered step, in order, as the numbers of all ranks."""
        flush = self._begin()
        self._complete(flush)
        return self._take_result(flush)

    def pending(self) -> Steps:
        """What no `finish` or `flush` has given out, as this rank recorded it."""
        steps: Steps = {}
        for part in (self._under_way.steps if self._under_way else {}, self._buffer.pending()):
            for step, entries in part.items():
                steps.setdefault(step, {}).update(entries)
        return steps

    def close(self, *, wait: bool = True) -> None:
        """End the thread, once it is through with what it does."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if wait:
                thread.join(self._warn_after_s)

    def _begin(self) -> _Flush:
        assert self._under_way is None, "at most one flush is under way"
        self._number += 1
        computed = self._buffer.computed
        flush = self._under_way = _Flush(self._number, self._buffer.take())
        waiting: list[Tensor] = []
        for step in sorted(flush.steps):
            for name, entry in flush.steps[step].items():
                flush.keys.append(Key(step, name, entry.reduce_type))
                if isinstance(entry.value, Tensor):
                    flush.places.append(len(flush.numbers))
                    flush.numbers.append(math.nan)
                    waiting.append(entry.value)
                else:
                    flush.numbers.append(float(entry.value))
        self._copy.start(waiting, computed)
        return flush

    def _complete(self, flush: _Flush) -> None:
        try:
            for place, number in zip(flush.places, self._copy.read(), strict=True):
                flush.numbers[place] = number
            flush.at_ranks = True
            flush.result = join(self._channel, flush.number, flush.keys, flush.numbers)
        except BaseException as error:
            flush.error = error
        finally:
            flush.done.set()

    def _work(self) -> None:
        while (flush := self._queue.get()) is not None:
            self._complete(flush)

    def _take_result(self, flush: _Flush) -> list[tuple[int, dict[str, float]]]:
        if flush.error is not None:  # the flush stays, for whoever asks what is pending
            raise flush.error
        assert flush.result is not None
        self._under_way = None
        apart = flush.result.kinds_of_others
        if apart:
            self._buffer.learn_types(apart)
            if not self._told_apart:
                self._told_apart = True
                own = {key.name for key in flush.keys}
                logger.info(
                    "not every rank records the same metrics (here %d of %d): such flushes go "
                    "by name, each metric over the ranks that have it",
                    len(own & set(apart)),
                    len(apart),
                )
        return flush.result.steps

    def _wait_long(self, flush: _Flush) -> None:
        """Say who is missing; give up at the limit."""
        channel, waited_from_s = self._channel, time.monotonic() - self._warn_after_s
        assert channel is not None
        if flush.at_ranks:
            channel.post_arrival(flush.number)
        if flush.done.wait(min(_POSTING_S, self._warn_after_s)):
            return
        logger.warning(
            "metrics: waiting for %g s for %s", self._warn_after_s, self._describe_absent(flush)[0]
        )
        if flush.done.wait(max(0.0, self._limit_s - (time.monotonic() - waited_from_s))):
            return
        missing, absent = self._describe_absent(flush)
        error = RuntimeError(f"metrics: waited for {self._limit_s:g} s for {missing}")
        error.failed_rank = absent[0] if absent else None  # type: ignore[attr-defined]
        raise error

    def _describe_absent(self, flush: _Flush) -> tuple[str, list[int]]:
        assert self._channel is not None
        if not flush.at_ranks:
            return "the device to compute them", []
        absent = self._channel.find_absent(flush.number)
        who = spell_ranks(absent) if absent else "an answer, though every rank has come"
        return who, [rank for rank in absent if rank != self._channel.rank]
