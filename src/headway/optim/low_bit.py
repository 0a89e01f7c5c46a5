"""AdamW with moments in few bits, by torchao.

Owns: torchao's classes as an optimizer like any other: a learning rate that is a number, and the
same choice of which moments are quantized on all ranks. Does not own: how such moments are stored
(checkpoint/wrapped.py).
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from headway.errors import ConfigError, missing_extra

# torchao's own limit, which counts one rank's share; here it counts the whole parameter.
_FEWEST_VALUES = 4096


@functools.cache
def low_bit_class(name: str) -> type[Optimizer]:
    """One of torchao's optimizers (`AdamW8bit`, `AdamW4bit`, `AdamWFp8`) under its own name."""
    try:
        import torchao.optim
    except ImportError as error:
        raise missing_extra("torchao", "quant", f"the optimizer {name}") from error
    return type(name, (_LowBit, getattr(torchao.optim, name)), {})


class _LowBit:
    """What is laid over torchao's class."""

    param_groups: list[dict[str, Any]]

    @property
    def block_size(self) -> int:
        """Values of a moment that share a scale."""
        return self._block_size

    @block_size.setter
    def block_size(self, given: Any) -> None:
        # torchao takes any value, and fails in the first step of a parameter that it fits.
        name = type(self).__name__
        step = 2 if "4bit" in name else 1  # two values share a byte, and a byte is of one block
        if isinstance(given, bool) or not isinstance(given, int) or given < step or given % step:
            kind = "an even number" if step == 2 else "a whole number"
            raise ConfigError(
                f"optim_args.block_size: {name} needs {kind} from {step} up, such as 128 or 256, "
                f"got {given!r}"
            )
        self._block_size = given

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # torchao's own makes the rate a tensor, which every scheduler and log would have to know.
        Optimizer.add_param_group(self, param_group)  # type: ignore[arg-type]

    def step(self, closure: Any = None) -> Any:
        """torchao's step, with rates as tensors: a number would be compiled in, each anew."""
        rates = [group["lr"] for group in self.param_groups]
        looked_at = any(p.is_meta for group in self.param_groups for p in group["params"])
        try:
            for group, rate in zip(self.param_groups, rates):
                group["lr"] = torch.as_tensor(rate, dtype=torch.float32)
            # Without values there is nothing to compute, only sizes to find.
            with torch.compiler.set_stance("force_eager") if looked_at else nullcontext():
                return super().step(closure)  # type: ignore[misc]
        finally:
            for group, rate in zip(self.param_groups, rates):
                group["lr"] = rate

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        if not can_quantize(p, self.block_size):
            return torch.zeros_like(p)
        local = p.to_local() if isinstance(p, DTensor) else p
        made: Tensor = self._subclass_zeros(local, signed, self.block_size)  # type: ignore[attr-defined]
        return spread_like(made, p)


def can_quantize(param: Tensor, block_size: int) -> bool:
    """Whether all ranks can keep a parameter's moments in whole blocks; the same on all of them."""
    if param.numel() < _FEWEST_VALUES or param.numel() % block_size:
        return False
    if not isinstance(param, DTensor):
        return True
    num_shares = 1
    for size, placement in zip(param.device_mesh.shape, param.placements):
        if placement.is_shard():
            if not placement.is_shard(0) or num_shares > 1:
                return False
            num_shares = size
    num_rows = -(-param.shape[0] // num_shares)
    is_full = num_rows * (num_shares - 1) < param.shape[0]
    return is_full and num_rows * (param.numel() // param.shape[0]) % block_size == 0


def spread_like(local: Tensor, param: Tensor) -> Tensor:
    """A rank's moment as the parameter is: spread over ranks, or not."""
    if not isinstance(param, DTensor):
        return local
    spread = DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    # `from_local` moves to the mesh's device, also where parameters are kept on the host.
    return spread.to(param.device)
