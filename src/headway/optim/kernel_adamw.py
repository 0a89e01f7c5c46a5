"""AdamW on a GPU in one pass over weights, gradients and moments, clipping included.

Owns: `KernelAdamW`. Does not own: when it is chosen (choice.py), the clipping factor (strategies).

torch's fused kernel reaches about two thirds of the memory's speed, and clipping reads and writes
all gradients once more before it. State, settings and arithmetic are those of `torch.optim.AdamW`;
where this kernel does not fit (other dtypes, parts of tensors, amsgrad, ...), torch's own is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_BLOCK = 4096
_ALIGNMENT = 16


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def update_block(  # type: ignore[no-untyped-def]
        weights, grads, means, squares, at, inside, factor, step_size, root, decay,
        beta1, one_less_beta1, beta2, one_less_beta2, eps,
    ):  # fmt: skip
        grad = tl.load(grads + at, mask=inside) * factor
        weight = tl.load(weights + at, mask=inside)
        mean = tl.load(means + at, mask=inside)
        square = tl.load(squares + at, mask=inside)
        weight -= decay * weight
        mean = beta1 * mean + one_less_beta1 * grad
        square = beta2 * square + one_less_beta2 * grad * grad
        weight -= step_size * mean / (tl.sqrt(square) / root + eps)
        tl.store(weights + at, weight, mask=inside)
        tl.store(means + at, mean, mask=inside)
        tl.store(squares + at, square, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def adamw_blocks(  # type: ignore[no-untyped-def]
        addresses, num_tensors, sizes, owners, starts, rates, factor, found_inf,
        beta1, one_less_beta1, beta2, one_less_beta2, eps,
        HAS_FLAG: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        program = tl.program_id(0)
        owner = tl.load(owners + program)
        start, size = tl.load(starts + program), tl.load(sizes + owner)
        if HAS_FLAG:
            # A step that is withheld finds every tensor empty.
            size = tl.where(tl.load(found_inf) == 0.0, size, 0)
        kind = tl.pointer_type(tl.float32)
        own = addresses + owner
        weights = tl.multiple_of(tl.load(own).to(kind), 16)
        grads = tl.multiple_of(tl.load(own + num_tensors).to(kind), 16)
        means = tl.multiple_of(tl.load(own + 2 * num_tensors).to(kind), 16)
        squares = tl.multiple_of(tl.load(own + 3 * num_tensors).to(kind), 16)
        step_size = tl.load(rates + 3 * owner)
        root = tl.load(rates + 3 * owner + 1)
        decay = tl.load(rates + 3 * owner + 2)
        by = tl.load(factor)
        at = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
        # With a mask of unknown length, loads are as narrow as one element.
        if start + BLOCK <= size:
            update_block(
                weights, grads, means, squares, at, None, by, step_size, root, decay,
                beta1, one_less_beta1, beta2, one_less_beta2, eps,
            )  # fmt: skip
        else:
            update_block(
                weights, grads, means, squares, at, at < size, by, step_size, root, decay,
                beta1, one_less_beta1, beta2, one_less_beta2, eps,
            )  # fmt: skip

    return adamw_blocks


class _Layout:
    """Which program works on which block of which tensor; the same as long as the sizes are."""

    def __init__(self, sizes: tuple[int, ...], device: torch.device) -> None:
        owners, starts = [], []
        for number, size in enumerate(sizes):
            blocks = torch.arange(0, size, _BLOCK)
            starts.append(blocks)
            owners.append(torch.full_like(blocks, number))
        self.owners, self.starts = (
            _send(torch.cat(owners), device),
            _send(torch.cat(starts), device),
        )
        self.sizes = _send(torch.tensor(sizes), device)
        # Without clipping the factor is 1: with another kernel the last bits might differ.
        self.one = torch.ones((), device=device)


def _send(values: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True)


class KernelAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)`, faster; its state and settings are the same."""

    grad_factor: Tensor | None = None
    """By this the next step multiplies gradients as it reads them; they stay as they are."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns what the closure does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor, self.grad_factor = self.grad_factor, None
        with torch.no_grad():
            if all(map(_fits, self.param_groups)):
                for group in self.param_groups:
                    self._step_group(group, factor)
                return loss
            if factor is not None:
                grads = [p.grad for g in self.param_groups for p in g["params"]]
                torch._foreach_mul_([g for g in grads if g is not None], factor)
            super().step()
        return loss

    def _step_group(self, group: dict[str, Any], factor: Tensor | None) -> None:
        weights: list[Tensor] = []
        grads: list[Tensor] = []
        means: list[Tensor] = []
        squares: list[Tensor] = []
        steps: list[Tensor] = []
        self._init_group(group, weights, grads, means, squares, [], steps)
        if not weights:
            return
        torch._foreach_add_(steps, 1)
        found_inf = getattr(self, "found_inf", None)
        device, (beta1, beta2) = weights[0].device, group["betas"]
        layout = self._find_layout(weights)
        addresses = [t.data_ptr() for own in (weights, grads, means, squares) for t in own]
        with torch.cuda.device(device):
            _kernel()[(layout.owners.numel(),)](
                _send(torch.tensor(addresses), device),
                len(weights),
                layout.sizes,
                layout.owners,
                layout.starts,
                _rates(steps, group),
                layout.one if factor is None else factor,
                found_inf,
                beta1,
                1 - beta1,
                beta2,
                1 - beta2,
                group["eps"],
                HAS_FLAG=found_inf is not None,
                BLOCK=_BLOCK,
                num_warps=8,
            )
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))

    def _find_layout(self, weights: Sequence[Tensor]) -> _Layout:
        layouts: dict[tuple[int, ...], _Layout] = self.__dict__.setdefault("_layouts", {})
        sizes = tuple(weight.numel() for weight in weights)
        if sizes not in layouts:
            layouts[sizes] = _Layout(sizes, weights[0].device)
        return layouts[sizes]

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())  # type: ignore[no-untyped-call]
        state.pop("_layouts", None)
        return state


def _rates(steps: list[Tensor], group: dict[str, Any]) -> Tensor:
    """For each parameter: step size, root of the second correction, decay; made in float64."""
    count = torch.stack(steps).double()
    (beta1, beta2), lr = group["betas"], group["lr"]
    sizes, roots = lr / (1 - beta1**count), (1 - beta2**count).sqrt()
    decay = torch.ones_like(count) * lr * group["weight_decay"]
    return torch.stack([sizes, roots, decay], dim=1).float()


def _fits(group: dict[str, Any]) -> bool:
    if not group["fused"] or group["amsgrad"] or group["maximize"] or group["differentiable"]:
        return False
    return all(
        p.grad is None or (_is_plain(p) and _is_plain(p.grad) and p.device == p.grad.device)
        for p in group["params"]
    )


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.is_cuda
        and tensor.dtype == torch.float32
        and tensor.is_contiguous()
        and tensor.data_ptr() % _ALIGNMENT == 0
    )
