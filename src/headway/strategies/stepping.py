"""The optimizer step that is taken, or withheld where it would not be finite.

Owns: that decision, on the device where it can be made there. Does not own: what it is made of.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim import Optimizer

from headway.optim.adamw_step import KernelStep, step
from headway.precision.scaler import LossScale


def take_step(
    optimizer: Optimizer,
    decides: Tensor,
    *,
    scale: LossScale | None,
    reading_waits: bool,
    kernel_step: KernelStep | None = None,
) -> bool:
    """Step if `decides` is finite, and clear the gradients; see `Strategy.apply`.

    `reading_waits` says that a look at a value waits for the device. `kernel_step` is taken in
    place of the optimizer's own.
    """
    taken = True
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    if scale is None and reading_waits and fused:
        # The fused kernels read the flag on the device and leave weights and state alone.
        # A finite number minus itself is 0; no other is.
        step(optimizer, (decides - decides != 0).float(), kernel_step)
    else:
        # Free on the CPU; elsewhere one look per step. The scale of the next step depends on it.
        taken = math.isfinite(decides.item())
        if taken:
            step(optimizer, None, kernel_step)
        else:
            # torch's schedulers look for it, to warn of a step of theirs that came too early.
            optimizer._opt_called = True  # type: ignore[attr-defined]
    optimizer.zero_grad(set_to_none=True)
    if scale is None:
        return True
    scale.update(taken)
    return taken
