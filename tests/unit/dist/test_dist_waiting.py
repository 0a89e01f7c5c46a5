"""Which ranks keep the others waiting, by where each of them stands."""

from __future__ import annotations

import gc
import os
import sys
import threading

import pytest

from headway.dist.env import waiting_limit_s
from headway.dist.waiting import MainThread, Standing, awaiting, decode, find_late
from headway.errors import ConfigError

OUTSIDE = 0.0


@pytest.mark.parametrize(
    ("standings", "late"),
    [
        ([(7, 61.0), (6, OUTSIDE), (7, 60.5)], [1]),
        ([(7, 61.0), (6, 70.0), (6, OUTSIDE)], [1, 2]),  # their own code may be inside torch
        ([(6, OUTSIDE), (6, 61.0), (6, 59.0)], [0]),
        ([(6, OUTSIDE), (6, 12.0)], []),  # a long evaluation, of which all do their part
        ([(6, 61.0), (6, 61.0)], []),  # a long computation
        ([(6, OUTSIDE), (6, OUTSIDE)], []),  # all are busy with the same
    ],
)
def test_fewer_agreements_or_alone_outside_torch(
    standings: list[tuple[int, float]], late: list[int]
) -> None:
    assert find_late([Standing(*one, "somewhere") for one in standings], 60) == late


def look_at_main() -> list[Standing]:
    found: list[Standing] = []

    def look() -> None:
        main = MainThread()
        main.look()
        found.append(main.stand(3, settled_s=0))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()  # the main thread is in Python's own code
    return found


def test_a_rank_stands_at_a_line_of_its_own_code() -> None:
    (standing,) = look_at_main()
    assert standing.waited_s == 0 and standing.num_agreements == 3
    assert "test_dist_waiting.py" in standing.place and standing.place.endswith("in look_at_main")
    assert decode(standing.encode()) == standing


def test_a_rank_that_waits_for_something_else_says_for_what() -> None:
    with awaiting("a server"):
        with awaiting("its answer"):
            (inner,) = look_at_main()
        (outer,) = look_at_main()
    (after,) = look_at_main()
    assert inner.place.endswith("in look_at_main, where it waits for its answer")
    assert outer.place.endswith("in look_at_main, where it waits for a server")
    assert after.place.endswith("in look_at_main")


@pytest.mark.timeout(20)
def test_a_thread_that_moves_is_told_from_one_that_does_not() -> None:
    main, stands, moves = MainThread(), threading.Event(), threading.Event()

    def look() -> None:
        num_alike = 0
        while num_alike < 50:
            before = main._since
            main.look()
            num_alike = num_alike + 1 if main._since == before else 0
        stands.set()
        before = main._since
        while main._since == before:
            main.look()
        moves.set()

    threading.Thread(target=look, daemon=True).start()
    # One line, as in a loop over layers, where lines alone would not tell.
    assert stands.wait() and moves.wait()


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="collections begin between instructions, and do no harm"
)
def test_nothing_is_collected_while_frames_are_looked_at() -> None:
    """Python 3.11 may let the thread run on meanwhile, and then reads a frame that is gone."""
    has_frame: list[bool] = []

    def note(phase: str, info: dict[str, int]) -> None:
        has_frame.append(sys._getframe(1).f_locals.get("frame") is not None)

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(2)
    try:
        for _ in range(20):
            look_at_main()
        assert gc.get_threshold()[0] == 2
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
    assert has_frame, "elsewhere there are collections"
    assert not any(has_frame)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.timeout(60)
def test_children_collect_as_their_parents_do() -> None:
    over = threading.Event()

    def look() -> None:
        main = MainThread()
        while not over.is_set():
            main.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        codes = []
        for _ in range(30):
            child = os.fork()
            if not child:
                os._exit(0 if gc.get_threshold()[0] else 1)
            codes.append(os.waitpid(child, 0)[1])
    finally:
        over.set()
        thread.join()
    assert codes == [0] * 30


def test_the_limit_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waiting_limit_s() == 60
    monkeypatch.setenv("HEADWAY_WAITING_AFTER_S", "0")
    assert waiting_limit_s() == 0
    monkeypatch.setenv("HEADWAY_WAITING_AFTER_S", "soon")
    with pytest.raises(ConfigError, match="HEADWAY_WAITING_AFTER_S: 'soon'"):
        waiting_limit_s()
