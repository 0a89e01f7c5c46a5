"""What the server tells about itself: status as JSON, metrics for Prometheus.

Owns: the fields and their names. Does not own: the figures (core.py, rounds.py), the routes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import headway
from headway.diloco.core import Core
from headway.diloco.rounds import Round, RoundBook, Worker
from headway.diloco.wire import VERSION


def describe(core: Core, started_at: float, now: float) -> dict[str, Any]:
    """The whole status."""
    book, options, totals, state = core.book, core.options, core.totals, core.state
    spec = core.specification
    return {
        "protocol": VERSION,
        "headway_version": headway.__version__,
        "mode": options.mode,
        "expected": options.num_workers,
        "minimum": options.min_workers,
        "sync_every": options.sync_every,
        "dylu": options.dylu,
        "outer": options.make_optimizer_settings(),
        "uptime_s": now - started_at,
        "output_dir": core.ledger.folder.name,
        "model": None
        if spec is None
        else {
            "fingerprint": spec.fingerprint,
            "num_parameters": spec.num_elements,
            "num_tensors": len(spec.shapes),
        },
        "commit": None if state is None else state.commit,
        "state_hash": None if state is None else state.hash,
        "rounds": [_describe_round(book, k, place, now) for k, place in enumerate(book.rounds)],
        "workers": [_describe_worker(book, worker, now) for worker in book.workers.values()],
        "num_evicted": book.num_evicted,
        "refused": dict(book.num_refused),
        "received_bytes": totals.num_received_bytes,
        "sent_bytes": totals.num_sent_bytes,
        "num_rounds": totals.num_rounds,
        "commit_s": totals.commit_s,
        "last_commit_s": totals.last_commit_s,
        "last_round_s": totals.last_round_s,
        "last_drift": totals.last_drift,
        "last_num_workers": totals.last_num_workers,
        "recent_rounds": list(totals.recent),
    }


def _describe_round(book: RoundBook, fragment: int, place: Round, now: float) -> dict[str, Any]:
    deadline_at = None if place.first_at is None else place.first_at + book.rules.deadline_s
    return {
        "fragment": fragment,
        "id": place.id,
        "number": place.number,
        "state": "closed" if place.closed else "open",
        "num_submitted": len(place.submissions),
        "submitted": sorted(s.worker for s in place.submissions.values()),
        "opened_s_ago": now - place.opened_at,
        "deadline_in_s": None if deadline_at is None else max(0.0, deadline_at - now),
        "norm_limit": book.norm_limit(fragment),
    }


def _describe_worker(book: RoundBook, worker: Worker, now: float) -> dict[str, Any]:
    return {
        "id": worker.id,
        "step": worker.step,
        "steps_per_second": worker.steps_per_s,
        "sync_every": book.recommend(worker),
        "comm": worker.comm,
        "group": worker.group,
        "seen_s_ago": now - worker.seen_at,
        "registered_s_ago": now - worker.registered_at,
        "num_accepted": worker.num_accepted,
        "num_refused": worker.num_refused,
        "received_bytes": worker.num_received_bytes,
        "sent_bytes": worker.num_sent_bytes,
        "last_norm": worker.last_norm,
    }


_FIGURES = {
    "commit": ("round", "gauge", "Rounds committed since the beginning, over all fragments."),
    "num_rounds": ("rounds_total", "counter", "Rounds committed by this process."),
    "num_evicted": ("evictions_total", "counter", "Workers let go for missed heartbeats."),
    "received_bytes": ("received_bytes_total", "counter", "Bytes of bodies received."),
    "sent_bytes": ("sent_bytes_total", "counter", "Bytes of parameters sent."),
    "commit_s": ("commit_seconds_total", "counter", "Time for applying and committing rounds."),
    "last_round_s": ("last_round_seconds", "gauge", "From the last round's opening to its end."),
    "last_commit_s": ("last_commit_seconds", "gauge", "Time for applying the last round."),
    "last_drift": ("last_drift", "gauge", "How far the last round moved the parameters."),
    "last_num_workers": ("last_round_workers", "gauge", "Submissions in the last round."),
    "expected": ("workers_expected", "gauge", "Workers that a round waits for."),
    "uptime_s": ("uptime_seconds", "gauge", "Age of this process' server."),
}
_WORKER_FIGURES = {
    "step": ("worker_step", "gauge", "A worker's step."),
    "steps_per_second": ("worker_steps_per_second", "gauge", "A worker's speed."),
    "sync_every": ("worker_sync_every", "gauge", "Steps recommended to a worker."),
    "seen_s_ago": ("worker_seen_seconds_ago", "gauge", "Time since a worker was heard of."),
    "num_accepted": ("worker_accepted_total", "counter", "A worker's accepted submissions."),
    "num_refused": ("worker_refused_total", "counter", "A worker's refused bodies."),
    "received_bytes": ("worker_received_bytes_total", "counter", "Bytes of bodies of a worker."),
    "sent_bytes": ("worker_sent_bytes_total", "counter", "Bytes of parameters sent to a worker."),
    "last_norm": ("worker_last_norm", "gauge", "Norm of a worker's last submission."),
}


def render(status: Mapping[str, Any]) -> str:
    """The status in Prometheus' text format."""
    return "\n".join(_lines(status)) + "\n"


def _lines(status: Mapping[str, Any]) -> Iterator[str]:
    for key, figure in _FIGURES.items():
        yield from _family(figure, [("", status[key])])
    workers = status["workers"]
    yield from _family(("workers", "gauge", "Workers that take part."), [("", len(workers))])
    for key, figure in _WORKER_FIGURES.items():
        # Ids are of letters, digits, dots, underscores and hyphens: nothing to escape.
        yield from _family(figure, [(f'{{worker="{w["id"]}"}}', w[key]) for w in workers])
    waiting = [(f'{{fragment="{r["fragment"]}"}}', r["num_submitted"]) for r in status["rounds"]]
    yield from _family(("submitted", "gauge", "Submissions in the open round."), waiting)
    refused = [(f'{{reason="{reason}"}}', n) for reason, n in status["refused"].items()]
    yield from _family(("refused_total", "counter", "Refused requests by reason."), refused)


def _family(figure: tuple[str, str, str], samples: list[tuple[str, Any]]) -> Iterator[str]:
    name, kind, words = figure
    there = [(labels, value) for labels, value in samples if value is not None]
    if there:
        yield f"# HELP headway_diloco_{name} {words}"
        yield f"# TYPE headway_diloco_{name} {kind}"
        yield from (f"headway_diloco_{name}{labels} {value!r}" for labels, value in there)
