"""Forward passes through all stages without a schedule: evaluation and generation.

Owns: passing hidden states from rank to rank. Does not own: training steps (running.py).

torch's own evaluation fails on some schedules, and would set up every stage anew each time
training and evaluation alternate. Here each rank takes its stages in order, each with all pieces,
so ranks work at the same time and any two of them send in the order in which they receive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from headway.strategies.pipeline.layout import Layout
from headway.strategies.pipeline.pieces import Piece
from headway.strategies.pipeline.stages import StageCall

T = TypeVar("T")


class Relay:
    """This rank's place in the row of stages."""

    def __init__(
        self,
        layout: Layout,
        calls: Mapping[int, StageCall],
        ranks: Sequence[int],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._layout, self._calls = layout, dict(sorted(calls.items()))
        self._ranks, self._group, self._device = list(ranks), group, device

    @torch.no_grad()
    def run(
        self, pieces: Sequence[Piece], finish: Callable[[StageCall, Tensor, Piece], T]
    ) -> list[T]:
        """Pass pieces through all stages; what `finish` makes of each where the last stage is."""
        passed: dict[int, list[Tensor]] = {}
        sends: list[tuple[dist.Work | None, Tensor]] = []
        results: list[T] = []
        for number, call in self._calls.items():
            arriving = self._await(number, call, pieces, passed)
            for piece, (work, x) in zip(pieces, arriving):
                if work is not None:
                    work.wait()
                if call.is_last:
                    results.append(finish(call, x, piece))
                    continue
                y = call.run(x, piece)
                if number + 1 in self._calls:
                    passed.setdefault(number + 1, []).append(y)
                else:
                    sends.append((dist.isend(y, self._rank_of(number + 1), self._group), y))
        for work, _ in sends:
            if work is not None:
                work.wait()
        return results

    def _await(
        self,
        number: int,
        call: StageCall,
        pieces: Sequence[Piece],
        passed: dict[int, list[Tensor]],
    ) -> list[tuple[dist.Work | None, Tensor]]:
        """What reaches a stage, piece by piece, and whether to wait for it."""
        if call.is_first:
            return [(None, piece["input_ids"]) for piece in pieces]
        if number in passed:
            return [(None, x) for x in passed.pop(number)]
        arriving: list[tuple[dist.Work | None, Tensor]] = []
        for piece in pieces:
            shape = call.input_shape(piece["input_ids"].shape)
            x = torch.empty(shape, dtype=call.dtype, device=self._device)
            arriving.append((dist.irecv(x, self._rank_of(number - 1), self._group), x))
        return arriving

    def _rank_of(self, stage: int) -> int:
        return self._ranks[self._layout.rank_of(stage)]
