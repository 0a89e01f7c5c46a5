"""The watch that every rank keeps over the others while a process group is up.

Owns: the sign of life each rank gives, noticing a rank that died or stopped, the one record of what
went wrong, and when this process ends because a collective will never return.
Does not own: how it ends then (forced_end.py), what an exception means (failure.py), who is late
where all ranks live (waiting.py), and when the watch begins and ends (group.py).

Two threads. One talks to the store, over a connection of its own: about once a second it gives a
sign, reads the record of a failure if there is one, and looks at a few neighbours; whoever finds a
neighbour lost writes the record that all others read. The other thread never waits for anything,
so that it can end the process even when the store itself no longer answers.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal

from headway.dist.env import frozen_limit_s, waiting_limit_s
from headway.dist.forced_end import end_process, say
from headway.dist.processes import ProcessIdentity, State, look_at, time_used_s
from headway.dist.waiting import HOLDS_ALL, MainThread, decode, find_late

BEAT_S = 1.0
SILENT_AFTER_S = 4.0
"""The same when a connection was lost, so that one of those who cannot be seen must be gone."""
GRACE_S = 3.0
"""How long a process may take to come out of its collective by itself after another failed."""
LAST_S = 8.0
"""How long it may live at all after that."""
_NOT_STOPPED = 3
"""So many times as patient with a process that gives no sign but is not stopped either."""
_NUM_NEIGHBOURS = 8
_ANSWER_S = 3.0

Kind = Literal["error", "mistake", "lost"]

_num_together = 0


@contextmanager
def together() -> Iterator[None]:
    """Around what all ranks begin and end together, whether they are watched from its start or
    not: a rank that ends meanwhile is missed."""
    global _num_together
    _num_together += 1
    try:
        yield
    finally:
        _num_together -= 1


@dataclass(frozen=True)
class Failure:
    """What ended the run: which rank (None: not a rank's fault, or unknown), and why."""

    rank: int | None
    reason: str
    kind: Kind = "lost"
    """'error': an exception of its own; 'mistake': one of the user's; 'lost': gone or silent."""

    def describe(self, world_size: int) -> str:
        if self.rank is None:
            return self.reason
        verb = "was lost" if self.kind == "lost" else "failed"
        return f"rank {self.rank} of {world_size} {verb}: {self.reason}"


class Watch:
    """One rank's watch over the others. `leave` before the process group goes down."""

    def __init__(
        self,
        store: Any,
        rank: int,
        members: list[ProcessIdentity],
        *,
        keeper: str,
        keeper_rank: int | None,
        frozen_after_s: float | None = None,
        waiting_after_s: float | None = None,
    ) -> None:
        self.rank, self.world_size = rank, len(members)
        self._store, self._members = store, members
        self._keeper, self._keeper_rank = keeper, keeper_rank
        self._frozen_after_s = frozen_limit_s() if frozen_after_s is None else frozen_after_s
        self._waiting_after_s = waiting_limit_s() if waiting_after_s is None else waiting_after_s
        self._neighbours = [
            number
            for number in range(self.world_size)
            if 0 < (number - rank) % self.world_size <= _NUM_NEIGHBOURS
            or (number != rank and look_at(members[number]) is not None)
        ]
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._requests: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._known = threading.Event()
        self._over = threading.Event()
        self._suspicious = self._leaving = self._out = False
        self._keeper_left_at = 0.0
        self._last_contact = self._last_look = time.monotonic()
        self._num_agreements, self._moved_at = 0, time.monotonic()
        self._tell_after_s = self._waiting_after_s
        self._main = MainThread()
        self._failed_at = 0.0
        self.failure: Failure | None = None
        self._threads = [
            threading.Thread(target=target, name=f"headway-{name}", daemon=True)
            for name, target in (("watch", self._talk), ("limit", self._limit))
        ]

    # -- the process's own side ---------------------------------------------------------------

    def announce(self) -> None:
        """Give the first sign of life; all ranks have done so before any of them starts."""
        self._store.set(f"beat/{self.rank}", b"0")

    def start(self) -> None:
        """Begin to watch."""
        self._last_contact = self._last_look = self._moved_at = time.monotonic()
        for thread in self._threads:
            thread.start()

    def come(self) -> None:
        """This rank has come to an agreement of all ranks, and waits there for the others."""
        self._num_agreements += 1
        self._moved_at = time.monotonic()

    def go_on(self) -> None:
        """The others have come as well."""
        self._moved_at, self._tell_after_s = time.monotonic(), self._waiting_after_s

    def report(self, failure: Failure) -> Failure:
        """Tell all ranks; returns the failure that was told first, by whomever."""
        self._out = True
        self._ask(lambda: self._post(failure))
        return self.failure or failure

    def find_culprit(self, limit_s: float = LAST_S) -> Failure | None:
        """After a connection was lost: who is gone. None when all give signs of life."""
        self._out = self._suspicious = True
        self._requests.put(None)
        if not self._over.is_set():
            self._known.wait(limit_s)
        return self.failure

    def wait_for_failure(self, limit_s: float) -> Failure | None:
        """What ended the run, if that becomes known within the limit; asks nobody."""
        self._known.wait(limit_s)
        return self.failure

    def is_first(self, text: str) -> bool:
        """Whether no other rank has asked this of the same text; True when nobody can tell."""
        return self._ask(lambda: self._claim(text)) is not False

    @property
    def num_agreements(self) -> int:
        """To how many agreements of all ranks this one has come."""
        return self._num_agreements

    def count_up(self, key: str, by: int = 1) -> int | None:
        """Add to a number that all ranks share and return it; None when nobody can tell."""
        count = self._ask(lambda: self._store.add(f"note/{key}", by))
        return None if count is None else int(count)

    def leave_note(self, key: str, text: str) -> None:
        """Leave a text for the other ranks."""
        self._ask(lambda: self._store.set(f"note/{key}", text))

    def read_notes(self, keys: list[str]) -> dict[str, str]:
        """Those of these texts that are there; from any thread but the watch's own."""

        def read() -> dict[str, str]:
            there = [key for key in keys if self._store.check([f"note/{key}"])]
            return {key: self._store.get(f"note/{key}").decode() for key in there}

        return self._ask(read) or {}

    @property
    def ending(self) -> bool:
        """Whether something has gone wrong, so that this process will not live long."""
        return self._suspicious or self.failure is not None

    def leave(self) -> None:
        """From here on no rank is missed; for the time when all end together."""
        self._leaving = True

    def wait_until_known(self) -> None:
        """Where this process holds the store: let the others read of a failure before it ends."""
        if self._keeper_rank == self.rank and self.failure is not None:
            self._wait(self._is_known, _ANSWER_S)

    def take_leave(self) -> None:
        """Where this process holds the store: let the others know that it ends, and is not lost.

        Those whose run is not over yet get some time to end it.
        """
        if self._keeper_rank == self.rank and self.failure is None:
            self.leave()
            self._ask(lambda: self._store.set(f"left/{self.rank}", b"1"))
            limit_s = LAST_S + _ANSWER_S
            self._wait(lambda: self.failure is not None or self._is_known(), limit_s)

    def _wait(self, is_so: Callable[[], bool], limit_s: float) -> None:
        """Until the talking thread finds something to be so, or finds nothing any more."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not self._over.is_set():
            if self._ask(is_so) or not self._threads[0].is_alive():
                return
            time.sleep(0.05)

    def stop(self, *, ended_well: bool = True) -> None:
        """End the watch. `ended_well`: the others need not look for this rank."""
        self.leave()
        if ended_well:
            self._ask(lambda: self._store.set(f"left/{self.rank}", b"1"))
        self._over.set()
        self._requests.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_ANSWER_S)

    def _ask(self, request: Callable[[], Any]) -> Any:
        """Have the talking thread do something; None when it does not in time."""
        if self._over.is_set() or not self._threads[0].is_alive():
            return None
        answer: Future[Any] = Future()
        self._requests.put((request, answer))
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and self._threads[0].is_alive():
            try:
                return answer.result(0.1)
            except FutureTimeout:
                continue
            except RuntimeError:
                break
        return None

    # -- the thread that talks ------------------------------------------------------------------

    def _talk(self) -> None:
        count, next_beat = 0, time.monotonic()
        try:
            while not self._over.is_set():
                now = time.monotonic()
                if now >= next_beat:
                    count += 1
                    self._store.set(f"beat/{self.rank}", self._sign(count))
                    self._look()
                    self._last_contact = time.monotonic()
                    next_beat = now + (BEAT_S / 4 if self._suspicious else BEAT_S)
                if self._serve(max(0.0, next_beat - time.monotonic())):
                    next_beat = now
        except RuntimeError as error:
            if not self._leaving and not self._over.is_set():
                self._blame_keeper(str(error).partition("\n")[0])

    def _serve(self, wait_s: float) -> bool:
        """Do what the process asks for, if anything; True when it asks to look at once."""
        try:
            item = self._requests.get(timeout=wait_s)
        except Empty:
            return False
        if item is None:
            return True
        request, answer = item
        try:
            answer.set_result(request())
        except RuntimeError as error:
            answer.set_exception(error)
            raise
        return False

    def _sign(self, count: int) -> bytes:
        """A sign of life; of a rank that does not move on, with where it stands."""
        limit_s = self._waiting_after_s
        if not limit_s:
            return str(count).encode()
        unmoved_s = time.monotonic() - self._moved_at
        if unmoved_s < 2 * BEAT_S:
            self._main.note_move()
        else:
            self._main.look()
        if unmoved_s < limit_s:
            return str(count).encode()
        standing = self._main.stand(self._num_agreements, 2 * BEAT_S)
        return f"{count} {standing.encode()}".encode()

    def _look_for_late_ranks(self, now: float) -> None:
        """On rank 0: say who keeps all others waiting; again when it has taken twice as long."""
        limit_s = self._tell_after_s
        # A little later, so that all ranks have given a sign since.
        if self.rank or not limit_s or now - self._moved_at < limit_s + 4 * BEAT_S:
            return
        signs = self._store.multi_get([f"beat/{number}" for number in range(self.world_size)])
        texts = [sign.decode().partition(" ")[2] for sign in signs]
        if not all(texts):
            return
        standings = [decode(text) for text in texts]
        for number in find_late(standings, limit_s):
            self._tell_after_s = 2 * limit_s
            process = self._members[number]
            say(
                f"rank {number} of {self.world_size} has kept the others waiting for {limit_s:g} "
                f"s: it is at {standings[number].place} (process {process.pid} on {process.host})",
                "warning",
            )

    def _look(self) -> None:
        """Read the record; look at the neighbours, or at everyone when someone must be gone."""
        if self.failure is None and self._store.check(["failure"]):
            self._learn(_read(self._store.get("failure")))
        now = time.monotonic()
        if self.failure is None and self._keeper_leaves(now):
            return
        if now - self._last_look > 3 * BEAT_S:
            # This process itself stood still (a suspended machine, a stopped job): its notes of
            # when others gave a sign are worth nothing.
            self._beats.clear()
        self._last_look = now
        if self.failure is not None or self._leaving:
            return
        everyone = [number for number in range(self.world_size) if number != self.rank]
        watched = everyone if self._suspicious else self._neighbours
        signs = self._store.multi_get([f"beat/{number}" for number in watched])
        for number, sign in zip(watched, signs):
            failure = self._judge(number, sign, now)
            if failure is not None:
                self._post(failure)
                return
        self._look_for_late_ranks(now)

    def _keeper_leaves(self, now: float) -> bool:
        """Whether the rank that holds the store has ended well: the watch is over without it.

        While ranks are together it is missed, since all of them end that together.
        """
        keeper = self._keeper_rank
        if keeper in (None, self.rank) or not self._store.check([f"left/{keeper}"]):
            return False
        self._keeper_left_at = self._keeper_left_at or now
        if _num_together:
            if self._suspicious or now - self._keeper_left_at > LAST_S:
                self._post(Failure(keeper, "it ended before the others"))
            return False
        self._store.set(f"left/{self.rank}", b"1")
        self._over.set()
        return True

    def _is_known(self) -> bool:
        """Whether all ranks that are still there know of the end."""
        others = (number for number in range(self.world_size) if number != self.rank)
        return all(
            self._store.check([f"knows/{number}"])
            or self._store.check([f"left/{number}"])
            or look_at(self._members[number]) == "gone"  # without a word
            for number in others
        )

    def _judge(self, number: int, sign: bytes, now: float) -> Failure | None:
        process = self._members[number]
        state = look_at(process)
        before, since = self._beats.get(number, (b"", now))
        if sign != before:
            before, since = sign, now
        self._beats[number] = (before, since)
        if state == "running" and now - since > 2 * BEAT_S:
            self._vouch_for(number)
        limit_s = self._patience_s(state)
        if state is None and self._suspicious:
            limit_s = SILENT_AFTER_S
        if state != "gone" and (not limit_s or now - since < limit_s):
            return None
        where = f"process {process.pid} on {process.host}"
        if self._store.check([f"left/{number}"]):
            if self._suspicious:
                return Failure(number, f"it ended before the others ({where})")
            return None
        if state == "gone":
            return Failure(number, f"its process is gone: killed, or ended at once ({where})")
        how = "is stopped (SIGSTOP)" if state == "stopped" else "does not answer"
        return Failure(number, f"it {how}, no sign of life for {now - since:.0f} s ({where})")

    def _vouch_for(self, number: int) -> None:
        """Give a sign in the place of a silent rank that computes: one long call, such as reading
        a large JSON text, can keep every thread of a process from running."""
        share_s = self._frozen_after_s / 4  # the few moments that idle threads use make no sign
        if share_s:
            num_shares = int(time_used_s(self._members[number]) / share_s)
            self._store.set(f"beat/{number}", f"+{num_shares} {HOLDS_ALL.encode()}")

    def _patience_s(self, state: State | None) -> float:
        """How long a process may give no sign; 0 for as long as it likes.

        A library being loaded, a page read from a slow disk or a machine that is moved elsewhere
        keeps every thread of a process from running. That it is stopped is certain only where it
        can be seen.
        """
        return self._frozen_after_s * (1 if state == "stopped" else _NOT_STOPPED)

    def _post(self, failure: Failure) -> None:
        """Write the record unless there is one, and take the one that is there."""
        text = json.dumps(asdict(failure))
        self._learn(_read(self._store.compare_set("failure", "", text)))

    def _learn(self, failure: Failure) -> None:
        if self.failure is not None:
            return
        self._note(failure)
        self._store.set(f"knows/{self.rank}", b"1")
        text = failure.describe(self.world_size)
        # A mistake of the user's is told where it is caught, in the words of the command line.
        if failure.kind != "mistake" and self._claim(text):
            say(text)

    def _claim(self, text: str) -> bool:
        digest = hashlib.sha256(text.encode()).hexdigest()
        return int(self._store.add(f"said/{digest}", 1)) == 1

    def _note(self, failure: Failure) -> None:
        self._failed_at = time.monotonic()
        self.failure = failure
        self._known.set()

    def _blame_keeper(self, detail: str) -> None:
        """The store is gone, and with it the way to tell others: each rank is on its own."""
        rank = self._keeper_rank
        failure = Failure(rank, f"{self._keeper} no longer keeps the store of the run ({detail})")
        if rank == self.rank:
            return
        if self.failure is None:
            self._note(failure)
            say(f"rank {self.rank}: {failure.describe(self.world_size)}")

    def _look_at_keeper(self) -> State | None:
        keeper = self._keeper_rank
        return None if keeper is None else look_at(self._members[keeper])

    # -- the thread that never waits ------------------------------------------------------------

    def _limit(self) -> None:
        last_turn = awake_since = time.monotonic()
        while not self._over.wait(0.25):
            now = time.monotonic()
            if now - last_turn > 3 * BEAT_S:
                awake_since = now  # this process stood still: its silence is not the store's
            last_turn = now
            failure = self.failure
            if failure is None:
                silent_s = now - max(self._last_contact, awake_since)
                limit_s = self._patience_s(self._look_at_keeper())
                if limit_s and silent_s > limit_s + BEAT_S:
                    self._blame_keeper(f"no answer for {silent_s:.0f} s")
                continue
            since_s = now - self._failed_at
            if since_s > LAST_S or (since_s > GRACE_S and not self._out and not self._leaving):
                code = 2 if failure.kind == "mistake" else 1
                told = failure.describe(self.world_size)
                end_process(code, told, victim=failure.rank != self.rank)


def _read(text: bytes) -> Failure:
    return Failure(**json.loads(text))
