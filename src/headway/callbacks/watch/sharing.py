"""What observers say to the observers on other ranks, so that all of them stop or none does.

Owns: work that may fail on one rank and must then fail on all, numbers joined over ranks. Does not
own: collectives of training (strategies/), which rank holds what of a model (shards.py).

A handler that raises is switched off, on its rank alone. So an observer with collectives has to
fail on all ranks together: a rank that went on would wait for the others for ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from headway.dist.agreement import CommonMistake, exchange
from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class SharedFailure(RuntimeError):
    """Something failed on some rank; every rank has these same words for it."""

    told_by_all_ranks = True


def num_ranks() -> int:
    """How many processes there are to talk to, this one included."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def on_all_ranks(compute: Callable[[], T]) -> list[T]:
    """What `compute` gives on every rank (anything JSON has), in rank order; all must call it.

    Where it fails on any rank, all of them raise the same error: a `ConfigError` if every failure
    is one, else `SharedFailure`.
    """
    if num_ranks() == 1:
        return [compute()]
    value: T | None = None
    error: Exception | None = None
    try:
        value = compute()
        json.dumps(value)  # what cannot be told is this rank's failure, not a message that is late
    except Exception as raised:
        value, error = None, raised
    said = exchange([_describe(error), value])
    _raise_first([told for told, _ in said], error)
    return [value for _, value in said]


def attempt(compute: Callable[[], T]) -> Callable[[], T]:
    """Run something now; what it gave or raised comes when the result is called.

    For work that has to be done before the point where ranks can tell each other of a failure.
    """
    try:
        value = compute()
    except Exception as raised:
        error = raised

        def fail() -> T:
            raise error

        return fail
    return lambda: value


def join_numbers(
    compute: Callable[[], tuple[Tensor, Tensor]],
    num_sums: int,
    num_maxima: int = 0,
    *,
    alone: bool = False,
) -> tuple[list[float], list[float]]:
    """Sums and maxima over all ranks of the two vectors that `compute` gives; all must call it.

    One transfer from the device, then at most two small collectives of the host; none if `alone`.
    NaN among the maxima counts as infinite: what a maximum with a NaN is depends on its order.
    """
    import torch

    if alone or num_ranks() == 1:
        numbers = _in_one(*compute()).tolist()
        return numbers[:num_sums], numbers[num_sums:]
    from torch import distributed

    from headway.dist.group import host_group

    joined = torch.zeros(1 + num_sums + num_maxima, dtype=torch.float64)
    error: Exception | None = None
    try:
        joined[1:] = _in_one(*compute()).cpu()
    except Exception as raised:
        error, joined[0] = raised, 1.0
    sums, maxima = joined[: 1 + num_sums], joined[1 + num_sums :]
    distributed.all_reduce(sums, group=host_group())
    if float(sums[0]) > 0:
        _raise_first(exchange(_describe(error)), error)
    if num_maxima:
        distributed.all_reduce(maxima, distributed.ReduceOp.MAX, group=host_group())
    return sums[1:].tolist(), maxima.tolist()


def _in_one(sums: Tensor, maxima: Tensor) -> Tensor:
    import torch

    wide = torch.float32 if sums.device.type == "mps" else torch.float64
    maxima = torch.nan_to_num(maxima.to(sums.device, wide), nan=torch.inf, posinf=torch.inf)
    return torch.cat([sums.to(wide), maxima])


def add_up(values: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over a group of training, where the values are; all its ranks must call it."""
    from torch import distributed

    # What training keeps on the host may still belong to a group of devices only.
    if values.device.type == "cpu" and distributed.get_backend(group) == "nccl":
        moved = values.cuda()
        distributed.all_reduce(moved, group=group)
        return moved.to(values.device)
    distributed.all_reduce(values, group=group)
    return values


def _describe(error: Exception | None) -> Any:
    if error is None:
        return None
    problems = list(error.problems) if isinstance(error, ConfigError) else None
    return {"text": f"{type(error).__name__}: {error}", "problems": problems}


def _raise_first(told: Sequence[Any], own: Exception | None) -> None:
    """Raise what the ranks told of, in the same words on each of them."""
    failed = [(rank, what) for rank, what in enumerate(told) if what is not None]
    if not failed:
        return
    if all(what["problems"] for _, what in failed):
        raise CommonMistake(failed[0][1]["problems"]) from own
    rank, what = failed[0]
    raise SharedFailure(f"rank {rank}: {what['text']}") from own
