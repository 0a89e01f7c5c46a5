"""Ranks that fail, in a size that every test run can afford; benchmarks/faults.py has the rest."""

from __future__ import annotations

import pytest

from headway.testing.proofs.launcher_faults import prove_launcher_faults
from headway.testing.proofs.rank_faults import choose_trial, prove_rank_faults
from headway.testing.proofs.rank_kills import prove_rank_kills

pytestmark = pytest.mark.timeout(600)


# The seed is one whose trials are of all kinds, and the first number one that waits for no rank as
# long as a frozen one is waited for in real life.
def test_a_fault_of_one_rank_ends_all_in_time_names_it_and_loses_nothing():
    outcome = prove_rank_faults(20, seed=189, first=8)
    outcome.require_success()
    counts = outcome.counts
    assert counts["trials"] == 20
    assert min(counts[name] for name in ("kill", "raise", "stop", "uneven data")) >= 2
    assert min(counts[f"under {kind}"] for kind in ("ddp", "fsdp2", "pipeline")) >= 2
    assert counts["ended as undisturbed at the next start"] == 20 - counts["uneven data"]
    assert counts["of these, from a checkpoint"] > 5


def test_the_trials_of_every_run_are_of_all_kinds():
    places = {choose_trial(189, number).plan.place for number in range(8, 28)}
    assert {"storage", "moment", "dataset", "forward", "on_save"} <= places


def test_trials_come_again_with_their_seed():
    assert [choose_trial(5, n) for n in range(30)] == [choose_trial(5, n) for n in range(30)]
    places = {choose_trial(5, n).plan.place for n in range(200)}
    assert len(places) > 12


def test_ranks_killed_inside_saves_go_on_and_end_as_if_undisturbed():
    outcome = prove_rank_kills(4, seed=1, max_steps=9, most_kills=3)
    outcome.require_success()
    assert outcome.counts["kills inside a save"] >= 1


@pytest.mark.slow
def test_a_rank_does_not_survive_launcher_and_torchrun_and_the_next_start_goes_on():
    prove_launcher_faults(1, seed=1, faults=("alone",), trainer="ddp").require_success()
