"""A worker's standing with its server: registration, signs of life, coming back after an outage.

Owns: the session that the server issued, the ids of the current rounds, the heartbeat thread, the
file that lets a restarted process take its id back. Does not own: parameters (worker.py), one
submission (flight.py). Only the leading rank of a group has one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.diloco.backoff import FIRST_S, MOST_S, Backoff
from headway.diloco.client import DiLoCoClient, as_registration_fault
from headway.diloco.faults import (
    MISTAKES,
    DiLoCoError,
    IdTaken,
    NotThere,
    Refused,
    UnknownSession,
    Unreachable,
)

logger = logging.getLogger(__name__)

_MISSED = 4.0
"""Intervals of signs of life after which a server has surely let a worker go."""


class Session:
    """The leading rank's side of one registration after the other, under one worker id."""

    def __init__(
        self,
        client: DiLoCoClient,
        worker_id: str,
        facts: Mapping[str, Any],
        *,
        heartbeat_s: float,
        first_pause_s: float = FIRST_S,
        file: Path | None = None,
    ) -> None:
        """`facts` go with every registration: the model, sync_every and so on."""
        self.client, self.worker_id = client, worker_id
        self.session: str | None = None
        self.rounds: list[str] = []
        """The current round of each fragment, as far as this worker knows."""
        self.heard: list[str] = []
        """The rounds that the last sign of life was answered with."""
        self.server: dict[str, Any] = {}
        self._num_returns = 0
        self.recommended: int | None = None
        """What the server would have as `sync_every` (DyLU)."""
        self.step, self.steps_per_second = 0, 0.0
        """Told with every heartbeat."""
        self.stopping = threading.Event()
        self.first_pause_s = first_pause_s
        self._facts, self._file = dict(facts), file
        self._heartbeat_s = heartbeat_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._lost = False
        self._claim: str | None = None

    # -- registration -----------------------------------------------------------------------

    def register(
        self, earlier: str | None = None, *, attempts: int = 1, limit_s: float = math.inf
    ) -> dict[str, Any]:
        """Take part, as the one that had the session `earlier` if it is given.

        A server that does not answer is asked `attempts` times in all. One that says the id is
        taken may mean an earlier process of this worker, whose last session nobody knows any more:
        it is let go when it gives no sign of life, and waited for until then. All of it ends within
        `limit_s`.
        """
        backoff = self.make_backoff()
        # What the file says is newer than what a checkpoint does.
        remembered = self._remembered()
        previous = remembered.get("session") or earlier
        if self._claim is None:
            # On the disk before the server has it: a crash in between leaves nobody locked out.
            self._claim = remembered.get("claim") or secrets.token_hex(16)
            self._remember()
        began_s, patience_s = time.monotonic(), _MISSED * self._heartbeat_s
        try:
            while True:
                try:
                    return self._register(previous, limit_s - (time.monotonic() - began_s))
                except Unreachable as error:
                    attempts -= 1
                    if attempts <= 0:
                        raise
                    logger.warning("DiLoCo: %s; it is asked again", error)
                    if not backoff.wait():
                        raise
                except IdTaken:
                    waited_s = time.monotonic() - began_s
                    over = previous is None or waited_s > min(patience_s, limit_s)
                    if over or self.stopping.wait(min(1.0, 5 * self.first_pause_s)):
                        raise
        except (Refused, NotThere):
            if not remembered and self.session is None:
                self._forget()
            raise

    def _register(self, earlier: str | None, limit_s: float) -> dict[str, Any]:
        with self._held_within(limit_s) as left_s:
            if self.stopping.is_set():
                raise Unreachable("the run ends")  # who has left must not come back
            own = {"worker_id": self.worker_id, "step": self.step, "claim": self._claim}
            facts = {**self._facts, **own}
            previous = self.session or earlier
            if previous is not None:
                facts["resume_session"] = previous
            try:
                answer = self.client.register(facts, limit_s=left_s)
            except Refused as error:
                raise as_registration_fault(error) from None
            try:
                self.session = str(answer["session"])
                self.rounds = [str(one) for one in answer["round_id"]]
                self.server = dict(answer["server"])
            except (KeyError, TypeError) as error:
                raise Unreachable(
                    f"{self.client.address}: its answer to a registration lacks {error}"
                ) from None
            self._lost = False
            self._remember()
            return answer

    @contextlib.contextmanager
    def _held_within(self, limit_s: float) -> Iterator[float]:
        """One registration at a time; what is left of `limit_s` once it is this one's turn."""
        began_s = time.monotonic()
        if not self._lock.acquire(timeout=max(0.0, min(limit_s, threading.TIMEOUT_MAX))):
            raise Unreachable(f"{self.client.address}: no registration within {limit_s:.3g} s")
        try:
            yield limit_s - (time.monotonic() - began_s)
        finally:
            self._lock.release()

    def return_after(self, lost: str | None, limit_s: float = math.inf) -> None:
        """Register again, unless that was done since the session `lost` was in use."""
        if self.session == lost:
            self.register(limit_s=limit_s)
            self._num_returns += 1
            logger.info("DiLoCo: %s is back at %s", self.worker_id, self.client.address)

    def take_returns(self) -> int:
        """How often it had to register again since this was last asked."""
        found, self._num_returns = self._num_returns, 0
        return found

    # -- the file ---------------------------------------------------------------------------

    def _remembered(self) -> dict[str, str]:
        """What a process before this one, with the same id, has left: its session and its claim."""
        if self._file is None:
            return {}
        try:
            found = json.loads(self._file.read_text())
            kept = {name: found[name] for name in ("session", "claim") if found.get(name)}
            return kept if found["worker_id"] == self.worker_id else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _remember(self) -> None:
        if self._file is None:
            return
        beside = self._file.with_name(f"{self._file.name}.new")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # The session proves who the worker is: it is for its owner's eyes.
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w") as file:
                known = {"session": self.session, "claim": self._claim}
                json.dump({"worker_id": self.worker_id, **known}, file)
            beside.replace(self._file)
        except OSError as error:
            logger.warning("DiLoCo: the session is not kept in %s: %s", self._file, error)

    def _forget(self) -> None:
        """The server has nothing of this worker: there is nothing to take back."""
        self._claim = None
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
                self._file.parent.rmdir()  # unless there is something in it

    # -- signs of life ----------------------------------------------------------------------

    def identify(self) -> dict[str, Any]:
        return {"worker_id": self.worker_id, "session": self.session}

    def beat(self, limit_s: float = math.inf) -> None:
        """One sign of life, with the speed; takes the server's recommendation."""
        facts = {"step": self.step, "steps_per_second": self.steps_per_second}
        answer = self.client.heartbeat({**self.identify(), **facts}, limit_s=limit_s)
        recommended = answer.get("sync_every")
        if isinstance(recommended, int) and not isinstance(recommended, bool) and recommended >= 1:
            self.recommended = recommended
        rounds = answer.get("round_id")
        self.heard = [str(one) for one in rounds] if isinstance(rounds, list) else []

    def start_beating(self) -> None:
        """From now on, from a thread."""
        self._thread = threading.Thread(
            target=self._keep_beating, name="headway-diloco", daemon=True
        )
        self._thread.start()

    @property
    def beat_s(self) -> float:
        """Seconds from one sign of life to the next: the worker's, or fewer if the server asks."""
        told = self.server.get("heartbeat_s")
        if isinstance(told, int | float) and told > 0:
            return min(self._heartbeat_s, float(told))
        return self._heartbeat_s

    def make_backoff(self) -> Backoff:
        """Pauses that end with the run, none longer than from one sign of life to the next: a
        server that is back is met again within that time."""
        return Backoff(self.first_pause_s, min(MOST_S, self.beat_s), stop=self.stopping)

    def _keep_beating(self) -> None:
        while not self.stopping.wait(self.beat_s):
            lost = self.session
            try:
                self.beat()
                if self._lost:
                    logger.info("DiLoCo: %s answers again", self.client.address)
                self._lost = False
            except UnknownSession:
                # Without a sync being due: the server would count on one worker less.
                with contextlib.suppress(DiLoCoError):
                    self.return_after(lost)
            except MISTAKES as error:
                logger.error("DiLoCo: %s", error)  # the next sync ends the run with it
            except DiLoCoError as error:
                if not self._lost:
                    logger.warning("DiLoCo: training goes on alone for now: %s", error)
                self._lost = True

    def close(self, *, leave: bool = True) -> None:
        """End the thread and, if the server is there, the registration."""
        self.stopping.set()
        if self._thread is not None:
            self._thread.join(5.0)
            self._thread = None
        # A flight that is registering again is waited for: it would leave a worker behind.
        held = self._lock.acquire(timeout=5.0)
        try:
            if leave and self.session is not None:
                with contextlib.suppress(DiLoCoError):
                    self.client.deregister(self.identify())
            self.session = None
        finally:
            if held:
                self._lock.release()
