"""AdamW for weights that are kept in bfloat16 alone, with stochastic rounding.

Owns: the update and the rounding. bfloat16 has 8 bits of precision, so an update below 1/512 of a
weight is lost by rounding to the nearest, step after step. Rounding up or down by chance, in
proportion to the distance, keeps it on average.

The bits that decide are a function of seed, step and parameter name, not of torch's global
generator: replicas of a weight on several ranks, and a run that was resumed, round alike, and the
order in which parameters are updated does not matter.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from headway.errors import ConfigError, unknown
from headway.optim import stochastic_step

_MOMENT_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "parameter": None,
}
# One stream of bits for each tensor that is rounded.
_WEIGHT, _FIRST, _SECOND = range(3)


class StochasticAdamW(Optimizer):
    """AdamW that rounds bfloat16 weights and moments stochastically; others are kept as they are.

    `moment_dtype` is "parameter" (that of each weight), "bfloat16" or "float32". The arithmetic is
    in float32. `seed` chooses the bits.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        moment_dtype: str = "parameter",
        seed: int = 0,
    ) -> None:
        problems = [
            f"{name} must be {allowed}, got {value!r}"
            for name, value, fits, allowed in (
                ("lr", lr, lr >= 0, "0 or more"),
                ("betas", betas, all(0 <= beta < 1 for beta in betas), "0 or more and below 1"),
                ("eps", eps, eps >= 0, "0 or more"),
                ("weight_decay", weight_decay, weight_decay >= 0, "0 or more"),
            )
            if not fits
        ]
        if moment_dtype not in _MOMENT_DTYPES:
            problems.append(unknown("moment_dtype", moment_dtype, _MOMENT_DTYPES))
        if problems:
            raise ConfigError(problems)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "moment_dtype": moment_dtype,
            "seed": seed,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for index, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                if param.grad.is_sparse:
                    raise ConfigError("StochasticAdamW takes no sparse gradients")
                name = names[index] if names else f"{number}.{index}"
                self._update(param, name, group)
        return loss

    def _update(self, param: Tensor, name: str, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            dtype = _MOMENT_DTYPES[group["moment_dtype"]] or param.dtype
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(param, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=dtype)
        state["step"] += 1
        weight, gradient = _local(param), _local(param.grad)
        first, second = _local(state["exp_avg"]), _local(state["exp_avg_sq"])
        settings = {
            "seed": zlib.crc32(f"{group['seed']}/{state['step']}/{name}/{_place(param)}".encode()),
            "step": state["step"],
            "lr": float(group["lr"]),
            **{key: group[key] for key in ("betas", "eps", "weight_decay")},
        }
        by_kernel = stochastic_step.fits(weight, gradient, first, second)
        (stochastic_step.update_ if by_kernel else _update_plainly)(
            weight, gradient, first, second, **settings
        )


def _update_plainly(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    seed: int,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    rounding, (beta1, beta2) = _Rounding(seed), betas
    gradient = gradient.float()
    mean = first.float().lerp(gradient, 1 - beta1)
    square = second.float().mul(beta2).addcmul(gradient, gradient, value=1 - beta2)
    value = weight.float().mul(1 - lr * weight_decay)
    denominator = (square / (1 - beta2**step)).sqrt_().add_(eps)
    value.addcdiv_(mean, denominator, value=-lr / (1 - beta1**step))
    for stream, kept, exact in (
        (_FIRST, first, mean),
        (_SECOND, second, square),
        (_WEIGHT, weight, value),
    ):
        rounding.store(exact, kept, stream)


class _Rounding:
    """Stores float32 values of one parameter in one step."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator: torch.Generator | None = None

    def store(self, exact: Tensor, kept: Tensor, stream: int) -> None:
        """Put `exact` into `kept`, rounded by chance if that is in bfloat16."""
        if kept.dtype != torch.bfloat16 or kept.is_meta:
            kept.copy_(exact)
            return
        if self._generator is None:
            self._generator = torch.Generator(kept.device)
        self._generator.manual_seed(self._seed << 2 | stream)
        kept.copy_(round_stochastically(exact, self._generator))


def round_stochastically(value: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """float32 to bfloat16, up or down by chance so that the mean is the value itself."""
    # The upper half of a float32 is the bfloat16 towards 0. Random bits added to the lower half
    # carry over with the probability that the distance asks for.
    noise = torch.randint(
        0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=generator
    )
    bits = value.contiguous().view(torch.int32)
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32)
    # In a NaN the carry could run through to the sign.
    return torch.where(value.isfinite(), rounded, value).to(torch.bfloat16)


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _place(param: Tensor) -> str:
    """Where in the whole parameter this rank's part begins: other parts have other bits."""
    if not isinstance(param, DTensor):
        return ""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    return "" if math.prod(shape) == param.numel() else ",".join(map(str, offsets))
