"""Resumed runs equal uninterrupted ones to the last bit, over the ways of training.

Losses, gradient norms, learning rates and sample ids of every step; parameters, optimizer state,
generators and counters at the end.
"""

from itertools import product

import pytest
from resume_jobs import (
    MAX_STEPS,
    Damped,
    Job,
    find_differences,
    run,
    run_in_parts,
    run_uninterrupted,
)

JOBS = [
    Job(accumulation=a, autocast=b, optimizer=o)
    for a, b, o in product((1, 3), (False, True), ("adamw", "sgd"))
]
JOBS += [
    Job(workers=2, accumulation=2),
    Job(workers=2, autocast=True, optimizer="sgd"),
    Job(dropout=0.0, callbacks=(Damped,)),
    Job(dropout=0.5, schedule="linear", accumulation=2, callbacks=(Damped,)),
]


def describe(job):
    precision = "bf16" if job.autocast else "fp32"
    extra = "-callback" if job.callbacks else ""
    return f"{job.optimizer}-{precision}-acc{job.accumulation}-workers{job.workers}{extra}"


@pytest.mark.parametrize("job", JOBS, ids=describe)
def test_resumed_equals_uninterrupted(tmp_path, job):
    whole = run_uninterrupted(tmp_path / "whole", job)
    assert len(whole.steps) == MAX_STEPS
    edge = job.steps_per_epoch
    five = [1, 3, 6, 7, 10] if job.workers == 0 else [1, 5]
    for number, stops in enumerate(([edge], [edge - 1], five)):
        parts = run_in_parts(tmp_path / f"parts-{number}", job, stops)
        assert find_differences(whole, parts) == [], f"stopped at {stops}"


def test_other_numbers_of_workers_change_nothing(tmp_path):
    whole = run_uninterrupted(tmp_path / "whole", Job())
    run(tmp_path / "parts", Job(workers=2), 5)
    run(tmp_path / "parts", Job(workers=0), 7)
    rest = run(tmp_path / "parts", Job(workers=1))
    assert rest.steps == whole.steps[7:]
    rest.steps = whole.steps
    assert find_differences(whole, rest) == []


def test_the_comparison_sees_one_bit(tmp_path):
    first = run(tmp_path / "a", Job(), 2)
    second = run(tmp_path / "b", Job(), 2)
    assert find_differences(first, second) == []
    name = next(name for name in second.tensors if name.startswith("optimizer"))
    value = second.tensors[name].view(-1)
    value[0] = value[0].nextafter(value[0] + 1)
    assert find_differences(first, second) == [name]


def test_another_dropout_mask_is_seen(tmp_path):
    first = run(tmp_path / "a", Job(), 2)
    second = run(tmp_path / "b", Job(dropout=0.3), 2)
    assert "step 0" in find_differences(first, second)
