"""What a trainer hands back: results of training and prediction, and the summary of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, distributed

from headway.data.counting import IGNORED_LABEL
from headway.dist.group import host_group
from headway.engine.state import TrainerState
from headway.errors import ConfigError
from headway.strategies.base import DataShard

Array = np.ndarray[Any, np.dtype[Any]]


class TrainOutput(NamedTuple):
    """What `train()` returns; the first three as Hugging Face's."""

    global_step: int
    training_loss: float
    metrics: dict[str, Any]
    interrupted_by: str | None = None
    """Name of the signal, or "stop_at", that ended the run before its length was done."""


class PredictionOutput(NamedTuple):
    """Predictions (logits), labels and metrics of a pass; arrays joined along the batch.

    Rows that are shorter than others end with -100.
    """

    predictions: Array | None
    label_ids: Array | None
    metrics: dict[str, float]


@dataclass(frozen=True)
class RunStart:
    """Where a run stood when this process took it up."""

    at_s: float
    step: int
    tokens: int
    flos: float

    @classmethod
    def now(cls, state: TrainerState) -> RunStart:
        return cls(
            time.monotonic(),
            state.global_step,
            state.num_input_tokens_seen,
            state.total_flos,
        )

    def summary(
        self, state: TrainerState, *, loss: float, num_samples: int, batch_size: int
    ) -> dict[str, Any]:
        """Steps, tokens and operations of the run; the rest is of what this process did of it."""
        seconds = max(time.monotonic() - self.at_s, 1e-9)
        steps = state.global_step - self.step
        return {
            "train_runtime": seconds,
            "train_loss": loss,
            "step": state.global_step,
            "epoch": state.epoch,
            "train_samples": num_samples,
            "train_samples_per_second": num_samples / seconds,
            "train_steps_per_second": steps / seconds,
            "effective_batch_size": batch_size,
            "total_tokens": state.num_input_tokens_seen,
            "tokens_per_second": (state.num_input_tokens_seen - self.tokens) / seconds,
            "total_flops": state.total_flos,
            "flops_per_second": (state.total_flos - self.flos) / seconds,
        }


def join_batches(tensors: list[Tensor]) -> Array | None:
    """One array; batches smaller than others are filled up with -100, as transformers does it."""
    if not tensors:
        return None
    arrays: list[Array] = [np.atleast_1d(t.numpy()) for t in tensors]
    shapes = {a.shape[1:] for a in arrays}
    if len({len(shape) for shape in shapes}) > 1:
        raise ConfigError(
            "outputs of evaluation batches cannot be joined: their samples are of the shapes "
            f"{sorted(shapes)}"
        )
    if len(shapes) == 1:
        return np.concatenate(arrays)
    joined = np.full(
        (sum(map(len, arrays)), *np.max(list(shapes), axis=0)), IGNORED_LABEL, arrays[0].dtype
    )
    row = 0
    for array in arrays:
        joined[(slice(row, row + len(array)), *map(slice, array.shape[1:]))] = array
        row += len(array)
    return joined


def gather_batches(
    shard: DataShard, *lists: list[Tensor], everywhere: bool = True
) -> list[list[Tensor]]:
    """Each list with the batches of all ranks, in the order in which the data was dealt.

    Not `everywhere`: on rank 0; the others have nothing left.
    """
    if shard.world_size == 1:
        return list(lists)
    told: list[Any] = [None] * distributed.get_world_size()
    if everywhere:
        distributed.all_gather_object(told, (shard.rank, lists), group=host_group())
    elif distributed.get_rank() == 0:
        distributed.gather_object((shard.rank, lists), told, group=host_group())
    else:
        distributed.gather_object((shard.rank, lists), group=host_group())
        return [[] for _ in lists]
    by_share = dict(reversed(told))  # of equals the first rank's
    shares = [by_share[rank] for rank in range(shard.world_size)]
    return [
        [
            batch
            for row in zip_longest(*(share[n] for share in shares))
            for batch in row
            if batch is not None
        ]
        for n in range(len(lists))
    ]
