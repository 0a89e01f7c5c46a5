"""A step of torch's fused AdamW in one pass over memory, clipping included.

Owns: `KernelStep`, which steps for a `torch.optim.AdamW` where its kernel fits, and `step`, which
asks whether it does. Does not own: the optimizer, which stays torch's with its state and settings;
the clipping factor (strategies).

torch's own kernel reaches about two thirds of the memory's speed, and clipping reads and writes
all gradients once more before it.
"""

from __future__ import annotations

import functools
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim import optimizer as optimizer_module

from headway.models.kernels import triton_works

# Of those tried on an H200 the fastest: 4.2 TB/s, where 4,096 reach 3.3.
_BLOCK = 1024
_ALIGNMENT = 16
_OTHER_WAYS = ("amsgrad", "maximize", "capturable", "differentiable")


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
        beta1, one_less_beta1, beta2, one_less_beta2, eps, BLOCK: tl.constexpr,
    ):  # fmt: skip
        program = tl.program_id(0)
        owner = tl.load(owners + program)
        start, size = tl.load(starts + program).to(tl.int64) * BLOCK, tl.load(sizes + owner)
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


class KernelStep:
    """The next step of an optimizer; made anew for each."""

    grad_factor: Tensor | None = None
    """By this the step multiplies gradients as it reads them; they stay as they are."""

    def __init__(self, optimizer: AdamW) -> None:
        self._optimizer = optimizer

    @classmethod
    def of(cls, optimizer: Optimizer) -> Self | None:
        """None where the optimizer, its state or its gradients are not what the kernel is for."""
        if type(optimizer) is not AdamW or _is_watched(optimizer):
            return None
        devices: set[torch.device] = set()
        for group in optimizer.param_groups:
            if not group["fused"] or any(group[way] for way in _OTHER_WAYS):
                return None
            if any(isinstance(beta, Tensor) for beta in group["betas"]):
                return None  # the kernel would take it for an address
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = optimizer.state.get(param) or {}
                held = [param, param.grad, *(state.get(k) for k in ("exp_avg", "exp_avg_sq"))]
                if not all(t is None or _is_plain(t, param) for t in held):
                    return None
                if "step" in state and state["step"].device != param.device:
                    return None
                devices.add(param.device)
        return cls(optimizer) if len(devices) == 1 and triton_works() else None

    @torch.no_grad()
    def take(self, found_inf: Tensor | None = None) -> None:
        """Update weights and state, unless the flag is set; nobody waits for the device."""
        for group in self._optimizer.param_groups:
            self._update(group, found_inf)
        # torch's schedulers look for it, to warn of a step of theirs that came too early.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def _update(self, group: dict[str, Any], found_inf: Tensor | None) -> None:
        weights: list[Tensor] = []
        grads: list[Tensor] = []
        means: list[Tensor] = []
        squares: list[Tensor] = []
        steps: list[Tensor] = []
        self._optimizer._init_group(group, weights, grads, means, squares, [], steps)
        if not weights:
            return
        torch._foreach_add_(steps, 1)
        device, (beta1, beta2) = weights[0].device, group["betas"]
        layout = _layout(tuple(weight.numel() for weight in weights), device)
        addresses = [t.data_ptr() for own in (weights, grads, means, squares) for t in own]
        with torch.cuda.device_of(weights[0]):
            _kernel()[(layout.owners.numel(),)](
                _send(torch.tensor(addresses), device),
                len(weights),
                layout.sizes,
                layout.owners,
                layout.starts,
                _rates(steps, group),
                # Without clipping the factor is 1: in another kernel the last bits might differ.
                layout.one if self.grad_factor is None else self.grad_factor,
                layout.zero if found_inf is None else found_inf,
                beta1,
                1 - beta1,
                beta2,
                1 - beta2,
                group["eps"],
                BLOCK=_BLOCK,
                num_warps=8,
            )
        # Autograd does not see what the kernel writes; a graph that holds the weights must know.
        torch.autograd.graph.increment_version(weights)
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))


def step(
    optimizer: Optimizer, found_inf: Tensor | None, kernel_step: KernelStep | None = None
) -> None:
    """A step of any optimizer, by the kernel where it fits; none where the flag is set.

    An optimizer that gets a flag looks at it on the device.
    """
    kernel_step = kernel_step or KernelStep.of(optimizer)
    if kernel_step is not None:
        kernel_step.take(found_inf)
        return
    if found_inf is None:
        optimizer.step()
        return
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    optimizer.step()
    # Of this step only: who calls `step` of the optimizer itself must not find it.
    optimizer.found_inf = None  # type: ignore[attr-defined]


class _Layout:
    """Which program works on which block of which tensor; eight bytes for a block."""

    def __init__(self, sizes: tuple[int, ...], device: torch.device) -> None:
        owners, starts = [], []
        for number, size in enumerate(sizes):
            blocks = torch.arange(-(-size // _BLOCK), dtype=torch.int32)
            starts.append(blocks)
            owners.append(torch.full_like(blocks, number))
        self.owners = _send(torch.cat(owners), device)
        self.starts = _send(torch.cat(starts), device)
        self.sizes = _send(torch.tensor(sizes), device)
        self.one, self.zero = torch.ones((), device=device), torch.zeros((), device=device)


# The same at every step, unless some parameters have no gradient now and then; inside the backward
# pass one for every size of a parameter. Few: each takes eight bytes for a thousand weights.
_layout = functools.lru_cache(maxsize=16)(_Layout)


def _send(values: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True)


def _rates(steps: list[Tensor], group: dict[str, Any]) -> Tensor:
    """For each parameter: step size, root of the second correction, decay; made in float64."""
    count = torch.stack(steps).double()
    (beta1, beta2), lr = group["betas"], group["lr"]
    sizes, roots = lr / (1 - beta1**count), (1 - beta2**count).sqrt()
    decay = torch.ones_like(count) * lr * group["weight_decay"]
    return torch.stack([sizes, roots, decay], dim=1).float()


def has_other_step(optimizer: Optimizer) -> bool:
    """Whether somebody put a `step` of their own on it; a scheduler of torch puts a wrapper."""
    own = optimizer.__dict__.get("step")
    if hasattr(own, "_wrapped_by_lr_sched"):
        own = getattr(own, "__wrapped__", own)
        return getattr(own, "__func__", own) is not type(optimizer).step
    return own is not None


def _is_watched(optimizer: Optimizer) -> bool:
    """Whether somebody would miss a call of `step` itself."""
    return bool(
        has_other_step(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optimizer_module._global_optimizer_pre_hooks
        or optimizer_module._global_optimizer_post_hooks
    )


def _is_plain(tensor: Tensor, like: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.is_cuda
        and tensor.dtype == torch.float32
        and tensor.layout == torch.strided
        and tensor.device == like.device
        and tensor.shape == like.shape
        and tensor.is_contiguous()
        and tensor.data_ptr() % _ALIGNMENT == 0
    )
