"""A worker: trains locally, and every so many steps exchanges what it learned with the others.

Owns: when an exchange begins and ends, the parameters a worker began its interval from (the
snapshot), merging what comes back with what was learned meanwhile, and what a resume keeps. Does
not own: the parameters of one strategy (parameters.py), one submission (flight.py), the
registration (session.py).

All ranks of a group have a worker and call the same methods at the same steps; the leading one
talks to the server, and tells the others what came of it before any of them acts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.diloco.arrival import Arriving, OutOfReach, compare_settings
from headway.diloco.backoff import FIRST_S
from headway.diloco.client import DiLoCoClient
from headway.diloco.compression import encode
from headway.diloco.counters import Counters, Speed
from headway.diloco.faults import DiLoCoError
from headway.diloco.flight import Flight, Outcome
from headway.diloco.left_over import LeftOver
from headway.diloco.options import WorkerOptions
from headway.diloco.parameters import ParameterView
from headway.diloco.session import Session
from headway.diloco.turns import whose_turn
from headway.diloco.wire import Message, compose

logger = logging.getLogger(__name__)

_MOST_LATE = 3
"""How often in a row a submission may miss its round before the next interval is waited for."""

_HOLD_FLOAT32 = ("float32", "float64")
"""Dtypes in which a server's parameters are what they are there."""


@dataclass
class _Air:
    """An exchange that has begun, as every rank of the group knows it."""

    fragment: int
    sent: dict[str, Tensor]
    """This rank's parts of the parameters as they were when it began."""
    local_steps: int
    airborne: bool = True
    """False when it could not be settled: it goes on at the next turn."""
    steps_since: int = 0


