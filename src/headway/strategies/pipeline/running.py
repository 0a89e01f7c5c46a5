"""Training steps through torch's pipeline schedules.

Owns: one schedule per shape of a piece, handing pieces to stages, the loss inside the last stage.
Does not own: forward passes alone (relay.py), sums of gradients over ranks (gradients.py).

Shapes are told to torch and not found by it: finding them would cost a forward and a backward
pass. The loss is the last stage's own share of the window's, so nothing is scaled afterwards.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage

from headway.precision.amp import Context
from headway.strategies.objective import Objective
from headway.strategies.pipeline.layout import Layout
from headway.strategies.pipeline.pieces import Piece
from headway.strategies.pipeline.schedules import Schedule
from headway.strategies.pipeline.stages import StageCall
from headway.strategies.ranked import spread_nonfinite

_MOST_SHAPES = 4
"""Schedules kept, each with its buffers for activations."""


@dataclass
class Task:
    """One schedule step: its pieces and what their loss is."""

    pieces: Sequence[Piece]
    objective: Objective
    num_targets: int | Tensor
    own_targets: Sequence[int | Tensor]
    context: Context
    """Around every forward of a stage."""
    counts: bool = True
    """False for a stand-in, whose loss is nothing."""

    def loss(self, call: StageCall, hidden: Tensor, number: int) -> Tensor:
        """The share of one piece, with one element and not without dimension, as torch wants."""
        share = self.objective.loss(
            call.as_model(hidden), self.pieces[number], self.num_targets, self.own_targets[number]
        )
        # A mean over nothing is not a number.
        share = spread_nonfinite(share) if self.counts else share.nan_to_num(0.0, 0.0, 0.0) * 0
        return torch.stack([share.to(call.like_loss().dtype)])


class _Running(nn.Module):
    """A stage as torch's schedules call it."""

    def __init__(self, call: StageCall, runner: ScheduleRunner) -> None:
        super().__init__()
        self.stage = call.stage
        self._call = call
        self.__dict__["_runner"] = runner  # not a cycle of modules

    def forward(self, x: Tensor, piece: Tensor) -> Tensor:
        task: Task | None = self.__dict__["_runner"].task
        assert task is not None, "schedules run in `step` only"
        number = int(piece)
        with task.context():
            if self._call.is_last:
                return task.loss(self._call, x, number)
            return self._call.run(x, task.pieces[number])


class _Stage(PipelineStage):
    """torch's stage, without greeting itself where its neighbour is on the same rank.

    Up to torch 2.11 a rank would send to itself then, which gloo cannot.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        ops = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]


class ScheduleRunner:
    """Runs this rank's stages by one schedule."""

    def __init__(
        self,
        schedule: Schedule,
        layout: Layout,
        calls: Mapping[int, StageCall],
        num_pieces: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._schedule, self._layout = schedule, layout
        self._num_pieces, self._group, self._device = num_pieces, group, device
        self._calls = dict(calls)
        self._modules = {number: _Running(call, self) for number, call in calls.items()}
        self._made: OrderedDict[torch.Size, Any] = OrderedDict()
        self._numbers = torch.arange(num_pieces)
        self.task: Task | None = None

    def step(self, input_ids: Tensor, task: Task) -> Tensor | None:
        """One forward and backward of a batch; the sum of its losses, where the last stage is."""
        made = self._schedule_for(task.pieces[0]["input_ids"].shape)
        args = (input_ids.contiguous(),) if 0 in self._calls else ()
        losses: list[Tensor] = []
        last: dict[str, Any] = {}
        if self._layout.num_stages - 1 in self._calls:
            last = {"target": self._numbers, "losses": losses}
        self.task = task
        try:
            made.step(*args, piece=self._numbers, return_outputs=False, **last)
        except RuntimeError as error:
            # torch wraps what a stage raises in a text about shapes; users know the error inside.
            if not isinstance(error.__cause__, Exception):
                raise
            cause, error.__cause__ = error.__cause__, None  # not a circle of causes
            cause.add_note(inspect.cleandoc(str(error)))
            raise cause from None
        finally:
            self.task = None
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None

    def _schedule_for(self, shape: torch.Size) -> Any:
        """The schedule for pieces of a shape; all ranks of the pipeline see the same shapes."""
        if shape in self._made:
            self._made.move_to_end(shape)
            return self._made[shape]
        if len(self._made) == _MOST_SHAPES:
            self._made.popitem(last=False)
        stages = [self._stage(number, shape) for number in sorted(self._calls)]
        made = self._schedule.make(
            stages if self._schedule.facts.is_multistage else stages[0],
            n_microbatches=self._num_pieces,
            loss_fn=_take_loss,
            scale_grads=False,
        )
        self._made[shape] = made
        return made

    def _stage(self, number: int, shape: torch.Size) -> PipelineStage:
        call = self._calls[number]
        made = call.like_loss() if call.is_last else call.like_output(shape)
        return _Stage(
            self._modules[number],
            number,
            self._layout.num_stages,
            self._device,
            input_args=(call.like_input(shape),),
            output_args=(made,),
            group=self._group,
        )


def _take_loss(output: Tensor, target: Tensor) -> Tensor:
    # Not a view: a backward in two parts detaches it in place.
    return output.sum()
