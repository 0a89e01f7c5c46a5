"""What ranks tell each other when they meet decides, in the same words on all, whether they fit."""

from __future__ import annotations

from typing import Any

import pytest

from headway.dist.agreement import CommonMistake
from headway.dist.group import _check_greetings


def greeting(**changes: Any) -> dict[str, Any]:
    plain = {"process": {"host": "a"}, "problems": [], "card": "", "compared": {"torch": "2.13"}}
    return {**plain, **changes}


def refused(*said: dict[str, Any]) -> list[str]:
    with pytest.raises(CommonMistake) as caught:
        _check_greetings(list(said))
    return caught.value.problems


def test_equal_ranks_without_problems_go_on() -> None:
    _check_greetings([greeting(), greeting()])
    _check_greetings([greeting(card="1"), greeting(card="2")])
    other_host = {"host": "b"}
    _check_greetings([greeting(card="1"), greeting(card="1", process=other_host)])


def test_fewer_gpus_than_ranks_are_refused_by_the_option() -> None:
    (problem,) = refused(greeting(card="1"), greeting(card="2"), greeting(card="1"))
    assert problem.startswith("--nproc: fewer GPUs than ranks: ranks 0, 2 would share one card")
    assert "start at most 2" in problem and "args.use_cpu" in problem


def test_problems_are_told_once_with_the_ranks_that_have_them() -> None:
    told = refused(greeting(problems=["a: bad"]), greeting(problems=["a: bad", "b: worse"]))
    assert told == ["a: bad", "b: worse (rank 1)"]


def test_other_versions_are_told_by_rank() -> None:
    (problem,) = refused(greeting(), greeting(compared={"torch": "2.11"}))
    assert problem.startswith("torch: differs between ranks: 2.13 on rank 0; 2.11 on rank 1")
