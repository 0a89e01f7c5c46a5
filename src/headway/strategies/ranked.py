"""What all strategies of several ranks have in common.

Owns: talking over the process groups of training (sums, decisions), feeding data to ranks, buffers
that are made equal where ranks meet, and the step that all ranks take or all withhold. Does not
own: how a model is spread (the strategies).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from headway.checkpoint.component import StateComponent
from headway.data.feeding import Feeder
from headway.data.loader import Window, WindowLoader
from headway.dist.agreement import agree_bits
from headway.dist.group import DistributedContext, host_group
from headway.strategies.base import DataShard, EvalStep, Strategy
from headway.strategies.movement import move_batch
from headway.strategies.objective import Objective
from headway.strategies.stepping import take_step

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "l2_norm": dist.ReduceOp.SUM,
}


class RankedStrategy(Strategy):
    """One rank of several; the model is spread by the class that derives from this one.

    `dispatch` says whether rank 0 reads the data for all (training, evaluation).
    """

    def __init__(
        self,
        context: DistributedContext,
        device: torch.device,
        *,
        dispatch: bool = True,
        dispatch_eval: bool | None = None,
    ) -> None:
        self.context, self.device = context, device
        self._host = host_group()
        self._dispatch = {
            True: dispatch,
            False: dispatch if dispatch_eval is None else dispatch_eval,
        }
        self._moves = self._reading_waits = device.type != "cpu"

    # -- data -------------------------------------------------------------------------------

    def data_shard(self) -> DataShard:
        return DataShard(self.context.rank, self.context.world_size)

    def data_group(self) -> dist.ProcessGroup:
        """The gloo group of the ranks that read different data."""
        return self._host

    def feed(self, loader: WindowLoader, *, training: bool = True) -> Iterator[Window]:
        feeder = Feeder(loader, self.data_group(), dispatch=self._dispatch[training])
        return feeder.windows() if training else feeder.batches()

    def _move(self, batch: Any) -> Any:
        return move_batch(batch, self.device) if self._moves else batch

    # -- all ranks --------------------------------------------------------------------------

    def agree(self, value: int) -> int:
        return agree_bits(value, self._host)

    def barrier(self) -> None:
        dist.barrier(self._host)

    def reduce(self, value: Tensor, operation: str) -> Tensor:
        value = value.detach().clone()
        if operation == "l2_norm":
            value = value.square()
        group = self._host if value.device.type == "cpu" else None
        dist.all_reduce(value, _OPERATIONS[operation], group=group)
        if operation == "mean":
            return value / self.context.world_size
        return value.sqrt() if operation == "l2_norm" else value

    # -- the step ---------------------------------------------------------------------------

    def eval_forward(
        self, batch: Any, objective: Objective, *, with_logits: bool = False
    ) -> EvalStep:
        with self.eval_context():
            return EvalStep(
                *objective.evaluate(self.called_model(), self._move(batch), with_logits=with_logits)
            )

    def called_model(self) -> nn.Module:
        """The module whose forward is called: the model with its wrappers, if it has any."""
        return self.unwrap()

    def apply(self, optimizer: torch.optim.Optimizer, loss: Tensor, grad_norm: Tensor) -> bool:
        if self.before_apply is not None:
            self.before_apply()
        # By the norm alone, which is the same on all ranks: ranks that decide differently drift
        # apart for good. A share of the loss that is not finite has made it so as well.
        return take_step(
            optimizer, grad_norm, scale=self.loss_scale, reading_waits=self._reading_waits
        )

    def state_components(self) -> list[StateComponent]:
        return []


@torch.no_grad()
def join_buffers(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks of a gloo group the buffers that its first rank would save.

    Such as running means, which every rank has of its own data. Buffers that are in no state dict
    follow from the configuration and are the same anyway.
    """
    if dist.get_world_size(group) == 1:
        return
    first = dist.get_global_rank(group, 0)
    for buffer in saved_buffers(model):
        if buffer.numel():
            value = buffer.cpu().contiguous()
            # As bytes: gloo does not know every dtype.
            dist.broadcast(value.reshape(-1).view(torch.uint8), first, group=group)
            buffer.copy_(value)


def saved_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that are in the state dict, each once, in the order of their names."""
    found: dict[int, Tensor] = {}
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                found.setdefault(id(buffer), buffer)
    return list(found.values())


def own_targets(window: Window, number: int, objective: Objective) -> int | Tensor:
    """The targets of one micro-batch of a window; a filler has none."""
    if number >= len(window.micro_batches) - window.num_fillers:
        return 0
    if len(window.micro_batches) == 1:
        return window.num_target_tokens
    return objective.count_targets(window.micro_batches[number])


def spread_nonfinite(share: Tensor) -> Tensor:
    """A share of the loss whose gradient is not finite wherever the share is not.

    So the norm of the gradients, which all ranks have, tells every rank of it; a finite share
    is multiplied by exactly 1.
    """
    return share * (1 + (share - share).detach())
