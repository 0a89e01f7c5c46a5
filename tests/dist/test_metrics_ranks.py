"""Metrics that only some ranks record: all ranks refuse them in the same words."""

from __future__ import annotations

from torch import Tensor
from torch import distributed as dist

from headway.dist.agreement import CommonMistake
from headway.engine.metrics import MetricBuffer
from headway.testing import run_ranks


def reduce(value: Tensor, operation: str) -> Tensor:
    kinds = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}
    dist.all_reduce(value, kinds[operation])
    return value


def record_apart() -> list[str]:
    rank = dist.get_rank()
    buffer = MetricBuffer(reduce)
    for step in (1, 2, 3):
        buffer.record(step, "ours", 1.0, "sum")
        if rank == 0 and step > 1:
            buffer.record(step, "first only", 1.0, "sum")
    buffer.record(3, "peak", 1.0, "max" if rank == 0 else "sum")
    try:
        buffer.flush()
    except CommonMistake as error:
        return error.problems
    return []


def test_metrics_of_some_ranks_are_named_alike_on_all() -> None:
    first, second = run_ranks(record_apart, 2, timeout_s=120)
    assert first == second
    assert [problem.partition(";")[0] for problem in first] == [
        "metric 'peak' (max) was recorded at step 3 on rank 0 and not on rank 1",
        "metric 'first only' (sum) was recorded at step 2 on rank 0 and not on rank 1",
        "metric 'peak' (sum) was recorded at step 3 on rank 1 and not on rank 0",
    ]
