"""Who takes part, which round is open, and which submission counts: the server's book.

Owns: registration, sessions, eviction, quorum and deadline of rounds, staleness in asynchronous
mode, idempotence, recommended step counts (DyLU), and the reason of every refusal.
Does not own: bytes (wire.py), arithmetic (outer.py), files (ledger.py), the wire (server.py).
It has no clock and no socket: time is an argument, so that everything can be tried in a test.
"""

from __future__ import annotations

import math
import re
import secrets
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MODES = ("sync", "async")
_MOST_REMEMBERED = 64
_LEAST_ROUNDS_FOR_NORMS = 5
_FIRST_NORM_RATIO = 1000.0
"""Times the parameters' own norm, until then: far from what training does, and from overflow."""
_MOST_TIMES_FASTER = 16.0
"""Than the median worker; who claims more does not set the others' pace."""


class Refusal(Exception):
    """A request that is refused: HTTP status, a word for programs, words for people, and more."""

    def __init__(self, status: int, reason: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.more = status, reason, message, more


@dataclass(frozen=True)
class Rules:
    """What the book goes by."""

    expected: int
    minimum: int = 1
    mode: str = "sync"
    num_fragments: int = 1
    sync_every: int | None = None
    """None: every worker's own."""
    dylu: bool = False
    deadline_s: float = 600.0
    """From a round's first submission until it goes on with those that are there."""
    heartbeat_s: float = 30.0
    missed_heartbeats: float = 3.0
    max_staleness: int = 32
    """Asynchronous mode: updates since the parameters that a submission was made from."""
    max_update_norm: float | None = None
    max_norm_ratio: float | None = 20.0
    """Times the median of accepted norms, once five rounds have been seen."""
    max_attempts: int = 16
    """Refused bodies of one worker in a round, after which no more are read."""
    max_workers: int = 1024


@dataclass
class Worker:
    """One that takes part."""

    id: str
    session: str
    seen_at: float
    registered_at: float
    comm: str = "float32"
    sync_every: int = 0
    step: int = 0
    steps_per_s: float | None = None
    group: dict[str, Any] = field(default_factory=dict)
    num_accepted: int = 0
    num_refused: int = 0
    num_received_bytes: int = 0
    num_sent_bytes: int = 0
    last_norm: float | None = None
    attempts: dict[str, int] = field(default_factory=dict)
    claim: str | None = field(default=None, repr=False)
    """A secret of the worker's own: it proves who it is when the answer to a registration, and
    the session in it, was lost on the way."""

    def is_shown_by(self, session: str | None, claim: str | None) -> bool:
        """Whether somebody has shown to be this worker."""
        pairs = ((self.session, session), (self.claim, claim))
        return any(
            own is not None
            and given is not None
            and secrets.compare_digest(own.encode(), given.encode("utf-8", "replace"))
            for own, given in pairs
        )


@dataclass(frozen=True)
class Submission:
    """An accepted pseudo-gradient that is not applied yet."""

    worker: str
    session: str
    round_id: str
    number: int
    """The number of that round."""
    fragment: int
    digest: str
    local_steps: int
    comm: str
    is_local: bool
    norm: float
    num_bytes: int
    path: str
    """The file that holds its body."""

    @property
    def receipt(self) -> str:
        return receipt_of(self.round_id, self.fragment, self.worker, self.digest)


@dataclass
class Round:
    """One outer step of one fragment on its way."""

    id: str
    number: int
    opened_at: float
    first_at: float | None = None
    submissions: dict[str, Submission] = field(default_factory=dict)
    closed: bool = False
    """What is there is being applied; nothing more is taken."""
    retry_at: float = 0.0


def new_round_id(number: int) -> str:
    return f"r-{number}-{secrets.token_hex(4)}"


def receipt_of(round_id: str, fragment: int, worker: str, digest: str) -> str:
    """The same for the same submission, also after a restart."""
    return xxhash.xxh3_128_hexdigest(f"{round_id}/{fragment}/{worker}/{digest}".encode())


class RoundBook:
    """The state of all rounds and workers; every method is quick and none waits."""

    def __init__(self, rules: Rules, now: float, known: Mapping[str, Any] | None = None) -> None:
        self.rules = rules
        self.workers: dict[str, Worker] = {}
        self.num_evicted = 0
        self.num_refused: dict[str, int] = {}
        said = known or {}
        self.most_workers = int(said.get("most_workers", 0))
        """How many have been there at one time, or have been waited for until a deadline."""
        # After a restart, those who were there are missed only when they would have been let go.
        self._counts_from = now + self._patience_s if self.most_workers else now
        ids = said.get("round_ids") or [new_round_id(1) for _ in range(rules.num_fragments)]
        numbers = said.get("round_numbers") or [1] * rules.num_fragments
        self.rounds = [Round(i, n, now) for i, n in zip(ids, numbers, strict=True)]
        self.passed: list[dict[str, int]] = [
            dict(p) for p in said.get("passed") or [{} for _ in self.rounds]
        ]
        """Ids of rounds that are over, with their numbers, the newest last; by fragment."""
        self.applied: list[dict[str, list[Any]]] = [
            dict(a) for a in said.get("applied") or [{} for _ in self.rounds]
        ]
        """The last submission of each worker that counts: round number and digest; by fragment."""
        self.parameter_norms: list[float | None] = [None for _ in self.rounds]
        """Of each fragment's parameters when the server began; for the first updates."""
        self.norms = [
            deque(n, maxlen=_MOST_REMEMBERED) for n in said.get("norms") or [[] for _ in ids]
        ]

    # -- workers --------------------------------------------------------------------------------

    def register(
        self, worker_id: str, now: float, *, resume_session: str | None = None, **facts: Any
    ) -> Worker:
        """A new session for a worker. What its earlier one has sent for rounds that are open is
        forgotten: it says itself what it wants to send."""
        known = self.workers.get(worker_id)
        if known is not None and not known.is_shown_by(resume_session, facts.get("claim")):
            raise Refusal(
                409,
                "id_taken",
                f"a worker {worker_id!r} is there already; another id, or its session, is needed",
            )
        if known is None and len(self.workers) >= self.rules.max_workers:
            raise Refusal(429, "quota", f"{self.rules.max_workers} workers are there already")
        for place in self.rounds:
            if not place.closed:
                place.submissions = {
                    key: s for key, s in place.submissions.items() if s.worker != worker_id
                }
                place.first_at = place.first_at if place.submissions else None
        worker = Worker(worker_id, secrets.token_hex(16), now, now, **facts)
        self.workers[worker_id] = worker
        self.most_workers = max(self.most_workers, len(self.workers))
        return worker

    def find(self, worker_id: str, session: str, now: float) -> Worker:
        """The worker of a session, which has shown that it is alive."""
        worker = self.workers.get(worker_id)
        if worker is None:
            raise Refusal(404, "unknown_worker", f"no worker {worker_id[:64]!r} is registered")
        if not secrets.compare_digest(worker.session.encode(), session.encode("utf-8", "replace")):
            raise Refusal(404, "unknown_session", "that session is over; register again")
        worker.seen_at = now
        return worker

    def heartbeat(self, worker: Worker, step: int, steps_per_s: float | None) -> None:
        worker.step = step
        if steps_per_s is not None and steps_per_s > 0:
            worker.steps_per_s = steps_per_s

    def deregister(self, worker: Worker) -> None:
        """It has left; what it has sent still counts."""
        self.workers.pop(worker.id, None)

    def evict(self, now: float) -> list[str]:
        """Let those go that have not been heard of; what they have sent still counts."""
        late = [w.id for w in self.workers.values() if now - w.seen_at > self._patience_s]
        for worker_id in late:
            del self.workers[worker_id]
        self.num_evicted += len(late)
        return late

    @property
    def _patience_s(self) -> float:
        return self.rules.heartbeat_s * self.rules.missed_heartbeats

    def is_applying(self, worker_id: str) -> bool:
        """Whether a round that is being applied may hold what a worker has sent."""
        return any(
            place.closed and any(s.worker == worker_id for s in place.submissions.values())
            for place in self.rounds
        )

    def recommend(self, worker: Worker) -> int:
        """Steps until its next submission: with DyLU, as many as it does while the fastest does
        all of them."""
        base = self.rules.sync_every or worker.sync_every
        speeds = [w.steps_per_s for w in self.workers.values() if w.steps_per_s]
        if not self.rules.dylu or not worker.steps_per_s:
            return base
        believed = _MOST_TIMES_FASTER * statistics.median(speeds)
        fastest = max(speed for speed in speeds if speed <= believed)
        # To nearest, halves up: Python's own `round` would go to the even one.
        return max(1, min(base, math.floor(base * worker.steps_per_s / fastest + 0.5)))

    def count_steps(self, claimed: int) -> int:
        """Local steps of a submission. With DyLU it is weighed by them: one that claims more than
        an interval, as after an outage, does not outweigh all the others."""
        if not self.rules.dylu:
            return claimed
        bases = [w.sync_every for w in self.workers.values() if w.sync_every]
        base = self.rules.sync_every or (statistics.median_low(bases) if bases else claimed)
        return min(claimed, base)

    # -- submissions ----------------------------------------------------------------------------

    def round_of(self, fragment: int) -> Round:
        if not 0 <= fragment < len(self.rounds):
            raise Refusal(
                422, "bad_request", f"fragment must be 0 to {len(self.rounds) - 1}, not {fragment}"
            )
        return self.rounds[fragment]

    def number_of(self, round_id: str, fragment: int) -> int | None:
        """The number of a round that is open or that was not long ago."""
        place = self.round_of(fragment)
        return place.number if round_id == place.id else self.passed[fragment].get(round_id)

    def check(self, worker: Worker, round_id: str, fragment: int, digest: str) -> str | None:
        """May this be sent? Raises `Refusal`, or returns "accepted" or "committed" if it has been
        sent before."""
        place = self.round_of(fragment)
        key = self._key(worker.id, round_id)
        number = self.number_of(round_id, fragment)
        applied = self.applied[fragment].get(worker.id)
        if number is not None and applied is not None and applied[0] >= number:
            if applied == [number, digest]:
                return "committed"
            raise self._over(fragment)
        if known := place.submissions.get(key):
            if known.digest == digest:
                return "accepted"
            raise Refusal(
                409, "duplicate", "this worker has sent another body for this round already"
            )
        if round_id != place.id or place.closed:
            if self.rules.mode == "sync" or number is None:
                raise self._over(fragment)
            if place.number - number > self.rules.max_staleness:
                raise self._over(fragment)
        if worker.attempts.get(round_id, 0) >= self.rules.max_attempts:
            raise Refusal(429, "quota", "too many refused bodies for this round")
        return None

    def count_attempt(self, worker: Worker, round_id: str) -> None:
        """A body was refused. Only this and the last rounds' are remembered."""
        worker.num_refused += 1
        worker.attempts[round_id] = worker.attempts.pop(round_id, 0) + 1
        while len(worker.attempts) > _MOST_REMEMBERED:
            del worker.attempts[next(iter(worker.attempts))]

    def _key(self, worker_id: str, round_id: str) -> str:
        # In asynchronous mode several rounds' submissions of a worker may wait at one time.
        return worker_id if self.rules.mode == "sync" else f"{worker_id}/{round_id}"

    def _over(self, fragment: int) -> Refusal:
        place = self.rounds[fragment]
        more = {} if place.closed else {"round_id": place.id}
        return Refusal(410, "round_over", "that round is over, or was never open", **more)

    def check_norm(self, fragment: int, norm: float) -> None:
        """Refuse an update that is out of all proportion."""
        if not math.isfinite(norm):
            raise Refusal(422, "non_finite", "it holds values that are not finite")
        limit = self.norm_limit(fragment)
        if limit is not None and norm > limit:
            raise Refusal(422, "norm", f"its norm is {norm:.6g}; at most {limit:.6g} is taken")

    def norm_limit(self, fragment: int) -> float | None:
        rules, norms = self.rules, self.norms[fragment]
        limits = [rules.max_update_norm] if rules.max_update_norm is not None else []
        seen = self.rounds[fragment].number > _LEAST_ROUNDS_FOR_NORMS
        if rules.max_norm_ratio is not None and seen and norms:
            middle = statistics.median(norms)
            limits += [rules.max_norm_ratio * middle] if middle > 0 else []
        elif rules.max_norm_ratio is not None and (own := self.parameter_norms[fragment]):
            limits += [_FIRST_NORM_RATIO * own]
        return min(limits, default=None)

    def accept(self, worker: Worker, submission: Submission, now: float) -> None:
        """It counts, if nothing has changed while its body came."""
        again = self.check(worker, submission.round_id, submission.fragment, submission.digest)
        if again is not None:
            raise Refusal(409, "duplicate", "the same body came a second time at the same time")
        place = self.rounds[submission.fragment]
        place.submissions[self._key(worker.id, submission.round_id)] = submission
        place.first_at = place.first_at if place.first_at is not None else now
        worker.num_accepted += 1
        worker.last_norm = submission.norm
        worker.num_received_bytes += submission.num_bytes

    # -- rounds ---------------------------------------------------------------------------------

    def due(self, now: float) -> list[int]:
        """Fragments whose round has what it needs."""
        return [k for k, place in enumerate(self.rounds) if self._is_due(place, now)]

    def _is_due(self, place: Round, now: float) -> bool:
        num = len(place.submissions)
        if place.closed or not num or now < place.retry_at:
            return False
        if self.rules.mode == "async" or num >= self.rules.expected:
            return True
        if num < self.rules.minimum:
            return False
        if place.first_at is not None and now >= place.first_at + self.rules.deadline_s:
            return True
        # Those who have left are not waited for; those who have not come yet are, once.
        assembled = self.most_workers >= self.rules.expected and now >= self._counts_from
        return assembled and all(w in place.submissions for w in self.workers)

    def close(self, fragment: int) -> list[Submission]:
        """Take nothing more; returns what is to be applied, in the order that counts."""
        place = self.rounds[fragment]
        place.closed = True
        if self.rules.mode == "async":
            return [next(iter(place.submissions.values()))]
        # Whoever has not come until now is not waited for in every round anew.
        self.most_workers = max(self.most_workers, self.rules.expected)
        return sorted(place.submissions.values(), key=lambda s: s.worker)

    def reopen(self, fragment: int, retry_at: float, lost: Iterable[Submission] = ()) -> None:
        """What was closed could not be applied; it is tried again, without what is lost."""
        place, gone = self.rounds[fragment], list(lost)
        place.submissions = {k: s for k, s in place.submissions.items() if s not in gone}
        place.first_at = place.first_at if place.submissions else None
        place.closed, place.retry_at = False, retry_at

    def after(self, fragment: int, applied: Iterable[Submission], next_id: str) -> dict[str, Any]:
        """What the book remembers once the round of a fragment is committed, as JSON."""
        said = self.known()
        place = self.rounds[fragment]
        passed = {**self.passed[fragment], place.id: place.number}
        keep = max(self.rules.max_staleness + 1, _MOST_REMEMBERED)
        said["passed"][fragment] = dict(list(passed.items())[-keep:])
        for submission in applied:
            said["applied"][fragment][submission.worker] = [submission.number, submission.digest]
            said["norms"][fragment].append(submission.norm)
        said["norms"][fragment] = said["norms"][fragment][-_MOST_REMEMBERED:]
        # Of rounds that are not remembered nobody can ask.
        oldest = min(said["passed"][fragment].values())
        said["applied"][fragment] = {
            worker: last for worker, last in said["applied"][fragment].items() if last[0] >= oldest
        }
        said["round_ids"][fragment] = next_id
        said["round_numbers"][fragment] = place.number + 1
        return said

    def known(self) -> dict[str, Any]:
        """What the book remembers over a restart, as JSON."""
        return {
            "round_ids": [place.id for place in self.rounds],
            "round_numbers": [place.number for place in self.rounds],
            "passed": [dict(p) for p in self.passed],
            "applied": [dict(a) for a in self.applied],
            "norms": [list(n) for n in self.norms],
            "most_workers": self.most_workers,
        }

    def advance(self, fragment: int, said: Mapping[str, Any], now: float) -> None:
        """A round was committed with what `after` said; the next one is open."""
        old = self.rounds[fragment]
        place = Round(said["round_ids"][fragment], said["round_numbers"][fragment], now)
        if self.rules.mode == "async":
            left = list(old.submissions.items())[1:]
            place.submissions, place.first_at = dict(left), now if left else None
        self.rounds[fragment] = place
        self.passed[fragment] = dict(said["passed"][fragment])
        self.applied[fragment] = dict(said["applied"][fragment])
        self.norms[fragment] = deque(said["norms"][fragment], maxlen=_MOST_REMEMBERED)

    def describe_round(
        self, round_id: str, fragment: int, worker: Worker | None = None
    ) -> dict[str, Any]:
        """Where a round stands; in asynchronous mode, where this worker's submission does."""
        place = self.round_of(fragment)
        state = "open"
        if round_id != place.id:
            if round_id not in self.passed[fragment]:
                raise self._over(fragment)
            waits = worker and self._key(worker.id, round_id) in place.submissions
            state = "open" if self.rules.mode == "async" and waits else "committed"
        counted = None
        if worker is not None and state == "committed":
            number = self.passed[fragment][round_id]
            counted = self.applied[fragment].get(worker.id, [None])[0] == number
        deadline_at = None if place.first_at is None else place.first_at + self.rules.deadline_s
        return {
            "state": state,
            "next_round_id": place.id if state == "committed" else None,
            "counted": counted,
            "num_submitted": len(place.submissions),
            "submitted": worker is not None and self._key(worker.id, round_id) in place.submissions,
            "expected": self.rules.expected,
            "deadline_at": deadline_at,
        }