class DiLoCoWorker:
    """One of several trainers of one model. Every method is for all ranks of its group."""

    def __init__(
        self,
        view: ParameterView,
        client: DiLoCoClient,
        options: WorkerOptions,
        *,
        worker_id: str,
        group: Mapping[str, Any] | None = None,
        should_end: Callable[[], bool] = bool,
        session_file: Path | None = None,
        first_pause_s: float = FIRST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`group` tells the server of the ranks; `should_end` cuts waits short on the leader."""
        self.view, self.options, self.worker_id = view, options, worker_id
        self.sync_every = options.sync_every
        self.counters, self._speed = Counters(), Speed(clock)
        # Cuts the model, and so refuses more fragments than it has layers.
        self.fragments = view.specification.cut(options.num_fragments)
        self._ranks = view.ranks
        self._should_end, self._clock = should_end, clock
        self._snapshot: dict[str, Tensor] = {}
        self._bases: list[str] = []
        """Of each fragment, the round that its snapshot is the beginning of."""
        self._targets: list[str] = []
        """The round that its next submission is for."""
        self._fragment_steps = [0] * options.num_fragments
        """Steps since its snapshot was taken."""
        self._since_turn = self._next = self._step = 0
        self._air: _Air | None = None
        self._mode = "sync"
        self._left_over = LeftOver(view)
        self._is_adrift = False
        """Whether the server could not be reached when the model had gone back to a checkpoint."""
        # Only the leader's:
        self._flight: Flight | None = None
        self._new_left_over: dict[str, Tensor] = {}
        self._known_bytes = (0, 0)
        facts = {
            "model": {
                "fingerprint": view.specification.fingerprint,
                "layout": view.specification.layout,
            },
            "sync_every": options.sync_every,
            "num_fragments": options.num_fragments,
            "comm": options.comm,
            "group": dict(group or {"world_size": 1, "strategy": "single"}),
        }
        self._session = Session(
            client,
            worker_id,
            facts,
            heartbeat_s=options.heartbeat_interval,
            first_pause_s=first_pause_s,
            file=session_file,
        )

    # -- beginning and end ------------------------------------------------------------------

    def start(self, state: Mapping[str, Any] | None = None, step: int = 0) -> None:
        """Register, and take the server's parameters; `ConfigError` if that cannot be.

        `state` is that of a checkpoint whose weights the model has, with the snapshot that belongs
        to them given to `load_parameter_state` before. Where the server still is at the round of
        that snapshot, both are kept, and the interval goes on.
        """
        self._step = self._session.step = step
        if state:
            self.load_state_dict(state)
        self._join(None if not state else state.get("session"), resumed=bool(state))
        if self.view.leads:
            compare_settings(self.worker_id, self.options, self._session.server)
            self._session.start_beating()

    def rejoin(self, state: Mapping[str, Any], step: int) -> None:
        """The model went back to a checkpoint in the middle of the run.

        If the server cannot be reached, training goes on alone, until a later turn finds it.
        """
        if self._flight is not None:
            self._flight.cancel()
        self._air = self._flight = None
        self._step = self._session.step = step
        self.load_state_dict(state)
        self._come_back()

    def _come_back(self) -> bool:
        """Join again after the model went back; True if that brought the server's parameters."""
        try:
            kept = self._join(None, resumed=True)
        except OutOfReach as error:
            self._is_adrift = True
            self._warn("training goes on alone until a later turn: %s", error)
            return False
        self._is_adrift = False
        return not kept

    def _join(self, earlier: str | None, *, resumed: bool) -> bool:
        """Register; keep what fits the server's rounds, of the rest take its parameters.

        True if all was kept.
        """
        arriving = Arriving(self.view, self._session, self.options.timeout)
        retries = self.options.max_sync_retries
        arrival = arriving.register(earlier, retries + 1, self.fragments)
        self._mode, rounds = arrival.mode, arrival.rounds
        keep = [
            len(self._bases) == len(rounds)
            and self._bases[fragment] == rounds[fragment]
            and self._has_snapshot(names)
            for fragment, names in enumerate(self.fragments)
        ]
        keep = [all(of_ranks) for of_ranks in zip(*self._ranks.exchange(keep))]
        # Not what it was, should the server go away between two of them.
        self._bases = [base if kept else "" for base, kept in zip(rounds, keep)]
        for fragment, names in enumerate(self.fragments):
            if not keep[fragment]:
                outcome = arriving.fetch(fragment, names, retries)
                self._snapshot.update(self.view.write_from_leader(outcome.values, names))
                self._bases[fragment] = outcome.round_id
                self._fragment_steps[fragment] = 0
                # Of this worker more may count by now than the checkpoint knows, and its residual
                # with it: better lost than applied twice.
                self._left_over.forget(names)
        self._targets = rounds = list(self._bases)
        told = "begins from the server's parameters"
        if all(keep):
            told = "goes on in its interval: the server is at the same round"
        elif resumed:
            self._since_turn = self._next = 0
            told = "begins a new interval from the server's parameters, which have moved on"
        if self._mode == "sync":
            self._next = whose_turn(rounds, self._next)
        if self.view.leads:
            logger.info("DiLoCo: %s %s (%s)", self.worker_id, told, ", ".join(rounds))
        return all(keep)

    def _has_snapshot(self, names: Sequence[str]) -> bool:
        return all(name in self._snapshot for name in self.view.parts(names))

    def stop(self) -> None:
        """Leave the server. Not collective: also after an error, on whatever ranks are left."""
        if self.view.leads:
            self._session.close()
        self._air = self._flight = None

    # -- steps ------------------------------------------------------------------------------

    @property
    def interval(self) -> int:
        """Steps from one fragment's turn to the next one's."""
        return max(1, self.sync_every // self.options.num_fragments)

    @property
    def steps_to_turn(self) -> int:
        return self.interval - self._since_turn

    @property
    def overlap_steps(self) -> int:
        """Steps that are trained while an exchange is under way."""
        asked = self.options.overlap_steps
        if asked is None:
            asked = self.interval if self.options.num_fragments > 1 else 0
        return min(asked, self.interval)

    @property
    def local_step(self) -> int:
        """Steps since the last exchange of the whole model, or of the fragment it was longest."""
        return max(self._fragment_steps)

    def after_step(self, step: int, *, last: bool = False) -> bool:
        """A step has ended on all ranks; True if an exchange has ended with it.

        With `last` nothing is left under way.
        """
        self._step = self._session.step = step
        self._speed.step()
        self._session.steps_per_second = self._speed.per_second
        self._since_turn += 1
        self._fragment_steps = [steps + 1 for steps in self._fragment_steps]
        is_turn = self._since_turn >= self.interval
        began_s, settled = self._clock(), False
        if self._air is not None:
            self._air.steps_since += 1
            ripe = self._air.steps_since >= self.overlap_steps or is_turn or last
            if self._air.airborne and ripe:
                settled = self._settle(last=last)
        if is_turn:
            settled = self._take_turn(last=last) or settled
        if is_turn or settled:
            spent_s = self._clock() - began_s
            self.counters.last_sync_time = spent_s
            self.counters.total_sync_time += spent_s
            self._speed.restart()
        return settled

    def _take_turn(self, *, last: bool) -> bool:
        """True if it brought new parameters."""
        self._since_turn = 0
        if self._is_adrift:
            brought = self._come_back()
            if brought or self._is_adrift:
                return brought
        self._depart()
        return (self.overlap_steps == 0 or last) and self._settle(last=last)

    def _depart(self) -> None:
        """The next fragment's turn, unless an exchange is still to be settled."""
        if self._air is not None:
            if not self._air.airborne and self._flight is not None:
                self._flight.begin(beside=self.overlap_steps > 0)
            self._air.airborne = True
            return
        fragment, self._next = self._next, (self._next + 1) % len(self.fragments)
        self._launch(fragment)

    def _launch(self, fragment: int) -> None:
        names, steps = self.fragments[fragment], self._fragment_steps[fragment]
        sent = self.view.copies(names)
        moved = {name: self._snapshot[name] - part for name, part in sent.items()}
        self._measure_drift(moved)
        # A difference of two floats is no float: only the parameters themselves travel exactly.
        # To a server that has what they were made from: not where that was rounded, on its way or
        # by the dtype of the parameters here.
        entries = self.view.specification.entries
        exact = (
            self.options.comm == "float32"
            and not self.options.bf16_fetch
            and all(entries[name].dtype in _HOLD_FLOAT32 for name in names)
            and self._mode == "sync"
            and self._targets[fragment] == self._bases[fragment]
        )
        full = self.view.gather_on_leader(sent if exact else moved, names)
        if self.options.comm == "int8":
            self._left_over.gather()
        self._air = _Air(fragment, sent, steps)
        if not self.view.leads:
            return
        self._flight = Flight(
            self._session,
            self._compose(fragment, full, exact),
            fragment=fragment,
            round_id=self._targets[fragment],
            shapes=self.view.specification.select(names),
            local_steps=steps,
            max_retries=self.options.max_sync_retries,
            timeout_s=self.options.timeout,
            should_end=self._should_end,
            dylu=self.options.dylu,
            clock=self._clock,
        )
        self._flight.begin(beside=self.overlap_steps > 0)

    def _compose(self, fragment: int, full: Mapping[str, Tensor], exact: bool) -> Message | None:
        if not all(bool(tensor.isfinite().all()) for tensor in full.values()):
            return None
        encoded = encode(full, self.options.comm, self._left_over.whole)
        self._new_left_over = encoded.residual
        meta = {
            "payload": "local" if exact else "pseudo-gradient",
            "base": self._bases[fragment],
            "fragment": fragment,
        }
        return compose(meta, encoded.payloads)

    def _measure_drift(self, moved: Mapping[str, Tensor]) -> None:
        own = [
            self.view.sum_over_owned(moved),
            self.view.sum_over_owned({name: self._snapshot[name] for name in moved}),
        ]
        length, whole = (sum(column) ** 0.5 for column in zip(*self._ranks.exchange(own)))
        self.counters.drift = length / whole if whole > 0 else length

    # -- what comes back --------------------------------------------------------------------

    def _settle(self, times: int = 0, *, last: bool = False) -> bool:
        """Take what became of the exchange under way; True if it brought new parameters."""
        assert self._air is not None
        air = self._air
        outcome = Outcome("unsettled") if self._flight is None else self._flight.finish()
        told = self._ranks.share(self._tell(outcome) if self.view.leads else None)
        outcome = replace(outcome, kind=told["kind"], round_id=told["round"], reason=told["reason"])
        for name, value in told["counters"].items():
            setattr(self.counters, name, value)
        if outcome.kind == "fatal":
            raise DiLoCoError(f"DiLoCo: {outcome.reason}")
        if outcome.kind == "unsettled":
            air.airborne = False
            self._warn("training goes on alone until the next exchange: %s", outcome.reason)
            return False
        if outcome.kind == "late":
            self._targets[air.fragment] = outcome.round_id
            self._air = self._flight = None
            self._warn("a round ended without this worker; what it has goes into the next")
            if len(self.fragments) > 1:
                self._next = told["turn"]  # where the others wait; this one's turn comes again
            elif times < _MOST_LATE:
                self._launch(air.fragment)
                waits = self.overlap_steps == 0 or last
                return self._settle(times + 1, last=last) if waits else False
            return False
        self._take(air, outcome)
        self._follow(told["recommended"])
        return True

    def _tell(self, outcome: Outcome) -> dict[str, Any]:
        """What the leader tells the other ranks."""
        counters, client = self.counters, self._session.client
        assert self._flight is not None
        sent, received = client.sent_bytes, client.received_bytes
        new_sent, new_received = sent - self._known_bytes[0], received - self._known_bytes[1]
        self._known_bytes = (sent, received)
        retries, self._flight.num_retries = self._flight.num_retries, 0
        return {
            "kind": outcome.kind,
            "round": outcome.round_id,
            "reason": outcome.reason,
            "turn": whose_turn(self._session.heard, self._next),
            "recommended": self._session.recommended if self.options.dylu else None,
            "counters": {
                "sync_retries": counters.sync_retries + retries,
                "reconnections": counters.reconnections + self._session.take_returns(),
                "last_sent_bytes": new_sent,
                "last_received_bytes": new_received,
                "sent_bytes": counters.sent_bytes + new_sent,
                "received_bytes": counters.received_bytes + new_received,
            },
        }

    def _take(self, air: _Air, outcome: Outcome) -> None:
        """Put new parameters into the model, with what was learned since they were asked for."""
        names, alpha = self.fragments[air.fragment], self.options.merge_alpha
        keeps = outcome.kind == "applied" and air.steps_since > 0

        def merge(name: str, new: Tensor, part: Tensor) -> Tensor:
            progress = part.float() - air.sent[name].to(part.device)
            return new.to(part.device) + alpha * progress

        taken = self.view.write_from_leader(outcome.values, names, merge if keeps else None)
        for name, value in taken.items():
            if name in self._snapshot:
                self._snapshot[name].copy_(value)  # a checkpoint knows this memory
            else:
                self._snapshot[name] = value
        self._bases[air.fragment] = self._targets[air.fragment] = outcome.round_id
        self._fragment_steps[air.fragment] = air.steps_since if keeps else 0
        self._air = self._flight = None
        if outcome.kind == "reset":
            self.counters.refused_syncs += 1
            self._warn(
                "the update of this worker is dropped and the server's parameters are taken: %s",
                outcome.reason,
            )
            return
        if self.options.comm == "int8":
            self._left_over.keep(self._new_left_over, names)
        self.counters.fragment_syncs += 1
        num_fragments = len(self.fragments)
        self.counters.sync_count = self.counters.fragment_syncs // num_fragments

    def _follow(self, recommended: int | None) -> None:
        if recommended is not None and self.options.dylu:
            recommended = max(recommended, self.options.num_fragments)
            if recommended != self.sync_every:
                self.sync_every = recommended
                self.counters.dylu_adjustments += 1

    def _warn(self, text: str, *values: Any) -> None:
        if self.view.leads:
            logger.warning("DiLoCo: " + text, *values)

    # -- checkpoints ------------------------------------------------------------------------

    @property
    def sync_metrics(self) -> dict[str, float]:
        """Figures for records, by name; the same on all ranks."""
        found = self.counters.metrics(
            dylu=self.options.dylu, num_fragments=self.options.num_fragments
        )
        found |= {
            "local_step": self.local_step,
            "steps_per_second": self._speed.per_second,
            "sync_every": self.sync_every,
        }
        return {f"diloco/{name}": value for name, value in found.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": 1,
            "worker_id": self.worker_id,
            "session": self._session.session,
            "local_step": self.local_step,
            "sync_every": self.sync_every,
            "num_fragments": self.options.num_fragments,
            "fragment_steps": list(self._fragment_steps),
            "since_turn": self._since_turn,
            "next_fragment": self._next,
            "rounds": list(self._bases),
            **self.counters.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Counters count on; where in an interval the worker is, holds only if rounds do."""
        self.counters.load_state_dict(state)
        if self.options.dylu and isinstance(state.get("sync_every"), int):
            self.sync_every = int(state["sync_every"])
        if state.get("num_fragments") != self.options.num_fragments:
            self._bases = []
            return
        self._bases = [str(one) for one in state.get("rounds", [])]
        self._fragment_steps = [int(one) for one in state["fragment_steps"]]
        self._since_turn = int(state["since_turn"])
        self._next = int(state["next_fragment"])

    def parameter_state(self) -> dict[str, dict[str, Tensor]]:
        """The snapshot and what int8 left over, for checkpoints."""
        slots = {"snapshot": self._snapshot, "residual": self._left_over.parts}
        return {slot: dict(tensors) for slot, tensors in slots.items() if tensors}

    def load_parameter_state(self, slots: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._snapshot = _held(slots.get("snapshot", {}))
        self._left_over.load(_held(slots.get("residual", {})))


def _held(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.to("cpu", torch.float32) for name, t in tensors.items() if t.numel()}
