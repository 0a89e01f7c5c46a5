"""Negative controls: every saved component matters.

Each job uses one component; leaving only that one out of the load must break the equality with
an uninterrupted run, and loading all must not. So the proof of equality would notice if one of
them were not saved, or not restored.
"""

from functools import partial

import pytest
from resume_jobs import (
    Damped,
    DampedByStep,
    Jittered,
    Job,
    find_differences,
    run_in_parts,
    run_uninterrupted,
)

from headway.config.rules_values import LOADABLE

STOP = 5
PLAIN = Job(dropout=0.0)
CONTROLS = [
    ("model", PLAIN, "step 5"),
    ("optimizer", PLAIN, "step 6"),
    ("optimizer", Job(dropout=0.0, optimizer="sgd"), "step 6"),
    ("scheduler", PLAIN, "step 5"),
    ("dataset", PLAIN, "step 5"),
    ("rng", Job(dropout=0.3), "step 5"),
    ("rng", Job(dropout=0.0, callbacks=(partial(Jittered, "python"),)), "step 5"),
    ("rng", Job(dropout=0.0, callbacks=(partial(Jittered, "numpy"),)), "step 5"),
    ("callbacks", Job(dropout=0.0, callbacks=(Damped,)), "step 5"),
    ("trainer", Job(dropout=0.0, callbacks=(DampedByStep,)), "step 5"),
]


@pytest.mark.parametrize(
    ("left_out", "job", "first"),
    CONTROLS,
    ids=[f"{number}-{case[0]}" for number, case in enumerate(CONTROLS)],
)
def test_leaving_one_component_out_breaks_the_equality(tmp_path, left_out, job, first):
    whole = run_uninterrupted(tmp_path / "whole", job)
    all_but_one = [name for name in LOADABLE if name != left_out]
    parts = run_in_parts(tmp_path / "all", job, [STOP])
    assert find_differences(whole, parts) == []
    parts = run_in_parts(tmp_path / "but-one", job, [STOP], load_components=all_but_one)
    assert first in find_differences(whole, parts)


def test_every_component_has_a_control():
    assert {name for name, _, _ in CONTROLS} == set(LOADABLE)


def test_without_the_counters_the_run_starts_counting_again(tmp_path):
    whole = run_uninterrupted(tmp_path / "whole", PLAIN)
    names = [name for name in LOADABLE if name != "trainer"]
    parts = run_in_parts(tmp_path / "parts", PLAIN, [STOP], load_components=names)
    assert len(parts.steps) == STOP + len(whole.steps)
