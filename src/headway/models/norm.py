"""Root-mean-square normalisation, with one cast under autocast.

Owns: `RMSNorm`, `compute_dtype`. Does not own: where norms stand in a block (decoder.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype matrix products on `x` run in: autocast's where it is on, else that of `x`."""
    device_type = x.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return x.dtype


class RMSNorm(nn.Module):
    """Scale the last dim to unit root mean square, times a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # One weight dtype keeps the fused kernel; one cast here spares autocast a cast (and a saved
        # copy) in each of the projections that read this output.
        weight = self.weight.to(x.dtype)
        out = F.rms_norm(x, weight.shape, weight, self.eps)
        return out.to(compute_dtype(x))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
