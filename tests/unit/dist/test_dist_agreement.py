"""What differs between ranks is told by name, value and rank."""

from __future__ import annotations

from headway.dist.agreement import find_differences, spell_ranks


def test_equal_facts_are_no_problem() -> None:
    assert find_differences([{"a": "1", "b": "2"}, {"b": "2", "a": "1"}]) == []


def test_each_fact_that_differs_is_told_with_who_has_what() -> None:
    said = [{"seed": "1", "x": "0"}, {"seed": "2", "x": "0"}, {"seed": "1"}]
    assert find_differences(said) == [
        "seed: differs between ranks: 1 on ranks 0, 2; 2 on rank 1; it must be the same on all",
        "x: differs between ranks: 0 on ranks 0, 1; not given on rank 2; it must be the same on "
        "all",
    ]


def test_a_configuration_is_opened_to_the_options_that_differ() -> None:
    first = '{"args": {"lr": 0.1, "seed": 1, "betas": [0.9, 0.95]}, "trainer": "ddp"}'
    second = '{"args": {"lr": 0.2, "seed": 1, "betas": [0.9, 0.99]}, "trainer": "ddp"}'
    told = find_differences([{"configuration": first}, {"configuration": second}])
    assert [problem.partition(":")[0] for problem in told] == ["args.lr", "args.betas"]
    assert "0.1 on rank 0; 0.2 on rank 1" in told[0]


def test_long_values_and_many_ranks_are_cut() -> None:
    (told,) = find_differences([{"text": "x" * 500}, {"text": "y" * 500}])
    assert len(told) < 300
    assert spell_ranks([4]) == "rank 4"
    assert spell_ranks(list(range(20))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
