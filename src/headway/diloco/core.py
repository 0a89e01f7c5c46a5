"""The server without its sockets: the book of rounds, the state and the ledger together.

Owns: what a registration is checked against, the steps of a round from its close to its commit,
what is told about the server. Does not own: requests (server.py), the rules of rounds (rounds.py).

Methods are called in one thread, but for `measure`, `make_message` and `carry_out`, which take
long, change nothing that others see and may run beside it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headway.checkpoint.ranks import SoloRanks
from headway.diloco.compression import decode, encode
from headway.diloco.ledger import Ledger
from headway.diloco.parameters import ParameterView
from headway.diloco.rounds import Refusal, RoundBook, Submission, Worker, new_round_id
from headway.diloco.server_options import ServerOptions
from headway.diloco.specification import Specification
from headway.diloco.state import (
    Body,
    OpenBody,
    State,
    apply_round,
    drift_of,
    is_finite,
    make_state,
    measure,
    norm_of,
)
from headway.diloco.wire import Message, compose
from headway.errors import ConfigError

logger = logging.getLogger(__name__)

Model = nn.Module | ParameterView | Mapping[str, Tensor] | Specification | None


@dataclass(frozen=True)
class Job:
    """A round that is being applied."""

    fragment: int
    round_id: str
    state: State
    submissions: list[Submission]
    book: dict[str, Any]
    """What the book remembers once it is done."""


@dataclass(frozen=True)
class Done:
    """A round that was applied and committed."""

    state: State
    drift: float


@dataclass
class Totals:
    """Sums over the life of this process."""

    num_rounds: int = 0
    num_received_bytes: int = 0
    num_sent_bytes: int = 0
    commit_s: float = 0.0
    last_commit_s: float = 0.0
    last_round_s: float = 0.0
    last_drift: float = 0.0
    last_num_workers: int = 0
    recent: list[dict[str, Any]] = field(default_factory=list)


class Core:
    """One server's rounds over one folder."""

    def __init__(
        self, model: Model, output_dir: str | Path, options: ServerOptions, now: float
    ) -> None:
        self.options, self.totals = options, Totals()
        self.optimizer = options.make_optimizer()
        self.ledger = Ledger(
            output_dir,
            keep_states=options.keep_states,
            keep_submissions=options.keep_submissions,
        )
        self.state: State | None = None
        self.specification, self._initial = _look_at(model)
        self._is_borrowed = False
        """Whether the specification is that of the first worker."""
        if self.specification is not None:
            self.specification.cut(options.num_fragments)  # tells a mistake before anything is done
        self.book = RoundBook(options.rules, now)
        self._messages: dict[tuple[int, int | None, str], Message] = {}

    def open(self, now: float) -> None:
        """Go on where the folder's last round ended, or begin if the parameters are known."""
        self.ledger.open()
        try:
            if self.ledger.has_state:
                self._resume(now)
            elif self._initial is not None and self.specification is not None:
                self.begin(self.specification, self._initial)
        except BaseException:
            self.ledger.close()
            raise
        self._initial = None

    def _resume(self, now: float) -> None:
        state, known = self.ledger.resume()
        own = self.specification
        if own is not None and own.fingerprint != state.specification.fingerprint:
            raise ConfigError(
                f"output_dir={str(self.ledger.folder)!r} holds another model: "
                + "; ".join(state.specification.differences(own))
            )
        self.specification = state.specification
        self.ledger.change_settings(self._settings(state.specification))
        self.state = state
        self.book = RoundBook(self.options.rules, now, known)
        self._note_norms()
        logger.info("going on after round %d, state %s", state.commit, state.hash)

    def begin(self, specification: Specification, parameters: Mapping[str, Tensor]) -> None:
        """Take the first parameters, and commit them."""
        fragments = specification.cut(self.options.num_fragments)
        state = make_state(specification, fragments, parameters, self.optimizer, self.options.mode)
        if not all(is_finite(state, k) for k in range(len(fragments))):
            raise ConfigError("the first parameters hold values that are not finite")
        self.ledger.begin(state, self._settings(specification), self.book.known())
        self.specification, self.state = specification, state
        self._note_norms()

    def _note_norms(self) -> None:
        """What the first updates are compared with."""
        assert self.state is not None
        self.book.parameter_norms = [
            norm_of(self.state, k) for k in range(len(self.state.fragments))
        ]

    def begin_from(self, specification: Specification, path: str) -> None:
        """The same with the parameters of a body in a file."""
        with OpenBody(path, specification.shapes) as body:
            self.begin(specification, {name: decode(p) for name, p in body.payloads.items()})

    def _settings(self, specification: Specification) -> dict[str, Any]:
        return {
            **self.options.make_optimizer_settings(),
            "mode": self.options.mode,
            "num_fragments": self.options.num_fragments,
            "fingerprint": specification.fingerprint,
        }

    def close(self) -> None:
        self.ledger.close()

    # -- workers --------------------------------------------------------------------------------

    def register(self, said: Mapping[str, Any], now: float) -> dict[str, Any]:
        """Let a worker in whose model and settings fit, and tell it all it needs."""
        self._check_model(said["model"])
        if said["num_fragments"] != self.options.num_fragments:
            raise Refusal(
                422,
                "fragments",
                f"num_fragments={said['num_fragments']}: this server works with "
                f"{self.options.num_fragments}",
            )
        before = self._waiting_bodies()
        worker = self.book.register(
            said["worker_id"],
            now,
            resume_session=said["resume_session"],
            claim=said["claim"],
            comm=said["comm"],
            sync_every=said["sync_every"],
            step=said["step"],
            group=said["group"],
        )
        _delete(before - self._waiting_bodies())
        return {
            "session": worker.session,
            "round_id": [place.id for place in self.book.rounds],
            "server": self.describe(worker),
        }

    def _waiting_bodies(self) -> set[str]:
        return {s.path for place in self.book.rounds for s in place.submissions.values()}

    def describe(self, worker: Worker) -> dict[str, Any]:
        """What a worker must know about the server."""
        options = self.options
        return {
            "mode": options.mode,
            "expected": options.num_workers,
            "minimum": options.min_workers,
            "outer_lr": options.outer_lr,
            "momentum": options.outer_momentum,
            "nesterov": options.nesterov,
            "accumulate": options.accumulate,
            "heartbeat_s": options.heartbeat_s,
            "deadline_s": options.deadline_s,
            "max_staleness": options.most_stale,
            "dylu": options.dylu,
            "sync_every": self.book.recommend(worker),
            "num_fragments": options.num_fragments,
            "fragments": self.state.fragments if self.state else None,
            "has_parameters": self.state is not None,
        }

    def _check_model(self, said: Mapping[str, Any]) -> None:
        own, layout = self.specification, said.get("layout")
        theirs = None if layout is None else Specification.from_layout(layout)
        if theirs is not None and theirs.fingerprint != said["fingerprint"]:
            raise Refusal(422, "model", "the fingerprint is not that of the layout")
        if own is None or (self._is_borrowed and self.state is None and not self.book.workers):
            if theirs is None:
                raise Refusal(422, "model", "the first worker must say what its model looks like")
            theirs.cut(self.options.num_fragments)
            self.specification, self._is_borrowed = theirs, True
        elif own.fingerprint != said["fingerprint"]:
            found = own.differences(theirs) if theirs else ["its fingerprint is another one"]
            raise Refusal(
                422,
                "model",
                f"it is not this server's model: {'; '.join(found)}",
                differences=found,
            )

    # -- parameters -----------------------------------------------------------------------------

    def require_state(self) -> State:
        if self.state is None:
            raise Refusal(409, "no_parameters", "no worker has brought the first parameters yet")
        return self.state

    def names_of(self, state: State, fragment: int | None) -> list[str]:
        if fragment is None:
            return list(state.specification.shapes)
        self.book.round_of(fragment)
        return state.fragments[fragment]

    def make_message(
        self, state: State, fragment: int | None, round_id: str | None, comm: str
    ) -> Message:
        """The parameters for the wire; made once for each version. May run beside the rest, so
        which round they belong to is asked together with the state."""
        key = (state.commit, fragment, comm)
        if (known := self._messages.get(key)) is not None:
            return known
        meta: dict[str, Any] = {"version": state.commit}
        if fragment is not None:
            meta |= {"fragment": fragment, "round_id": round_id}
        names = self.names_of(state, fragment)
        message = compose(meta, encode({n: state.parameters[n] for n in names}, comm).payloads)
        for old in [k for k in list(self._messages) if k[0] < state.commit]:
            self._messages.pop(old, None)
        self._messages[key] = message
        return message

    # -- rounds ---------------------------------------------------------------------------------

    def measure(self, path: str, state: State, fragment: int, is_local: bool) -> float:
        """The norm of what a body would change."""
        shapes = state.specification.select(state.fragments[fragment])
        return measure(path, shapes, state.parameters if is_local else None)

    def start_round(self, fragment: int) -> Job:
        """Close a round: what it has is what counts."""
        place = self.book.rounds[fragment]
        submissions = self.book.close(fragment)
        book = self.book.after(fragment, submissions, new_round_id(place.number + 1))
        return Job(fragment, place.id, self.require_state(), submissions, book)

    def carry_out(self, job: Job) -> Done | None:
        """Apply and commit; None if the result would not be numbers, and then nothing is done."""
        bodies = [(Body(s.path, self._weigh(s), s.is_local), _describe(s)) for s in job.submissions]
        state = apply_round(
            job.state,
            job.fragment,
            [body for body, _ in bodies],
            self.optimizer,
            self.options.mode,
        )
        if not is_finite(state, job.fragment):
            return None
        self.ledger.commit(state, job.fragment, job.round_id, bodies, job.book)
        return Done(state, drift_of(job.state, state, job.fragment))

    def _weigh(self, submission: Submission) -> float:
        return float(submission.local_steps) if self.options.dylu else 1.0

    def finish_round(self, job: Job, done: Done, now: float, commit_s: float) -> None:
        """The round is committed; the next one is open."""
        opened_at = self.book.rounds[job.fragment].opened_at
        self.state = done.state
        self.book.advance(job.fragment, job.book, now)
        _delete(s.path for s in job.submissions)
        totals = self.totals
        totals.num_rounds += 1
        totals.commit_s += commit_s
        totals.last_commit_s, totals.last_drift = commit_s, done.drift
        totals.last_round_s, totals.last_num_workers = now - opened_at, len(job.submissions)
        totals.recent = [
            *totals.recent[-63:],
            {
                "commit": done.state.commit,
                "fragment": job.fragment,
                "round_id": job.round_id,
                "num_workers": len(job.submissions),
                "drift": done.drift,
                "round_s": now - opened_at,
                "commit_s": commit_s,
            },
        ]

    def retry_round(self, job: Job, retry_at: float) -> list[str]:
        """It failed and is tried again; returns the workers whose bodies are not there any more,
        or not whole: they are asked for them, as nothing else would ever bring them back."""
        lost = [s for s in job.submissions if _size_of(s.path) != s.num_bytes]
        self.book.reopen(job.fragment, retry_at, lost)
        return [submission.worker for submission in lost]

    def give_up_round(self, job: Job) -> None:
        """Its result was no numbers: forget the largest that was sent; the round stays open."""
        culprit = max(job.submissions, key=lambda submission: submission.norm)
        self.book.reopen(job.fragment, 0.0, [culprit])
        if (worker := self.book.workers.get(culprit.worker)) is not None:
            self.book.count_attempt(worker, culprit.round_id)
        _delete([culprit.path])


def _size_of(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except OSError:
        return None


def _delete(paths: Iterable[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _describe(submission: Submission) -> dict[str, Any]:
    """A submission as the ledger tells it."""
    return {
        "worker": submission.worker,
        "digest": submission.digest,
        "receipt": submission.receipt,
        "base_number": submission.number,
        "local_steps": submission.local_steps,
        "comm": submission.comm,
        "norm": submission.norm,
    }


def _look_at(model: Model) -> tuple[Specification | None, Mapping[str, Tensor] | None]:
    if model is None or isinstance(model, Specification):
        return model, None
    if isinstance(model, nn.Module):
        # By the same names and in the same order as workers of any strategy see them.
        model = ParameterView(model, SoloRanks())
    if isinstance(model, ParameterView):
        return model.specification, model.read_on_leader()
    if not isinstance(model, Mapping):
        raise ConfigError(
            f"model: {type(model).__name__} given; allowed: a module, named tensors, a "
            "Specification, or none, for what the first worker has"
        )
    return Specification.of(model), model
