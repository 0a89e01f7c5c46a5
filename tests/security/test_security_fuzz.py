"""The proofs of benchmarks/control_fuzz.py in a size that every test run can afford."""

from __future__ import annotations

import pytest

from headway.testing.proofs.control_fuzz import measure_flood, prove_control_fuzz
from headway.testing.proofs.control_requests import ALLOWED, FORBIDDEN, Facts, Maker


def test_fuzzed_requests_have_no_effect_that_nobody_may_have():
    outcome = prove_control_fuzz(800, seed=2, with_torch=False)
    outcome.require_success()
    assert outcome.counts["requests"] == 800
    assert outcome.counts["commands accepted"] > 10
    assert outcome.counts["answers 4xx"] > 400


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_flood_leaves_training_nearly_all_of_the_machine():
    """Not the time of steps, which others on the machine decide: what the server takes."""
    result = measure_flood(3, num_pairs=4, stretch_s=4.0, with_torch=False)
    assert result.server_share < 0.03, result
    assert result.growth_bytes < 10 << 20 and result.num_requests > 100


def test_requests_are_the_same_for_the_same_seed_and_of_all_kinds():
    routes = [("GET", "/jobs", "read"), ("POST", "/jobs/j/control", "control")]
    facts = Facts("127.0.0.1:1", "j", "r", routes, {"read": "r" * 64, "control": "c" * 64})
    made = [Maker(facts, 5).make(number) for number in range(1000)]
    assert made == [Maker(facts, 5).make(number) for number in range(1000)]
    assert made != [Maker(facts, 6).make(number) for number in range(1000)]
    assert 20 < sum(request.must_succeed for request in made) < 400
    assert all(ALLOWED.encode() in request.data for request in made if request.must_succeed)
    hostile = [r for r in made if FORBIDDEN.encode() in r.data and b"c" * 64 in r.data]
    assert len(hostile) > 50  # the right token, and still nothing may come of it
