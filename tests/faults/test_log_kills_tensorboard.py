"""The curves of a run that is killed again and again: TensorBoard shows each step exactly once."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("tensorboard")

from headway.testing.proofs.log_kills import prove_log_kills
from headway.testing.proofs.tensorboard_kills import TENSORBOARD_SINK

NUM_KILLS = int(os.environ.get("HEADWAY_LOG_KILLS", "100"))


def test_a_few_kills_leave_each_step_exactly_once_in_tensorboard() -> None:
    prove_log_kills(3, seed=5, sinks=[TENSORBOARD_SINK]).require_success()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_kills_leave_each_step_exactly_once_in_tensorboard() -> None:
    outcome = prove_log_kills(NUM_KILLS, seed=2, sinks=[TENSORBOARD_SINK])
    outcome.require_success()
    assert outcome.counts["kills"] >= NUM_KILLS
