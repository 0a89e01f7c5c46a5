"""One submission on its way: handed in, waited for, and the new parameters fetched.

Owns: what a leading rank does between the moment a pseudo-gradient is ready and the moment its
round is committed, and every way in which that can go wrong. Does not own: where the numbers come
from and go to (worker.py), one request (client.py).

A flight can be begun again after an outage. It hands in the same bytes for the same round, so a
server that had them already counts them once; and it asks what became of the round before it gives
anything to another one. So no update is applied twice.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from headway.diloco.faults import (
    MISTAKES,
    Busy,
    DiLoCoError,
    Refused,
    RoundOver,
    UnknownSession,
    Unreachable,
)
from headway.diloco.session import Session
from headway.dist.waiting import awaiting

if TYPE_CHECKING:
    from torch import Tensor

    from headway.diloco.wire import Message

logger = logging.getLogger(__name__)

POLL_S = 10.0
"""How long one question about a round may be left open."""
_MOST_RETURNS = 20
_LEAST_S = 1.0
"""How long a question may take that is asked when the time is up: it may be the last one."""

Kind = Literal["applied", "reset", "late", "unsettled", "fatal"]


@dataclass
class Outcome:
    """What became of a flight.

    `applied`: its round is committed with it. `reset`: it was refused, and the new parameters are
    to be taken as they are. `late`: the round was committed without it; there is another now.
    `unsettled`: nobody knows, the server cannot be reached. `fatal`: nothing will mend it.
    """

    kind: Kind
    round_id: str = ""
    """The round whose parameters `values` are, or for `late` the one to submit to."""
    reason: str = ""
    values: dict[str, Tensor] = field(default_factory=dict, repr=False)


class Flight:
    """A submission of one fragment for one round."""

    def __init__(
        self,
        session: Session,
        message: Message | None,
        *,
        fragment: int,
        round_id: str,
        shapes: Mapping[str, tuple[int, ...]],
        local_steps: int,
        max_retries: int,
        timeout_s: float,
        should_end: Callable[[], bool] = bool,
        dylu: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`message` None: what would be sent is not sound, only the parameters are fetched."""
        self.fragment, self.round_id = fragment, round_id
        self.num_retries = 0
        self.outcome: Outcome | None = None
        self._session, self._message, self._shapes = session, message, dict(shapes)
        self._local_steps, self._max_retries = local_steps, max_retries
        self._timeout_s, self._should_end = timeout_s, should_end
        self._dylu, self._clock = dylu, clock
        self._tried = False
        """Whether the server may have the submission."""
        self._missed = False
        """Whether the round was over before it was handed in for the first time."""
        self._accepted_in: str | None = None
        """The session under which the server said that it has it."""
        self._deadline = 0.0
        self._thread: threading.Thread | None = None
        self._canceled = threading.Event()

    # -- beginning and ending ---------------------------------------------------------------

    def begin(self, *, beside: bool) -> None:
        """Go on the way, in a thread if training goes on meanwhile."""
        self.outcome = None
        if not beside:
            with self._awaited():
                self._run()
            return
        self._thread = threading.Thread(target=self._run, name="headway-diloco-flight", daemon=True)
        self._thread.start()

    def finish(self) -> Outcome:
        """Wait for the end, and tell it."""
        if self._thread is not None:
            with self._awaited():
                self._thread.join()
            self._thread = None
        assert self.outcome is not None, "it was begun"
        return self.outcome

    def _awaited(self) -> contextlib.AbstractContextManager[None]:
        return awaiting(
            f"the DiLoCo server {self._session.client.address} and the other workers of its round"
        )

    def cancel(self) -> None:
        """Send nothing any more, and wait until that is certain."""
        self._canceled.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self.outcome = self._fly()
        except Exception as error:  # in a thread nobody else would see it
            if self._session.stopping.is_set():  # its session was closed under it
                self.outcome = Outcome("unsettled", reason="the run ends")
                return
            logger.exception("DiLoCo: a flight failed")
            self.outcome = Outcome("fatal", reason=f"{type(error).__name__}: {error}")

    def _fly(self) -> Outcome:
        backoff = self._session.make_backoff()
        # One limit for all of it, requests that are under way as well: a server that comes and
        # goes, or says a byte a minute, cannot hold training for ever.
        self._deadline = self._clock() + self._timeout_s
        failures = returns = 0
        while True:
            used = self._session.session
            try:
                return self._exchange()
            except MISTAKES as error:
                return Outcome("fatal", reason=str(error))
            except UnknownSession as error:
                returns += 1
                if returns > _MOST_RETURNS or self._is_over:
                    return Outcome("unsettled", reason=str(error))
                trouble = self._return(used)
            except Unreachable as error:
                trouble = error
            if isinstance(trouble, MISTAKES):
                return Outcome("fatal", reason=str(trouble))
            if trouble is not None:
                failures += 1
                over = failures > self._max_retries or self._is_over
                if over or self._should_end():
                    return Outcome("unsettled", reason=str(trouble))
                self.num_retries += 1
                if not backoff.wait():
                    return Outcome("unsettled", reason="the run ends")

    def _return(self, lost: str | None) -> DiLoCoError | None:
        try:
            self._session.return_after(lost, self._left_s)
        except DiLoCoError as error:
            return error
        return None

    @property
    def _is_over(self) -> bool:
        return self._clock() > self._deadline

    @property
    def _left_s(self) -> float:
        return max(_LEAST_S, self._deadline - self._clock())

    # -- on the way -------------------------------------------------------------------------

    def _exchange(self) -> Outcome:
        if self._message is None:
            return self._fetch("reset", "what this worker has is not finite")
        # The server knows its step and its speed before the round ends.
        self._session.beat(self._left_s)
        while True:
            if self._should_end() or self._session.stopping.is_set() or self._canceled.is_set():
                return Outcome("unsettled", reason="the run ends")
            if self._accepted_in != self._session.session:
                try:
                    refusal = self._submit()
                except Busy as error:  # others are at it: no failure, and their turn ends
                    if self._is_over:
                        return Outcome("unsettled", reason=str(error))
                    self._session.stopping.wait(min(1.0, self._session.first_pause_s))
                    continue
                if refusal is not None:
                    return refusal
            answer = self._ask(min(POLL_S, max(0.0, self._deadline - self._clock())))
            state = answer.get("state")
            if state == "committed" and not self._is_lost(answer):
                return self._end(answer)
            if not self._missed and (state == "reopened" or answer.get("submitted") is False):
                self._accepted_in = None
            if self._is_over:
                return Outcome(
                    "unsettled",
                    reason=f"round {self.round_id} did not end within {self._timeout_s:g} s",
                )

    def _ask(self, wait_s: float) -> dict[str, Any]:
        session = self._session
        assert session.session is not None
        try:
            return session.client.ask_round(
                self.round_id,
                self.fragment,
                session.worker_id,
                session.session,
                wait_s=wait_s,
                limit_s=self._left_s + _LEAST_S,
            )
        except RoundOver as error:  # so long ago that the server does not know it any more
            return {"state": "committed", "next_round_id": error.answer.get("round_id")}

    def _submit(self) -> Outcome | None:
        """Hand it in; the end of the flight if there is no round left to wait for."""
        session, message = self._session, self._message
        used = session.session
        assert message is not None
        if self._tried and self.round_id != session.rounds[self.fragment]:
            # The round may be over, with or without this: that is asked before anything is sent.
            answer = self._ask(0)
            if answer.get("state") == "committed" and not self._is_lost(answer):
                return self._end(answer)
        tried_before, self._tried = self._tried, True
        try:
            session.client.submit(
                message,
                limit_s=self._left_s,
                worker=session.worker_id,
                session=used,
                round=self.round_id,
                fragment=self.fragment,
                local_steps=self._local_steps,
            )
        except RoundOver as error:
            if self._is_async:  # it would not be what it says for any other round
                return self._fetch("reset", error.reason)
            # Its parameters may not be there yet: the end of the round is waited for.
            self._missed = not tried_before
        except Busy:
            self._tried = tried_before
            raise
        except (UnknownSession, *MISTAKES):
            raise
        except Refused as error:
            if error.status != 409:
                return self._fetch("reset", error.reason)
            # It has another body of this session for this round: an earlier process's.
        self._accepted_in = used
        return None

    @property
    def _is_async(self) -> bool:
        return self._session.server.get("mode") == "async"

    def _is_lost(self, answer: Mapping[str, Any]) -> bool:
        """Whether a server has restarted before it applied a submission: asynchronous ones name
        the round that they were made from, which may be over, and are still good."""
        return self._is_async and answer.get("counted") is False

    def _end(self, answer: Mapping[str, Any]) -> Outcome:
        """The round is over: with this submission, or without it."""
        current = str(answer.get("next_round_id") or "")
        if answer.get("counted") is False or self._missed:
            if current:
                self._session.rounds[self.fragment] = current
            with contextlib.suppress(Unreachable, Refused):  # where the others are by now
                self._session.beat(self._left_s)
            return Outcome("late", current or self._session.rounds[self.fragment])
        return self._fetch("applied")

    def _fetch(self, kind: Kind, reason: str = "") -> Outcome:
        from headway.diloco.compression import decode

        session = self._session
        header, payloads = session.client.fetch(
            self.fragment,
            self._shapes,
            limit_s=self._left_s,
            worker=session.worker_id,
            session=session.session,
        )
        round_id = str(header.meta.get("round_id", ""))
        session.rounds[self.fragment] = round_id
        if self._dylu:
            with contextlib.suppress(Unreachable):  # a recommendation can wait
                session.beat(self._left_s)
        return Outcome(kind, round_id, reason, {n: decode(p) for n, p in payloads.items()})
