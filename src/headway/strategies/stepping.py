"""The optimizer step that is taken, or withheld where it would not be finite.

Owns: that decision, on the device where it can be made there. Does not own: what it is made of.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim import Optimizer

from headway.precision.scaler import LossScale


def take_step(
    optimizer: Optimizer,
    decides: Tensor,
    *,
    scale: LossScale | None,
    reading_waits: bool,
    grad_factor: Tensor | None = None,
) -> bool:
    """Step if `decides` is finite, and clear the gradients; see `Strategy.apply`.

    `reading_waits` says that a look at a value waits for the device. `grad_factor` is for an
    optimizer that multiplies gradients by it as it goes.
    """
    taken = True
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    if scale is None and reading_waits and fused:
        # The fused kernels read the flag on the device and leave weights and state alone.
        # A finite number minus itself is 0; no other is.
        optimizer.found_inf = (decides - decides != 0).float()  # type: ignore[attr-defined]
        _step(optimizer, grad_factor)
    else:
        # Free on the CPU; elsewhere one look per step. The scale of the next step depends on it.
        taken = math.isfinite(decides.item())
        if taken:
            _step(optimizer, grad_factor)
    optimizer.zero_grad(set_to_none=True)
    if scale is None:
        return True
    scale.update(taken)
    return taken


def _step(optimizer: Optimizer, grad_factor: Tensor | None) -> None:
    if grad_factor is not None:
        optimizer.grad_factor = grad_factor  # type: ignore[attr-defined]
    optimizer.step()
