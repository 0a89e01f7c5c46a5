"""The book of rounds: who counts, when a round is over, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from headway.diloco.rounds import Refusal, RoundBook, Rules, Submission, Worker, receipt_of
from headway.testing import assert_no_import

RULES = Rules(expected=3, minimum=2, deadline_s=100, heartbeat_s=10, missed_heartbeats=3)


def make_book(num_workers: int = 3, **rules: Any) -> RoundBook:
    book = RoundBook(replace(RULES, **rules), 0.0)
    for worker in "abcdef"[:num_workers]:
        book.register(worker, 0.0, sync_every=100)
    return book


def submit(
    book: RoundBook,
    worker: str,
    digest: str = "d",
    *,
    round_id: str | None = None,
    fragment: int = 0,
    now: float = 0.0,
    norm: float = 1.0,
) -> Submission:
    round_id = round_id or book.rounds[fragment].id
    submission = Submission(
        worker=worker, session=book.workers[worker].session, round_id=round_id,
        number=book.number_of(round_id, fragment) or 0, fragment=fragment, digest=digest,
        local_steps=1, comm="bf16", is_local=False, norm=norm, num_bytes=8, path=f"/{worker}",
    )  # fmt: skip
    book.accept(book.workers[worker], submission, now)
    return submission


def commit(book: RoundBook, fragment: int = 0, now: float = 0.0) -> list[Submission]:
    done = book.close(fragment)
    number = book.rounds[fragment].number + 1
    said = json.loads(json.dumps(book.after(fragment, done, f"r-{number}-x")))
    book.advance(fragment, said, now)
    return done


def refuse(reason: str, status: int, act: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        act()
    assert (caught.value.reason, caught.value.status) == (reason, status)
    return caught.value


# -- workers ------------------------------------------------------------------------------------


def test_an_id_belongs_to_one_worker_and_its_session_takes_it_back() -> None:
    book = make_book(1)
    session = book.workers["a"].session
    refuse("id_taken", 409, lambda: book.register("a", 1.0))
    refuse("id_taken", 409, lambda: book.register("a", 1.0, resume_session="x"))
    again = book.register("a", 1.0, resume_session=session)
    assert again.session != session
    refuse("unknown_session", 404, lambda: book.find("a", session, 1.0))
    refuse("unknown_session", 404, lambda: book.find("a", "\udce4", 1.0))
    refuse("unknown_worker", 404, lambda: book.find("z", session, 1.0))
    assert book.find("a", again.session, 1.0) is again


def test_those_who_are_not_heard_of_are_let_go() -> None:
    book = make_book(2)
    assert book.evict(30.0) == []
    book.find("b", book.workers["b"].session, 30.0)
    assert book.evict(31.0) == ["a"] and list(book.workers) == ["b"]
    assert book.num_evicted == 1
    book.register("a", 32.0)  # its id is free


def test_there_is_a_limit_on_workers() -> None:
    book = make_book(2, max_workers=2)
    refuse("quota", 429, lambda: book.register("c", 0.0))


@pytest.mark.parametrize(
    ("speeds", "wanted"),
    [
        ((4.0, 2.0, 1.0), (100, 50, 25)),
        ((10.0, 0.01, None), (100, 1, 100)),
        ((8.0, 8.0, 1.0), (100, 100, 13)),  # 12.5: halves go up
        ((None, None, None), (100, 100, 100)),
        ((4.0, 1e9, 2.0), (100, 100, 50)),  # whoever claims that does not stop the others
    ],
)
def test_step_counts_are_matched_to_speeds(speeds: tuple, wanted: tuple) -> None:
    book = make_book(3, dylu=True)
    for worker, speed in zip("abc", speeds):
        book.heartbeat(book.workers[worker], 7, speed)
    assert tuple(book.recommend(book.workers[w]) for w in "abc") == wanted
    off = make_book(1, sync_every=40)
    off.heartbeat(off.workers["a"], 1, 0.1)
    assert off.recommend(off.workers["a"]) == 40


def test_with_dylu_nobody_weighs_more_than_an_interval() -> None:
    book = make_book(3, dylu=True)
    book.workers["b"].sync_every = 2**40
    assert [book.count_steps(claimed) for claimed in (7, 100, 101, 2**40)] == [7, 100, 100, 100]
    assert make_book(3, dylu=True, sync_every=40).count_steps(2**40) == 40
    assert make_book(3).count_steps(2**40) == 2**40, "it counts for nothing there"


# -- synchronous rounds -------------------------------------------------------------------------


def test_a_round_is_over_when_all_have_submitted() -> None:
    book = make_book()
    first = book.rounds[0].id
    assert first.startswith("r-1-") and book.due(0.0) == []
    for worker in "cab":
        assert book.due(1e9) == [] or worker == "b"
        submit(book, worker)
    assert book.due(0.0) == [0]
    assert [s.worker for s in commit(book, now=5.0)] == ["a", "b", "c"]  # not as they came
    assert (book.rounds[0].number, book.due(1e9)) == (2, [])
    assert book.describe_round(first, 0)["state"] == "committed"
    assert book.describe_round(first, 0)["next_round_id"] == book.rounds[0].id


def test_the_deadline_counts_from_the_first_submission_and_needs_the_minimum() -> None:
    book = make_book()
    submit(book, "a", now=50.0)
    assert book.due(1e6) == []
    submit(book, "b", now=60.0)
    assert book.due(149.9) == [] and book.due(150.0) == [0]


def test_those_who_left_are_not_waited_for_but_those_who_have_not_come_are() -> None:
    early = make_book(2)
    submit(early, "a"), submit(early, "b")
    assert early.due(0.0) == []  # the third was expected and has never been there
    book = make_book(3)
    submit(book, "a"), submit(book, "b")
    assert book.due(0.0) == []
    book.deregister(book.workers["c"])
    assert book.due(0.0) == [0]
    alone = make_book(3)
    submit(alone, "a")
    alone.deregister(alone.workers["b"]), alone.deregister(alone.workers["c"])
    assert alone.due(1e9) == []  # the minimum is two


def test_those_who_never_come_are_waited_for_in_one_round_only() -> None:
    book = make_book(2)  # of three
    submit(book, "a"), submit(book, "b")
    assert book.due(99.0) == [] and book.due(100.0) == [0]
    commit(book, now=100.0)
    submit(book, "a", now=110.0)
    assert book.due(110.0) == []  # of those who are there, everyone is still waited for
    submit(book, "b", now=111.0)
    assert book.due(111.0) == [0]
    commit(book, now=111.0)
    # Also by the next server, which gives those who were there time to come back.
    again = RoundBook(book.rules, 1000.0, json.loads(json.dumps(book.known())))
    for worker in "ab":
        again.register(worker, 1000.0, sync_every=100)
        submit(again, worker, now=1001.0)
    assert again.due(1029.0) == [] and again.due(1030.0) == [0]
    # One that comes after all is one of them.
    book.register("c", 112.0, sync_every=100)
    submit(book, "a", now=113.0), submit(book, "b", now=113.0)
    assert book.due(113.0) == []
    submit(book, "c", now=114.0)
    assert book.due(114.0) == [0]


def test_after_a_restart_those_who_never_return_are_waited_for_as_long_as_silent_ones() -> None:
    book = make_book(3)
    submit(book, "a"), submit(book, "b"), submit(book, "c")
    commit(book)
    again = RoundBook(book.rules, 1000.0, json.loads(json.dumps(book.known())))
    for worker in "ab":
        again.register(worker, 1000.0, sync_every=100)
        submit(again, worker, now=1001.0)
    assert again.due(1029.0) == [] and again.due(1030.0) == [0]  # 3 heartbeats, not the deadline
    more = RoundBook(replace(book.rules, expected=4), 0.0, book.known())
    more.register("a", 0.0, sync_every=100), more.register("b", 0.0, sync_every=100)
    submit(more, "a"), submit(more, "b")
    assert more.due(99.0) == []  # a fourth has never been there


def test_what_the_evicted_have_sent_still_counts() -> None:
    book = make_book(3)
    submit(book, "a")
    book.find("b", book.workers["b"].session, 40.0), book.find("c", book.workers["c"].session, 40.0)
    assert book.evict(41.0) == ["a"]
    submit(book, "b")
    assert book.due(0.0) == []
    submit(book, "c")
    assert [s.worker for s in commit(book)] == ["a", "b", "c"]


def test_a_submission_is_idempotent() -> None:
    book = make_book()
    sent = submit(book, "a", "d1")
    worker = book.workers["a"]
    assert book.check(worker, sent.round_id, 0, "d1") == "accepted"
    refuse("duplicate", 409, lambda: book.check(worker, sent.round_id, 0, "d2"))
    submit(book, "b"), submit(book, "c")
    commit(book)
    assert book.check(worker, sent.round_id, 0, "d1") == "committed"
    assert sent.receipt == receipt_of(sent.round_id, 0, "a", "d1")
    over = refuse("round_over", 410, lambda: book.check(worker, sent.round_id, 0, "d2"))
    assert over.more == {"round_id": book.rounds[0].id}


def test_late_and_invented_rounds_are_refused() -> None:
    book = make_book()
    first = book.rounds[0].id
    submit(book, "a"), submit(book, "b")
    book.close(0)
    late = refuse("round_over", 410, lambda: book.check(book.workers["c"], first, 0, "d"))
    assert late.more == {}  # the next one is not known before the commit
    book.reopen(0, 0.0)
    commit(book)
    c = book.workers["c"]
    refuse("round_over", 410, lambda: book.check(c, first, 0, "d"))
    refuse("round_over", 410, lambda: book.check(c, "r-2-00000000", 0, "d"))
    refuse("round_over", 410, lambda: book.describe_round("r-9-0", 0))
    refuse("bad_request", 422, lambda: book.check(c, first, 1, "d"))
    told = book.describe_round(first, 0, c)
    assert told["counted"] is False and told["state"] == "committed"
    assert book.describe_round(first, 0, book.workers["a"])["counted"] is True


def test_a_new_session_takes_back_what_is_not_applied_yet() -> None:
    book = make_book(3)
    submit(book, "a", "old"), submit(book, "b")
    book.register("a", 1.0, resume_session=book.workers["a"].session)
    assert list(book.rounds[0].submissions) == ["b"]
    submit(book, "a", "new")
    book.close(0)
    book.register("a", 2.0, resume_session=book.workers["a"].session)
    assert set(book.rounds[0].submissions) == {"a", "b"}  # too late: it is being applied
    assert book.check(book.workers["a"], book.rounds[0].id, 0, "new") == "accepted"


def test_a_commit_that_fails_is_tried_again_later() -> None:
    book = make_book(2, expected=2)
    submit(book, "a"), submit(book, "b")
    book.close(0)
    assert book.due(9.0) == []
    book.reopen(0, retry_at=10.0)
    assert book.due(9.0) == [] and book.due(10.0) == [0]


def test_too_many_refused_bodies_are_not_read_any_more() -> None:
    book = make_book(2, max_attempts=2)
    worker, place = book.workers["a"], book.rounds[0]
    for _ in range(2):
        assert book.check(worker, place.id, 0, "d") is None
        book.count_attempt(worker, place.id)
    refuse("quota", 429, lambda: book.check(worker, place.id, 0, "d"))
    assert worker.num_refused == 2
    submit(book, "b")
    commit(book)
    assert book.check(worker, book.rounds[0].id, 0, "d") is None, "the next round is another one"
    for number in range(1000):
        book.count_attempt(worker, f"r-{number}")
    assert len(worker.attempts) <= 64


def test_the_first_updates_are_compared_with_the_parameters() -> None:
    book = make_book(1, expected=1, minimum=1)
    book.check_norm(0, 1e30)  # nothing is known
    book.parameter_norms = [2.0]
    book.check_norm(0, 2000.0)
    refuse("norm", 422, lambda: book.check_norm(0, 2001.0))
    free = make_book(1, max_norm_ratio=None)
    free.parameter_norms = [2.0]
    free.check_norm(0, 1e30)


def test_workers_that_are_long_gone_are_forgotten() -> None:
    book = make_book(1, expected=1, minimum=1)
    for number in range(300):
        book.register(f"w{number}", 0.0, sync_every=1)
        submit(book, f"w{number}")
        commit(book)
        book.deregister(book.workers[f"w{number}"])
    assert len(book.applied[0]) == len(book.passed[0]) < 70
    assert "w299" in book.applied[0]


def test_updates_out_of_proportion_are_refused() -> None:
    book = make_book(1, expected=1, minimum=1, max_norm_ratio=10.0)
    for norm in (1.0, 2.0, 3.0, 1e6, 2.0):
        book.check_norm(0, norm)  # not before five rounds have been seen
        submit(book, "a", norm=norm)
        commit(book)
    assert book.norm_limit(0) == 20.0
    book.check_norm(0, 20.0)
    refuse("norm", 422, lambda: book.check_norm(0, 20.1))
    for bad in (float("nan"), float("inf")):
        refuse("non_finite", 422, lambda bad=bad: book.check_norm(0, bad))
    fixed = make_book(1, max_update_norm=5.0, max_norm_ratio=None)
    refuse("norm", 422, lambda: fixed.check_norm(0, 5.1))


def test_fragments_have_rounds_of_their_own() -> None:
    book = make_book(2, expected=2, num_fragments=3)
    ids = [place.id for place in book.rounds]
    submit(book, "a", fragment=1), submit(book, "b", fragment=1)
    assert book.due(0.0) == [1]
    refuse("round_over", 410, lambda: book.check(book.workers["a"], ids[1], 0, "d"))
    commit(book, 1)
    assert [place.number for place in book.rounds] == [1, 2, 1]
    assert [book.rounds[k].id for k in (0, 2)] == [ids[0], ids[2]]


# -- asynchronous -------------------------------------------------------------------------------


def test_asynchronous_submissions_are_applied_one_by_one_in_their_order() -> None:
    book = make_book(3, mode="async")
    base = book.rounds[0].id
    submit(book, "c"), submit(book, "a")
    assert book.describe_round(base, 0, book.workers["a"])["state"] == "open"
    assert [s.worker for s in commit(book)] == ["c"]
    c, a = book.workers["c"], book.workers["a"]
    assert book.describe_round(base, 0, c)["state"] == "committed"
    assert book.describe_round(base, 0, a)["state"] == "open"  # its own is still waiting
    assert [s.worker for s in commit(book)] == ["a"]
    assert book.describe_round(base, 0, a) | {"next_round_id": 0} == {
        "state": "committed", "next_round_id": 0, "counted": True, "num_submitted": 0,
        "submitted": False, "expected": 3, "deadline_at": None,
    }  # fmt: skip
    assert book.check(c, base, 0, "d") == "committed" and book.due(0.0) == []


def test_an_asynchronous_submission_that_is_sent_again_counts_once() -> None:
    book = make_book(2, mode="async")
    base = book.rounds[0].id
    a, b = book.workers["a"], book.workers["b"]
    assert book.check(a, base, 0, "first") is None
    submit(book, "a", "first")
    assert book.check(a, base, 0, "first") == "accepted"
    refuse("duplicate", 409, lambda: book.check(a, base, 0, "another"))
    refuse("duplicate", 409, lambda: submit(book, "a", "first"))  # the same at the same time
    assert book.check(b, base, 0, "first") is None  # another worker's is another one
    submit(book, "b", "first", round_id=base)
    assert [s.worker for s in commit(book)] == ["a"]
    # Applied, while the other one still waits.
    assert book.check(a, base, 0, "first") == "committed"
    refuse("round_over", 410, lambda: book.check(a, base, 0, "another"))
    assert book.check(b, base, 0, "first") == "accepted"
    assert [s.worker for s in commit(book)] == ["b"]
    again = RoundBook(book.rules, 9.0, json.loads(json.dumps(book.known())))
    for name in "ab":
        worker = again.register(name, 9.0, sync_every=100)
        assert again.check(worker, base, 0, "first") == "committed"
    assert again.due(9.0) == []


def test_stale_asynchronous_submissions_are_refused() -> None:
    book = make_book(2, mode="async", max_staleness=2)
    base = book.rounds[0].id
    for number in range(2):
        submit(book, "a", f"d{number}")
        commit(book)
    assert book.check(book.workers["b"], base, 0, "d") is None
    submit(book, "a", "d2")
    commit(book)
    refuse("round_over", 410, lambda: book.check(book.workers["b"], base, 0, "d"))


def test_nothing_is_applied_twice_over_a_restart_in_either_mode() -> None:
    for mode in ("sync", "async"):
        book = make_book(2, expected=2, mode=mode)
        base = book.rounds[0].id
        submit(book, "a", "d1"), submit(book, "b", "d2")
        commit(book)
        if mode == "async":
            commit(book)
        known = json.loads(json.dumps(book.known()))
        again = RoundBook(book.rules, 0.0, known)
        assert again.known() == known and again.rounds[0].id == book.rounds[0].id
        worker: Worker = again.register("a", 0.0)
        assert again.check(worker, base, 0, "d1") == "committed"
        refuse("round_over", 410, lambda: again.check(worker, base, 0, "other"))  # noqa: B023


def test_a_round_that_was_not_committed_keeps_its_id_over_a_restart() -> None:
    book = make_book(2)
    submit(book, "a")
    again = RoundBook(book.rules, 0.0, book.known())
    assert again.rounds[0].id == book.rounds[0].id and not again.rounds[0].submissions


def test_the_book_needs_no_torch() -> None:
    assert_no_import("import headway.diloco.rounds")
