"""Parameters that were frozen when DistributedDataParallel was made, and are trained later.

Owns: the sum over ranks of their gradients, of which torch's wrapper knows nothing: left alone,
each rank would go by its own. Does not own: who thaws them (a callback), all other gradients (ddp).
"""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch import nn


class UnfrozenLater:
    """Those of a model, to be made when the wrapper is."""

    def __init__(self, model: nn.Module) -> None:
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        self._frozen = [
            parameter
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad and name not in ignored
        ]

    def reduce(self) -> None:
        """Give all ranks the mean of what they have, as the wrapper does with its own."""
        works = []
        for parameter in self._frozen:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:  # it had no part in this rank's step
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size()
            works.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in works:
            work.wait()
