"""Logs of a run that is killed again and again: each step is there exactly once."""

from __future__ import annotations

import os

import pytest

from headway.testing.proofs.log_kills import prove_log_kills

NUM_KILLS = int(os.environ.get("HEADWAY_LOG_KILLS", "100"))


def test_a_few_kills_leave_each_step_exactly_once_in_the_json_logs() -> None:
    outcome = prove_log_kills(4, seed=3)
    outcome.require_success()
    assert outcome.counts["kills inside a write"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_kills_leave_each_step_exactly_once_in_the_json_logs() -> None:
    outcome = prove_log_kills(NUM_KILLS, seed=1)
    outcome.require_success()
    assert outcome.counts["kills"] >= NUM_KILLS
