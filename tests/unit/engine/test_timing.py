"""What the loop measures: waiting for data, and what callbacks set aside."""

from __future__ import annotations

import pytest

from headway.engine import timing
from headway.engine.timing import LoopTiming


@pytest.fixture
def passed(monkeypatch):
    """A clock that moves when it is told to."""
    now = [1000.0]
    monkeypatch.setattr(timing, "clock", lambda: now[0])

    def let_pass(seconds):
        now[0] += seconds

    return let_pass


def test_each_fetch_is_timed_and_the_source_is_closed(passed):
    closed = []

    def windows():
        try:
            for name in "abc":
                passed(2.0)
                yield name
        finally:
            closed.append(True)

    loop, source = LoopTiming(), windows()
    fetched = loop.time_fetches(source)
    assert [next(fetched), next(fetched)] == ["a", "b"]
    passed(100.0)
    fetched.close()
    assert (loop.fetch_s, loop.fetches_s) == (2.0, 4.0)
    assert closed == [True]
    assert list(loop.time_fetches(windows())) == ["a", "b", "c"]
    assert list(loop.time_fetches([1, 2])) == [1, 2]


def test_what_is_set_aside_counts_once_and_also_when_it_fails(passed):
    loop = LoopTiming()
    with loop.aside():
        passed(1.0)
        assert loop.aside_s == 1.0
        with loop.aside():
            passed(2.0)
    passed(50.0)
    with pytest.raises(OSError), loop.aside():
        passed(4.0)
        raise OSError
    passed(50.0)
    assert loop.aside_s == 7.0
