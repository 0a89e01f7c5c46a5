"""Loss scaling for float16, whose small gradients would vanish without it.

Owns: the scale, its growth and its retreat. Does not own: the decision whether a step overflowed,
which a strategy takes once for all ranks, by the norm of the whole gradient.

The rules are those of torch's GradScaler, whose state it reads and writes. That class decides on
each rank by its own gradients, and knows nothing of sharded ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)

LEAST_LOSS_SCALE = 2.0**-10
"""Smaller ones are reached only where every step overflows, whatever the scale."""
_SMALLEST = 2.0**-126
"""The factor that undoes a smaller one is no number in float32."""


class LossScale:
    """The factor by which the loss is multiplied before the backward."""

    def __init__(
        self,
        value: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.value = value
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval
        self._steps_since_change = 0

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the factor out of the gradients; what overflowed stays infinite or not a number."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        dense = [gradient for gradient in local if not gradient.is_sparse]
        if dense:
            torch._foreach_mul_(dense, 1.0 / self.value)
        for gradient in local:
            if gradient.is_sparse:
                gradient.mul_(1.0 / self.value)

    def update(self, taken: bool) -> None:
        """Adapt to a step: smaller after an overflow, larger after many steps without one."""
        if not taken:
            before = self.value
            self.value = max(before * self._backoff_factor, _SMALLEST)
            self._steps_since_change = 0
            if self.value < LEAST_LOSS_SCALE <= before:
                logger.warning(
                    "mixed_precision='fp16': every step overflows, the loss scale fell to %g; the "
                    "run diverges, its gradients are not finite, or the model needs "
                    "mixed_precision='bf16'",
                    self.value,
                )
            return
        self._steps_since_change += 1
        if self._steps_since_change == self._growth_interval:
            self.value *= self._growth_factor
            self._steps_since_change = 0

    def state_dict(self) -> dict[str, Any]:
        """The same keys as torch's GradScaler."""
        return {
            "scale": self.value,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._steps_since_change,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state, also from one of torch's GradScaler."""
        if not state_dict:  # a GradScaler that was switched off
            return
        self.value = float(state_dict["scale"])
        self._growth_factor = float(state_dict["growth_factor"])
        self._backoff_factor = float(state_dict["backoff_factor"])
        self._growth_interval = int(state_dict["growth_interval"])
        self._steps_since_change = int(state_dict["_growth_tracker"])


def backward(loss: Tensor, scale: LossScale | None) -> None:
    """The backward of a loss, scaled where there is a scale."""
    if scale is not None:
        loss = loss.float() * scale.value  # a float16 loss would overflow by the scale alone
    loss.backward()  # type: ignore[no-untyped-call]
