"""Training on an Accelerator: Accelerate chooses device, precision and wrapper.

Owns: driving one window through a prepared model, and the loss scale of fp16. Does not own: the
data (headway's own loader feeds every rank), the optimizer (the trainer's stays as it is), and
whether an Accelerator can be used (accelerator.py). With DeepSpeed the engine is zero.py's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headway.checkpoint.component import SharingPattern, StateComponent
from headway.data.loader import Window, WindowLoader
from headway.dist.group import DistributedContext
from headway.models.generation import generate
from headway.strategies.accelerator import (
    DEEPSPEED,
    check_accelerator,
    distributed_type,
    reconcile,
)
from headway.strategies.base import EvalStep, Notify
from headway.strategies.objective import Objective
from headway.strategies.ranked import (
    RankedStrategy,
    join_buffers,
    own_targets,
    spread_nonfinite,
)
from headway.strategies.single import single_batches
from headway.strategies.source import ModelSource
from headway.strategies.unfrozen import UnfrozenLater
from headway.strategies.zero import ZeroEngine, check_zero

if TYPE_CHECKING:
    from accelerate import Accelerator


class AccelerateStrategy(RankedStrategy):
    """One process or several, as the Accelerator says."""

    name = "accelerate"

    def __init__(self, accelerator: Any, args: Any) -> None:
        accelerator = check_accelerator(accelerator)
        reconcile(accelerator, args)
        self._uses_deepspeed = distributed_type(accelerator) == DEEPSPEED
        self.forward_is_shared = self._uses_deepspeed  # weights may be gathered layer by layer
        if self._uses_deepspeed:
            check_zero(accelerator, args)
        self.accelerator: Accelerator = accelerator
        device = accelerator.device
        if device.type == "cpu":
            # Accelerate numbers CPUs by rank; a tensor on one compares unequal to "cpu".
            device = torch.device("cpu")
        context = DistributedContext(
            accelerator.process_index, accelerator.num_processes, accelerator.local_process_index
        )
        self._alone = not context.is_distributed
        if self._alone:
            self.context, self.device = context, device
            self._moves = self._reading_waits = device.type != "cpu"
        else:
            super().__init__(context, device, dispatch=bool(accelerator.dispatch_batches))
            self.before_save = self._join_buffers
        self._model: nn.Module | None = None
        self._prepared: nn.Module | None = None
        self._parameters: list[nn.Parameter] = []
        self._zero: ZeroEngine | None = None
        self._unfrozen: UnfrozenLater | None = None

    def _join_buffers(self) -> None:
        """Such as running means, which every rank has of its own data; one is saved."""
        join_buffers(self.unwrap(), self._host)

    # -- the model --------------------------------------------------------------------------

    def setup(self, source: ModelSource) -> nn.Module:
        model = source.finish(source.build()).to(self.device)
        self._model = model
        self._parameters = list(model.parameters())  # those too that are frozen for now
        self._own_forward = model.__dict__.get("forward")
        if self._uses_deepspeed:
            self._zero = ZeroEngine(self.accelerator, model)
        else:
            self._prepared = self.accelerator.prepare(model)
            self._unfrozen = UnfrozenLater(model)
        return model

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of the optimizer once it is made: DeepSpeed needs it before a forward."""
        if self._zero is not None:
            self._zero.adopt(optimizer)

    def called_model(self) -> nn.Module:
        if self._zero is not None and self._zero.engine is not None:
            engine: nn.Module = self._zero.engine
            return engine
        return self.unwrap()

    def unwrap(self) -> nn.Module:
        assert self._model is not None, "setup comes first"
        return self._model

    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        with self.accelerator.autocast():
            return generate(self.unwrap(), input_ids.to(self.device), **options)

    def teardown(self) -> None:
        model, prepared = self._model, self._prepared
        if self._zero is not None:
            prepared = self._zero.engine
            self._zero.close()
        if model is not None:
            # Accelerate marks the model and replaces its forward; the user's model leaves as it
            # came, so that another run may prepare it again.
            for name in ("forward", "_original_forward", "_is_accelerate_prepared"):
                model.__dict__.pop(name, None)
            if self._own_forward is not None:
                model.__dict__["forward"] = self._own_forward
            kept = [m for m in self.accelerator._models if m is not model and m is not prepared]
            self.accelerator._models[:] = kept
        self._model = self._prepared = self._zero = self._unfrozen = None
        self._parameters = []

    # -- the step ---------------------------------------------------------------------------

    def forward_backward(
        self, window: Window, objective: Objective, num_targets: int | Tensor, notify: Notify
    ) -> Tensor:
        model = self._prepared if self._zero is None else self._zero.ready()
        assert model is not None, "setup comes first"
        total, last = None, len(window.micro_batches) - 1
        for number, batch in enumerate(window.micro_batches):
            notify("on_forward_backward_begin")
            own = own_targets(window, number, objective)
            with self._reducing(number == last):
                with self.accelerator.autocast(), self.train_context():
                    loss = objective.loss(model, self._move(batch), num_targets, own)
                if number > last - window.num_fillers:
                    loss = loss.nan_to_num(0.0, 0.0, 0.0) * 0
                self._backward(spread_nonfinite(loss), last=number == last)
            loss = loss.detach()
            total = loss if total is None else total + loss
            notify("on_forward_backward_end")
            notify("on_substep_end")
        assert total is not None, "a window has at least one micro-batch"
        if self._unfrozen is not None and not self._alone:
            self._unfrozen.reduce()
        return total

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        # Ranks average their gradients, and Accelerate divides by the accumulation; the share is
        # normalised already.
        if self._zero is not None:
            self._zero.backward(loss * self.context.world_size, last=last)
            return
        steps = self.accelerator.gradient_accumulation_steps
        self.accelerator.backward(loss * (self.context.world_size * steps))

    def _reducing(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Whether this backward reduces over ranks: the last one, or all where the user says so."""
        each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if last or each or self._alone or self._zero is not None:
            return contextlib.nullcontext()
        skips: contextlib.AbstractContextManager[Any] = self.accelerator.no_sync(self._prepared)
        return skips

    def eval_forward(
        self, batch: Any, objective: Objective, *, with_logits: bool = False
    ) -> EvalStep:
        with self.accelerator.autocast():
            return super().eval_forward(batch, objective, with_logits=with_logits)

    def clip(
        self, max_norm: float | None, in_step_of: torch.optim.Optimizer | None = None
    ) -> Tensor:
        if self._zero is not None and self._zero.stage:
            return self._zero.norm(max_norm).to(self.device)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            return torch.zeros((), device=self.device)
        norm = nn.utils.get_total_norm(gradients, foreach=True)
        scaler = self.accelerator.scaler
        if scaler is not None:
            # The gradients stay scaled until the step, which takes the scale out and sees
            # whether they are finite; the factor of clipping is the same for both.
            norm = norm / scaler.scale(torch.ones((), device=norm.device))
        if max_norm:
            nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm, foreach=True)
        return norm

    def apply(self, optimizer: torch.optim.Optimizer, loss: Tensor, grad_norm: Tensor) -> bool:
        scaler = self.accelerator.scaler
        if self._zero is not None and self._zero.stage:
            if self.before_apply is not None:
                self.before_apply()
            self._zero.step()
            return True
        if scaler is None:
            # Anything not finite in the two makes their sum so; ranks go by the norm, which is
            # the same on all of them.
            decides = loss + grad_norm if self._alone else grad_norm
            return super().apply(optimizer, loss, decides)
        if self.before_apply is not None:
            self.before_apply()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return bool(scaler.get_scale() >= before)  # it falls after an overflow and only then

    def state_components(self) -> list[StateComponent]:
        if self._zero is not None:
            return self._zero.components()
        scaler = self.accelerator.scaler
        if scaler is None:
            return []
        # Not required: a run that goes on from one without loss scaling finds its own scale.
        return [StateComponent("scaler", scaler, SharingPattern.REPLICATED, required=False)]

    # -- alone, every collective is the identity ----------------------------------------------

    def feed(self, loader: WindowLoader, *, training: bool = True) -> Iterator[Window]:
        if not self._alone:
            if not training:
                self._join_buffers()
            return super().feed(loader, training=training)
        return loader.windows() if training else single_batches(loader)

    def agree(self, value: int) -> int:
        return value if self._alone else super().agree(value)

    def barrier(self) -> None:
        if not self._alone:
            super().barrier()

    def reduce(self, value: Tensor, operation: str) -> Tensor:
        if not self._alone:
            return super().reduce(value, operation)
        return value.abs() if operation == "l2_norm" else value
