"""A group of ranks comes to a server: registered, agreed on, with parameters on both sides.

Owns: what happens between a worker's start and its first step, and that all ranks learn of a
mistake together. Does not own: the session (session.py), what is kept of a checkpoint (worker.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.diloco.backoff import Backoff
from headway.diloco.compression import encode
from headway.diloco.faults import DiLoCoError, Refused, Unreachable
from headway.diloco.flight import Flight, Outcome
from headway.diloco.options import WorkerOptions
from headway.diloco.parameters import ParameterView
from headway.diloco.session import Session
from headway.diloco.wire import compose
from headway.dist.agreement import CommonMistake
from headway.dist.waiting import awaiting

logger = logging.getLogger(__name__)


class OutOfReach(CommonMistake):
    """The server does not answer; later it may."""


@dataclass
class Arrival:
    """What a group knows once it is registered."""

    mode: str
    rounds: list[str]
    """The current round of each fragment."""


class Arriving:
    """The steps of an arrival; every method is collective."""

    def __init__(self, view: ParameterView, session: Session, timeout_s: float) -> None:
        self._view, self._session, self._timeout_s = view, session, timeout_s

    def register(
        self, earlier: str | None, attempts: int, fragments: Sequence[Sequence[str]]
    ) -> Arrival:
        """Take part; `ConfigError` on all ranks where that cannot be."""
        facts = self._on_leader(lambda: self._register(earlier, attempts, fragments))
        if not facts["has_parameters"]:
            first = self._view.read_on_leader()
            self._on_leader(lambda: self._upload(first))
        return Arrival(facts["mode"], facts["rounds"])

    def fetch(self, fragment: int, names: Sequence[str], max_retries: int) -> Outcome:
        """The server's parameters of a fragment, on the leader; the rest on all ranks."""
        outcome = Outcome("unsettled")

        def fly() -> dict[str, Any]:
            nonlocal outcome
            flight = Flight(
                self._session,
                None,
                fragment=fragment,
                round_id="",
                shapes=self._view.specification.select(names),
                local_steps=0,
                max_retries=max_retries,
                timeout_s=self._timeout_s,
            )
            flight.begin(beside=False)
            outcome = flight.finish()
            if outcome.kind == "unsettled":
                raise Unreachable(outcome.reason)
            if outcome.kind != "reset":
                raise DiLoCoError(outcome.reason)
            return {"round": outcome.round_id}

        told = self._on_leader(fly)
        outcome.round_id = told["round"]
        return outcome

    def _on_leader(self, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `act` gives on the leader, on every rank; a mistake that it meets, as well."""
        told: dict[str, Any] = {}
        if self._view.leads:
            try:
                with awaiting(f"the DiLoCo server {self._session.client.address}"):
                    told = act()
            except DiLoCoError as error:
                told = {
                    "mistake": f"DiLoCo: {error}",
                    "out_of_reach": isinstance(error, Unreachable),
                }
        told = self._view.ranks.share(told)
        if "mistake" in told:
            kind = OutOfReach if told["out_of_reach"] else CommonMistake
            raise kind(told["mistake"])
        return told

    # -- the leader's part ------------------------------------------------------------------

    def _register(
        self, earlier: str | None, attempts: int, fragments: Sequence[Sequence[str]]
    ) -> dict[str, Any]:
        session = self._session
        rounds = [str(one) for one in session.register(earlier, attempts=attempts)["round_id"]]
        server = session.server
        theirs = server.get("num_fragments", len(fragments))
        if theirs != len(fragments) or len(rounds) != len(fragments):
            raise DiLoCoError(
                f"num_fragments: {len(fragments)} given, but {session.client.address} cuts the "
                f"model into {theirs}; both must be the same"
            )
        cut = server.get("fragments")
        if cut is not None and [list(names) for names in fragments] != cut:
            raise DiLoCoError(
                f"{session.client.address} cuts the model into other fragments than this version "
                "of headway; use one version everywhere"
            )
        return {
            "mode": str(server.get("mode", "sync")),
            "rounds": rounds,
            "has_parameters": bool(server.get("has_parameters", True)),
        }

    def _upload(self, first: dict[str, Any]) -> dict[str, Any]:
        """The first worker gives the server its parameters; the others wait for that."""
        session = self._session
        message = compose({"payload": "parameters"}, encode(first, "float32").payloads)
        backoff = Backoff(min(0.2, session.first_pause_s), 5.0, stop=session.stopping)
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                session.client.upload(
                    message,
                    limit_s=max(0.0, deadline_s - time.monotonic()),
                    worker=session.worker_id,
                    session=session.session,
                )
                return {}
            except (Refused, Unreachable) as error:
                # Another worker may be about it: then this one is too late, or too early to know.
                waits = isinstance(error, Unreachable) or error.answer.get("reason") == "not_first"
                if waits and self._has_parameters():
                    return {}
                if not waits or time.monotonic() > deadline_s or not backoff.wait():
                    raise

    def _has_parameters(self) -> bool:
        try:
            return bool(self._session.register()["server"].get("has_parameters"))
        except Unreachable:
            return False


def compare_settings(worker_id: str, options: WorkerOptions, server: Mapping[str, Any]) -> None:
    """Warn where only one of a worker and its server has a setting that both must have."""
    theirs = bool(server.get("dylu", False))
    if options.dylu and not theirs:
        logger.warning(
            "DiLoCo: %s has dylu=True and its server dylu=False: steps do not go by speed; give "
            "the server --dylu too",
            worker_id,
        )
    if theirs and not options.dylu:
        logger.warning(
            "DiLoCo: %s has dylu=False and its server dylu=True: it takes its sync_every=%d steps "
            "whatever its speed is; give it dylu=True too",
            worker_id,
            options.sync_every,
        )
    asked = server.get("sync_every", options.sync_every)
    if asked != options.sync_every and not options.dylu:
        logger.warning(
            "DiLoCo: %s has sync_every=%d and its server sync_every=%s: it keeps its own, as only "
            "a worker with dylu=True follows the server",
            worker_id,
            options.sync_every,
            asked,
        )
