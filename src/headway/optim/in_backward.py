"""The optimizer's step inside the backward pass, parameter by parameter.

Owns: the hooks that update a parameter when its gradient is complete and then free the gradient,
and the norms that are left of the gradients. Does not own: when a backward pass runs (strategies).

The run keeps its one optimizer, which schedulers and checkpoints know. A scratch copy of it steps
in its place, with the same state, over one parameter at a time.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from headway.errors import ConfigError
from headway.optim.adamw_step import has_other_step, step
from headway.optim.multi import JoinedOptimizer

_OPTION = "fuse_optim_with_backward"


class BackwardSteps:
    """Updates the parameters of an optimizer while gradients are made.

    Parameters that are `later` wait for `finish`: their gradient is not whole when the backward
    pass has made it. `reading_waits` says that a look at a value waits for the device. The hooks
    go with this object.
    """

    def __init__(
        self, optimizer: Optimizer, *, later: Collection[Tensor] = (), reading_waits: bool
    ) -> None:
        parts = optimizer.parts if isinstance(optimizer, JoinedOptimizer) else [optimizer]
        if any(has_other_step(part) for part in (optimizer, *parts)):
            raise ConfigError(
                f"{_OPTION}=True calls the step of the optimizer's class for one parameter at a "
                "time, and somebody put another step on this optimizer, which would be passed "
                f"over; take it off, or set {_OPTION}=False"
            )
        self._optimizer, self._reading_waits = optimizer, reading_waits
        self.norms: dict[int, Tensor] = {}
        """Norms of the gradients of this step that are gone, by `id` of the parameter."""
        self._loss: Tensor | None = None
        self._active = False
        self._checked: set[int] = set()
        self._scratches: dict[int, Optimizer] = {}
        self._places: dict[int, tuple[int, int]] = {}
        handles: list[RemovableHandle] = []
        waiting = {id(param) for param in later}
        hook = _weak_hook(self)
        for number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                self._places[id(param)] = (number, index)
                if param.requires_grad and id(param) not in waiting:
                    handles.append(param.register_post_accumulate_grad_hook(hook))
        self._take_off = weakref.finalize(self, _remove, handles)
        self._take_off.atexit = False

    @contextmanager
    def during(self, loss: Tensor | None, before: Callable[[], None] | None) -> Iterator[None]:
        """Around the backward pass of a step; nothing is updated if `loss` is not finite.

        `before` is called at once, since the first update is not far. Also after a pass that fails,
        the next one of somebody else updates nothing.
        """
        if before is not None:
            before()
        self.norms.clear()
        self._loss, self._active = loss, True
        try:
            yield
        finally:
            self._active = False

    def finish(self) -> None:
        """Update what the hooks did not, and close the step."""
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param)
        self._loss = None
        # torch's schedulers look for it, to warn of a step of theirs that came too early.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def norms_of(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Norms of the gradients of these parameters, gone or still there, in their order."""
        found = []
        for param in parameters:
            if id(param) in self.norms:
                found.append(self.norms[id(param)])
            elif param.grad is not None:
                found.append(_norm(param.grad))
        return found

    def close(self) -> None:
        """Take the hooks off."""
        self._take_off()

    def _on_gradient(self, param: Tensor) -> None:
        if not self._active:  # a backward pass of somebody else
            return
        if id(param) in self.norms:
            number, index = self._places[id(param)]
            names = self._optimizer.param_groups[number].get("param_names")
            raise ConfigError(
                f"{_OPTION}: the gradient of {names[index] if names else 'a parameter'} came in "
                f"two parts, and the update was made with the first; recompute activations with "
                f"use_reentrant=False, or switch {_OPTION} off"
            )
        self._update(param)

    @torch.no_grad()
    def _update(self, param: Tensor) -> None:
        assert param.grad is not None
        norm = self.norms[id(param)] = _norm(param.grad)
        # Anything not finite in the two makes their sum so.
        decides = norm if self._loss is None else norm + self._loss
        number, index = self._places[id(param)]
        scratch = self._scratch(number)
        group = self._optimizer.param_groups[number]
        own = {**group, "params": [param]}
        if "param_names" in group:
            own["param_names"] = [group["param_names"][index]]
        scratch.param_groups, scratch.state = [own], self._optimizer.state
        if self._reading_waits and getattr(scratch, "_step_supports_amp_scaling", False):
            # A finite number minus itself is 0; no other is.
            self._step(scratch, (decides - decides != 0).float(), number, own)
        elif math.isfinite(decides.item()):
            self._step(scratch, None, number, own)
        param.grad = None

    def _scratch(self, number: int) -> Optimizer:
        """What steps for the optimizer of a group."""
        part = self._optimizer
        if isinstance(part, JoinedOptimizer):
            part = part.part_of(number)
        if id(part) not in self._scratches:
            scratch: Optimizer = object.__new__(type(part))
            # A scheduler puts a step of its own on the instance.
            scratch.__dict__.update({k: v for k, v in part.__dict__.items() if k != "step"})
            scratch._optimizer_step_pre_hooks = OrderedDict()
            scratch._optimizer_step_post_hooks = OrderedDict()
            self._scratches[id(part)] = scratch
        return self._scratches[id(part)]

    def _step(
        self, scratch: Optimizer, found_inf: Tensor | None, number: int, own: dict[str, Any]
    ) -> None:
        if number in self._checked:
            step(scratch, found_inf)
            return
        before, numbers = dict(own), _numbers(scratch)
        step(scratch, found_inf)
        changed = [key for key, value in own.items() if before.get(key) is not value]
        changed += [key for key, value in _numbers(scratch).items() if numbers.get(key) != value]
        if changed:
            raise ConfigError(
                f"{_OPTION} cannot be used with {type(scratch).__name__}, which keeps "
                f"{', '.join(changed)} for all parameters together; use an optimizer that treats "
                f"each parameter on its own, such as AdamW, or switch {_OPTION} off"
            )
        self._checked.add(number)


def _weak_hook(steps: BackwardSteps) -> Callable[[Tensor], None]:
    # Python's collector does not look into these hooks: one that held the optimizer, and so the
    # parameters that hold the hook, would keep all of them for ever.
    found = weakref.ref(steps)

    def on_gradient(param: Tensor) -> None:
        own = found()
        if own is not None:
            own._on_gradient(param)

    return on_gradient


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _numbers(optimizer: Optimizer) -> dict[str, Any]:
    return {k: v for k, v in optimizer.__dict__.items() if type(v) in (int, float)}


def _norm(gradient: Tensor) -> Tensor:
    # The same function that makes the norm of whole gradients, so that the sum is the same.
    return torch._foreach_norm([gradient])[0]
