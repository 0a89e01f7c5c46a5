"""Commands from outside on their way to all ranks, and a run that is held by one of them.

Owns: carrying what reached one rank to every rank, after the same step; waiting while the run is
paused; where the state is meanwhile. Does not own: what commands mean (callbacks), nor when the
loop looks (loop).

That something waits is one bit of the agreement that ends every step. Ranks of a paused run wait on
the store, each for itself: a collective would run into its time limit.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from headway.engine.parking import StateParking

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_numbers = itertools.count()

Message = dict[str, Any]
Apply = Callable[[list[Message], list[int]], None]


class CommandSource(Protocol):
    """Where commands come in, on one rank; its methods are called by the training thread."""

    pending: bool
    """Whether something waits."""

    def take_messages(self) -> list[Message]:
        """All that waits, as JSON can carry it."""

    def wait_for_command(self, timeout_s: float) -> bool:
        """Sleep until something waits, or the time is over."""


class CommandRelay:
    """One for each trainer. Every rank has one; that of the leading rank has a source."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self._rank, self._world_size = rank, world_size
        self._source: CommandSource | None = None
        self._apply: Apply | None = None
        self._tick: Callable[[], None] | None = None
        self._on_held: Callable[[str | None], None] | None = None
        self._agree: Callable[[int], int] = int
        self._store: Any = None
        # Trainers are made in the same order on all ranks.
        self._number = next(_numbers)
        self._num_holds = 0
        self._parking: StateParking | None = None
        # The same on all ranks, also where one of them found no room on its host.
        self._moved_away = False
        self._trouble: str | None = None
        self._waits = False
        self._must_end: Callable[[], bool] | None = None
        self.paused = False
        """Whether the run is to wait after this step; the same on all ranks."""
        self._changed = False

    def note_change(self) -> None:
        """The state is not that of the last save any more, though the step is."""
        self._changed = True

    def take_change(self) -> bool:
        """Whether there was such a change since this was asked last."""
        changed, self._changed = self._changed, False
        return changed

    def attach(
        self,
        source: CommandSource | None,
        apply: Apply,
        tick: Callable[[], None] | None = None,
        on_held: Callable[[str | None], None] | None = None,
    ) -> None:
        """Begin to look. `apply` gets the same messages on every rank, after the same step, and
        which ranks have nobody to give them to.

        `tick` is called at the end of every step: an event costs many times as much. `on_held`,
        when a run that was paused waits and its state is where it was to be; with why it is not,
        on which ranks, if that is so.
        """
        self._source, self._apply, self._tick, self._on_held = source, apply, tick, on_held

    def begin(self, agree: Callable[[int], int]) -> None:
        """A run begins, whose ranks come to one decision by `agree`."""
        self.paused, self._parking, self._moved_away = False, None, False
        self._trouble, self._waits = None, False
        self._agree = agree

    def end(self) -> None:
        """The run is over: what was moved away is brought back, as far as there is room."""
        parking, self._parking = self._parking, None
        self.paused = self._waits = False
        if parking is not None and parking.is_parked:
            try:
                parking.unpark()
            except RuntimeError as error:
                logger.error("the state could not be brought back to the device: %s", error)

    def detach(self) -> None:
        """Look no more."""
        self._source = self._apply = self._tick = self._on_held = None

    @property
    def pending(self) -> bool:
        """Whether this rank has something for all of them."""
        return self._source is not None and self._source.pending

    def look(self) -> bool:
        """At the end of a step: whether this rank has something for all of them."""
        if self._tick is not None:
            self._tick()
        return self._source is not None and self._source.pending

    def deliver(self) -> None:
        """All ranks together: carry over what waits, and apply it."""
        messages = [] if self._source is None else self._source.take_messages()
        deaf: list[int] = []
        if self._world_size > 1:
            from headway.dist.agreement import exchange

            said = exchange([messages, self._apply is not None])
            messages = [message for taken, _ in said for message in taken]
            deaf = [rank for rank, (_, hears) in enumerate(said) if not hears]
        if messages and self._apply is not None:
            self._apply(messages, deaf)

    # A run that is held

    def pause(
        self, parking: StateParking | None = None, must_end: Callable[[], bool] | None = None
    ) -> None:
        """Hold the run after this step, with its state away from the device if that is given.

        `must_end`: whether this rank is asked to end, by somebody who does not wait.
        """
        self.paused = True
        if self._parking is None:
            self._parking, self._must_end = parking, must_end

    def resume(self) -> None:
        """Let the run go on; raises, and leaves it held, if its state finds no room any more."""
        self.bring_back(or_end=False)
        self.paused, self._parking, self._waits = False, None, False

    @property
    def is_held(self) -> bool:
        """Whether a paused run waits, or could: what it still had to do is done, and its state is
        where it was to be."""
        return self.paused and self._waits

    @property
    def is_offloaded(self) -> bool:
        """Whether the state of all ranks is away from their devices."""
        return self._moved_away and self._trouble is None

    def bring_back(self, *, or_end: bool = True) -> None:
        """All ranks together: have the state on the device again; it is there on all, or on none.

        A run that stays paused has it moved away again by the next `hold`. One that must end now,
        and finds no room, is saved from the host, unless `or_end` is False.
        """
        parking, error = self._parking, None
        if parking is None or not self._moved_away:
            return
        self._waits = False
        try:
            parking.unpark()
        except RuntimeError as raised:
            error = raised
        if self._agree(int(error is not None)):
            must_end = or_end and self._must_end is not None and self._must_end()
            if self._agree(int(must_end)):
                self._end_on_host(parking, error)
                return
            self._trouble = self._move_away(parking)
            self._waits = True
            why = error or "another rank found no room for it"
            raise RuntimeError(f"the state could not be brought back to the device: {why}")
        self._moved_away, self._trouble = False, None

    def _end_on_host(self, parking: StateParking, error: RuntimeError | None) -> None:
        if error is not None:
            logger.warning("saving from the host, since the device has no room: %s", error)
            parking.lend()
        self._parking, self._moved_away, self._trouble = None, False, None

    def hold(self, has_news: Callable[[], bool]) -> None:
        """All ranks together: wait until a command has come, or `has_news` on any rank."""
        if self._parking is not None and not self._moved_away:
            self._trouble = self._move_away(self._parking)
        if not self._waits:
            self._waits = True
            if self._on_held is not None:
                self._on_held(self._trouble)
        if self._world_size == 1:
            while not self.pending and not has_news():
                self._wait_for_command()
            return
        self._num_holds += 1
        go, woken, store = f"go/{self._num_holds}", f"woken/{self._num_holds}", self._shared_store()
        told = False
        while not store.check([go]):
            if self._rank == 0 and (self.pending or has_news() or store.check([woken])):
                store.set(go, b"1")
                break
            if self._rank != 0 and not told and (self.pending or has_news()):
                told = True
                store.set(woken, b"1")
            self._wait_for_command()

    def _move_away(self, parking: StateParking) -> str | None:
        """All ranks together: have the device's memory free; returns where and why it is not."""
        self._moved_away = True
        problem: str | None = None
        try:
            if not parking.is_parked:
                parking.park()
        except (RuntimeError, MemoryError) as error:
            problem = str(error) or type(error).__name__
        if not self._agree(int(problem is not None)):
            return None
        trouble = f"the state stays on the device: {problem}"
        if self._world_size > 1:
            from headway.dist.agreement import exchange, spell_ranks

            said = {rank: told for rank, told in enumerate(exchange(problem)) if told is not None}
            where, why = spell_ranks(list(said)), next(iter(said.values()))
            trouble = f"the state of {where} stays on the device: {why}"
        logger.error("%s", trouble)
        return trouble

    def _wait_for_command(self) -> None:
        if self._source is None:
            time.sleep(_LOOK_S)
        else:
            self._source.wait_for_command(_LOOK_S)

    def _shared_store(self) -> Any:
        """The same keys on all ranks, others for every relay."""
        if self._store is None:
            from torch.distributed import PrefixStore  # type: ignore[attr-defined]
            from torch.distributed.distributed_c10d import _get_default_store

            self._store = PrefixStore(f"headway/hold/{self._number}", _get_default_store())
        return self._store
