"""Whom a rank takes for lost, and after how long; with a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from headway.dist import watch
from headway.dist.processes import identify
from headway.dist.watch import Watch

FROZEN_AFTER_S = 20.0


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Turns:
    """In place of the event that ends a thread: lets it take some turns, a second apart."""

    def __init__(self, clock: Clock, num_turns: int) -> None:
        self._clock, self._num_turns = clock, num_turns

    def wait(self, limit_s: float) -> bool:
        self._clock.now += 1
        self._num_turns -= 1
        return self._num_turns < 0

    def is_set(self) -> bool:
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(watch, "say", lambda *words: None)
    monkeypatch.setattr(watch, "end_process", lambda *words, **options: None)
    return clock


def keep_watch(places: list[str], **options: Any) -> Watch:
    """The watch of rank 0; a place is a machine, '' this one."""
    own = identify()
    members = [replace(own, place=place or own.place) for place in places]
    store = HashStore()
    for rank in range(len(places)):
        store.set(f"beat/{rank}", "0")
    given = {"keeper": "the launcher", "keeper_rank": None, **options}
    return Watch(store, 0, members, frozen_after_s=FROZEN_AFTER_S, waiting_after_s=0.0, **given)


@pytest.mark.parametrize("places", [["", "b"], ["", "b", "b"]], ids=["alone", "in company"])
def test_a_rank_elsewhere_is_lost_only_after_the_long_limit(
    places: list[str], clock: Clock
) -> None:
    watching = keep_watch(places)
    silent_s = 0
    while watching.failure is None:
        watching._look()
        clock.now += 1
        silent_s += 1
        assert silent_s < 100
    assert silent_s > 3 * FROZEN_AFTER_S, "its machine may just be moved elsewhere"
    assert watching.failure.rank == 1


@pytest.mark.parametrize(("silent_s", "lost"), [(60, False), (63, True)])
def test_a_store_that_does_not_answer_is_given_as_long_as_a_rank(
    silent_s: int, lost: bool, clock: Clock
) -> None:
    watching = keep_watch(["", ""])
    watching._over = Turns(clock, silent_s)  # type: ignore[assignment]
    watching._limit()
    assert (watching.failure is not None) is lost
