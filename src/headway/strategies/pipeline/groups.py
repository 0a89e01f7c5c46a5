"""The process groups of pipelines side by side.

Owns: making them, in the same order on every rank. Does not own: which ranks belong together
(layout.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import distributed as dist

from headway.dist.limits import collective_limit
from headway.strategies.pipeline.layout import Layout


@dataclass
class Groups:
    """The groups that one rank is in."""

    pipeline: dist.ProcessGroup
    """The ranks of this pipeline."""
    pipeline_host: dist.ProcessGroup
    """The same, for messages of the host."""
    replicas: dist.ProcessGroup
    """The ranks that hold the same stages in other pipelines."""
    data: dist.ProcessGroup
    """The same, for messages of the host."""


def make_groups(layout: Layout, rank: int, host: dist.ProcessGroup, *, on_host: bool) -> Groups:
    """The groups of this rank; all ranks must call it."""

    def join(members: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup:
        group = join_group(members, rank, backend)
        assert group is not None, "every rank is in one of them"
        return group

    pipelines = [layout.pipeline_ranks(replica) for replica in range(layout.num_replicas)]
    pipeline, pipeline_host = dist.group.WORLD, host
    assert pipeline is not None, "the trainer has checked that there is a group"
    if layout.num_replicas > 1:
        pipeline = join(pipelines)
        pipeline_host = pipeline if on_host else join(pipelines, "gloo")
    stages = [layout.replica_ranks(place) for place in range(layout.num_ranks)]
    data = join(stages, "gloo")
    replicas = data if on_host or layout.num_replicas == 1 else join(stages)
    return Groups(pipeline, pipeline_host, replicas, data)


def join_group(
    members: Sequence[Sequence[int]], rank: int, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Make a group of each list of ranks, on all ranks; returns the one that `rank` is in."""
    own: dist.ProcessGroup | None = None
    for ranks in members:
        made = dist.new_group(list(ranks), backend=backend, timeout=collective_limit())
        if rank in ranks:
            assert isinstance(made, dist.ProcessGroup)
            own = made
    return own
