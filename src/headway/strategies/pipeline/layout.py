"""Which stages are on which rank, and whether all of it fits together.

Owns: `Layout`, what follows from a schedule, what contradicts it.
Does not own: the facts about schedules and the rules on arguments alone (config/).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.config.pipe_schedules import ScheduleFacts
from headway.config.rules_pairs import misfit, misrecomputed, set_by_hand, uncompilable
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.args import PipelineTrainingArguments

_STAGES_PER_RANK = 2
"""On a rank of a schedule for several, where nobody says how many."""


@dataclass(frozen=True)
class Layout:
    """Stages over the ranks of one pipeline, and pipelines over all ranks.

    Ranks of one pipeline lie apart by `num_replicas`: the replicas of a stage, which exchange
    whole gradients, are neighbours, while its pipeline only passes activations on.
    """

    num_ranks: int
    """Of one pipeline."""
    stages_per_rank: int = 1
    is_v: bool = False
    num_replicas: int = 1

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """The place in its pipeline of the rank that holds a stage."""
        if self.is_v and stage >= self.num_ranks:
            return self.num_stages - 1 - stage
        return stage % self.num_ranks

    def stages_of(self, place: int) -> list[int]:
        """The stages of a rank, by its place in its pipeline."""
        return [stage for stage in range(self.num_stages) if self.rank_of(stage) == place]

    def place_of(self, rank: int) -> int:
        """The place in its pipeline of a rank among all."""
        return rank // self.num_replicas

    def replica_of(self, rank: int) -> int:
        """Which pipeline a rank among all belongs to."""
        return rank % self.num_replicas

    def pipeline_ranks(self, replica: int) -> list[int]:
        """The ranks among all of one pipeline, in its order."""
        return [place * self.num_replicas + replica for place in range(self.num_ranks)]

    def replica_ranks(self, place: int) -> list[int]:
        """The ranks among all that hold the same stages."""
        return [place * self.num_replicas + replica for replica in range(self.num_replicas)]

    def describe(self) -> str:
        """Rank by rank: its stages."""
        places = (
            f"rank {place}: {', '.join(map(str, self.stages_of(place)))}"
            for place in range(self.num_ranks)
        )
        return f"{'v' if self.is_v else 'loop'}, stages of {'; '.join(places)}"


def resolve_layout(
    args: PipelineTrainingArguments, facts: ScheduleFacts, world_size: int
) -> Layout:
    """The layout that a schedule needs on so many ranks; raises with all that does not fit."""
    if world_size < 2:
        raise ConfigError(
            "PipelineTrainer needs at least two ranks (WORLD_SIZE is 1); start it with "
            "headway train --nproc 2, or use Trainer"
        )
    problems = [misfit(facts, args), uncompilable(facts, bool(args.torch_compile))]
    problems.append(misrecomputed(facts, args))
    size = args.pipeline_size or world_size
    if world_size % size:
        problems.append(
            f"pipeline_size={size}: the number of ranks must be a multiple of it, and is "
            f"{world_size}"
        )
    stages = args.stages_per_rank
    if not set_by_hand(args):
        stages = _STAGES_PER_RANK if facts.is_multistage else 1
    elif stages > 1 and not facts.is_multistage:
        problems.append(
            f"stages_per_rank={stages}: pipe_schedule {facts.name} runs one stage on a rank; use "
            "LoopedBFS, Interleaved1F1B or InterleavedZeroBubble for more"
        )
    if facts.is_v and stages != 2:
        problems.append(
            f"stages_per_rank={stages}: pipe_schedule {facts.name} needs exactly 2 stages on a rank"
        )
    layout = Layout(size, stages, facts.is_v, max(1, world_size // size))
    problems += [_count_problem(facts, layout, args.n_microbatches)]
    found = [problem for problem in problems if problem is not None]
    if found:
        raise ConfigError(found)
    return layout


def _count_problem(facts: ScheduleFacts, layout: Layout, num_pieces: int) -> str | None:
    """How the number of micro-batches contradicts the schedule."""
    if facts.needs_full and num_pieces < layout.num_stages:
        return (
            f"n_microbatches={num_pieces}: pipe_schedule {facts.name} needs at least as many as "
            f"there are stages, {layout.num_stages}"
        )
    rounds = max(1, num_pieces // layout.num_ranks)
    if facts.has_rounds and num_pieces % rounds:
        return (
            f"n_microbatches={num_pieces}: pipe_schedule {facts.name} on {layout.num_ranks} ranks "
            f"goes in {rounds} equal rounds, so a multiple of {rounds} is needed"
        )
    return None
