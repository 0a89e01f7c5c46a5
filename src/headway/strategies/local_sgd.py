"""Post-local SGD: after a while ranks step on their own and average their weights now and then.

Owns: which steps are local, the averaging, and what a checkpoint needs so that every rank goes on
with its own moments. Does not own: gradients and the step itself (ddp).

Moments differ between ranks as long as steps are local. A checkpoint holds the run's optimizer
like any other, which is what another number of ranks goes on from, and beside it the state of
each rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from headway.args import PostLocalSGDArguments
from headway.checkpoint.component import SharingPattern, StateComponent

logger = logging.getLogger(__name__)

_BUCKET_BYTES = 25 * 2**20


class LocalSGD:
    """Counts the steps of a run and averages its weights where that is due."""

    def __init__(self, args: PostLocalSGDArguments, world_size: int) -> None:
        self._args, self._world_size = args, world_size
        self._num_steps = 0
        self._names: dict[Tensor, str] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._restored: Mapping[str, Mapping[str, Any]] | None = None
        self._apart = False

    def attach(self, model: nn.Module) -> None:
        """Say whose weights are averaged."""
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}

    @property
    def is_local(self) -> bool:
        """Whether the step under way leaves gradients as they are on each rank."""
        started = self._num_steps >= self._args.start_step
        return started and not self._args.post_local_gradient_allreduce

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer the state of this rank, if a checkpoint brought one."""
        self._optimizer = optimizer
        if self._restored is None:
            return
        restored, self._restored = self._restored, None
        for parameter, name in self._names.items():
            live = optimizer.state.get(parameter, {})
            for key, value in restored.get(name, {}).items():
                if isinstance(live.get(key), Tensor):
                    live[key].copy_(value)
                elif key in live:
                    live[key] = value

    def after_step(self) -> None:
        """Count the step, and average if it is time to."""
        self._apart = self._apart or self.is_local
        self._num_steps += 1
        local_steps = self._num_steps - self._args.start_step
        if local_steps > 0 and local_steps % self._args.period == 0:
            average(self._names, self._world_size)
            self._apart = False

    def join(self) -> None:
        """Make the ranks' weights equal now; they are what is saved and evaluated."""
        if self._apart:
            average(self._names, self._world_size)
            self._apart = False

    def components(self) -> list[StateComponent]:
        return [
            StateComponent(
                "local_sgd",
                self,
                SharingPattern.PER_RANK,
                required=False,
                metadata={"on_missing_rank": "fresh"},
            )
        ]

    def state_dict(self) -> dict[str, Any]:
        """The count of steps, and this rank's moments once they may differ from others'."""
        state: dict[str, Any] = {"num_steps": self._num_steps, "world_size": self._world_size}
        if self._num_steps > self._args.start_step and self._optimizer is not None:
            state["optimizer"] = {
                name: dict(self._optimizer.state[parameter])
                for parameter, name in self._names.items()
                if parameter in self._optimizer.state
            }
        elif self._restored is not None:
            state["optimizer"] = self._restored
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._num_steps, self._apart = int(state_dict["num_steps"]), False
        self._restored = state_dict.get("optimizer")
        if self._restored is not None and state_dict["world_size"] != self._world_size:
            self._restored = None
            logger.warning(
                "post_local_sgd: saved by %d ranks with moments of their own; %d ranks go on from "
                "those of the shared optimizer state",
                state_dict["world_size"],
                self._world_size,
            )


@torch.no_grad()
def average(tensors: Iterable[Tensor], world_size: int) -> None:
    """Put the mean over all ranks in place of each tensor."""
    for bucket in _bucket(tensors):
        # In float32 at least: a sum in bfloat16 would lose what the ranks differ in.
        wide = torch.promote_types(bucket[0].dtype, torch.float32)
        flat = torch.cat([tensor.reshape(-1).to(wide) for tensor in bucket])
        dist.all_reduce(flat)
        flat /= world_size
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket])):
            tensor.copy_(part.view_as(tensor))


def _bucket(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type that travel together."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        width = tensor.numel() * tensor.element_size()
        if bucket and (tensor.dtype != bucket[0].dtype or size + width > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += width
    if bucket:
        yield bucket
