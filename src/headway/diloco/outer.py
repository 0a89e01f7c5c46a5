"""The outer optimizer: what the server does with the workers' pseudo-gradients.

Owns: the mean of a round, SGD with (Nesterov) momentum for synchronous rounds, and the delayed
Nesterov rule for asynchronous ones. Does not own: rounds (rounds.py), files (ledger.py).

Every result is a function of its arguments alone, down to the last bit: workers are added up in the
order given, each operation is rounded once in `accumulate`, and parameters are rounded once, to
float32, at the end. So a replay of the ledger gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ACCUMULATES = {"float32": torch.float32, "float64": torch.float64}


class Mean(NamedTuple):
    """What the workers of a round say together about one tensor."""

    gradient: Tensor
    """The weighted mean of the pseudo-gradients."""
    local: Tensor | None
    """The weighted mean of the workers' own parameters, if all of them sent these."""


class Share(NamedTuple):
    """One worker's part in the mean of one tensor."""

    tensor: Tensor
    weight: float
    is_local: bool = False
    """Whether the tensor is the worker's parameters, not what it has changed about them."""


@dataclass(frozen=True)
class OuterOptimizer:
    """Settings of the outer step."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    accumulate: str = "float32"
    """What means, momentum and the step are computed in; parameters are float32 always."""
    delay: int = 1
    """Asynchronous mode: updates between two uses of the momentum."""
    spread: float = 0.0
    """Asynchronous mode: how much of the momentum each update between them gets, up to 1/delay."""

    def __post_init__(self) -> None:
        # What a user chooses is checked in server_options.py, which needs no torch.
        assert self.lr > 0 and 0 <= self.momentum < 1 and self.accumulate in ACCUMULATES
        assert self.delay >= 1 and 0 <= self.spread <= 1 / self.delay

    @property
    def dtype(self) -> torch.dtype:
        return ACCUMULATES[self.accumulate]

    def mean(self, parameter: Tensor, shares: Iterable[Share]) -> Mean:
        """The weighted mean of what the workers sent, added up in the given order."""
        sums: dict[bool, Tensor] = {}
        weights = {True: 0.0, False: 0.0}
        for tensor, weight, is_local in shares:
            part = tensor.to(self.dtype) * weight
            # Begun with the first one, not with zero: a negative zero stays one.
            sums[is_local] = sums[is_local].add_(part) if is_local in sums else part
            weights[is_local] += weight
        total = weights[True] + weights[False]
        assert total > 0
        start = parameter.to(self.dtype)
        if True not in sums:
            return Mean(sums[False] / total, None)
        if False not in sums:
            local = sums[True] / total
            return Mean(start - local, local)
        return Mean((sums[False] + (start * weights[True] - sums[True])) / total, None)

    # -- synchronous ----------------------------------------------------------------------------

    def step(self, parameter: Tensor, velocity: Tensor, mean: Mean) -> tuple[Tensor, Tensor]:
        """The new parameter (float32) and velocity of one tensor; the given ones stay as they are.

        v' = m v + g;  p' = p - lr g - lr m v' (Nesterov)  or  p' = p - lr g - lr m v.
        """
        start = parameter.to(self.dtype)
        moved = self._move(start, mean)
        if self.momentum == 0:
            return moved.to(torch.float32), velocity
        faded = velocity * self.momentum
        new_velocity = faded + mean.gradient
        push = new_velocity * self.momentum if self.nesterov else faded
        return (moved - push * self.lr).to(torch.float32), new_velocity

    def _move(self, start: Tensor, mean: Mean) -> Tensor:
        """p - lr g, from the workers' own parameters where they are known: p - lr (p - l) loses
        digits of an `l` that is much smaller than `p`, and with lr = 1 it has to be `l`."""
        if mean.local is None:
            return start - mean.gradient * self.lr
        if self.lr == 1:
            return mean.local
        return start * (1 - self.lr) + mean.local * self.lr

    # -- asynchronous ---------------------------------------------------------------------------

    def step_delayed(
        self, parameter: Tensor, velocity: Tensor, buffer: Tensor, mean: Mean, number: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The new parameter, velocity and buffer after update `number` (1, 2, ...) of the tensor.

        With N = delay, c = spread:  b' = b + g. At every N-th update
            v' = m v + b'/N;  p' = p - lr (g/N + (1 - c N + c) m v');  b' = 0,
        at the others
            v' = v;           p' = p - lr (g/N + c m v).
        """
        delay, gradient = self.delay, mean.gradient
        filled = buffer + gradient
        moved = parameter.to(self.dtype) - (gradient / delay) * self.lr
        factor = self.spread
        if number % delay == 0:
            velocity = velocity * self.momentum + filled / delay
            filled = torch.zeros_like(filled)
            factor = 1 - self.spread * delay + self.spread
        if self.momentum and factor:
            moved = moved - velocity * (self.lr * factor * self.momentum)
        return moved.to(torch.float32), velocity, filled
