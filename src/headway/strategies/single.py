"""One process, one device.

Owns moving batches, accumulation, clipping and the withheld step on one device. Every collective
of the contract is the identity here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headway.checkpoint.component import StateComponent
from headway.data.counting import count_samples, count_targets, count_tokens
from headway.data.loader import Window, WindowLoader
from headway.errors import ConfigError
from headway.models.generation import generate
from headway.optim.adamw_step import KernelStep
from headway.optim.in_backward import BackwardSteps
from headway.precision.scaler import backward
from headway.strategies.base import DataShard, EvalStep, Notify, Strategy
from headway.strategies.movement import move_batch
from headway.strategies.objective import Objective
from headway.strategies.source import ModelSource
from headway.strategies.stepping import take_step


class SingleDevice(Strategy):
    """The strategy of a laptop and of one GPU.

    `step_in_backward` has the optimizer update each parameter inside the backward pass.
    """

    name = "single"

    def __init__(self, device: torch.device, *, step_in_backward: bool = False) -> None:
        self.device = device
        self._steps: BackwardSteps | None = None
        if step_in_backward:
            self.adopt = self._step_in_backward
        self._moves = self._reading_waits = device.type != "cpu"
        self._model: nn.Module | None = None
        self._parameters: list[nn.Parameter] = []
        self._kernel_step: KernelStep | None = None

    def setup(self, source: ModelSource) -> nn.Module:
        self._model = source.finish(source.build()).to(self.device)
        self._parameters = list(self._model.parameters())  # those too that are frozen for now
        return self._model

    def _step_in_backward(self, optimizer: torch.optim.Optimizer) -> None:
        if self._steps is not None:
            self._steps.close()
        self._steps = BackwardSteps(optimizer, reading_waits=self._reading_waits)

    def feed(self, loader: WindowLoader, *, training: bool = True) -> Iterator[Window]:
        return loader.windows() if training else single_batches(loader)

    def unwrap(self) -> nn.Module:
        assert self._model is not None, "setup comes first"
        return self._model

    def forward_backward(
        self, window: Window, objective: Objective, num_targets: int | Tensor, notify: Notify
    ) -> Tensor:
        model, total = self._model, None
        assert model is not None, "setup comes first"
        alone = len(window.micro_batches) == 1
        if self._steps is not None:
            check_whole(window)
        for batch in window.micro_batches:
            notify("on_forward_backward_begin")
            own = window.num_target_tokens if alone else objective.count_targets(batch)
            batch = move_batch(batch, self.device) if self._moves else batch
            with self.train_context():
                loss = objective.loss(model, batch, num_targets, own)
            if self._steps is None:
                backward(loss, self.loss_scale)
            else:
                with self._steps.during(loss.detach(), self.before_apply):
                    backward(loss, self.loss_scale)
            loss = loss.detach()
            total = loss if total is None else total + loss
            notify("on_forward_backward_end")
            notify("on_substep_end")
        assert total is not None, "a window has at least one micro-batch"
        if self.loss_scale is not None:
            self.loss_scale.unscale(self._parameters)
        return total

    def eval_forward(
        self, batch: Any, objective: Objective, *, with_logits: bool = False
    ) -> EvalStep:
        assert self._model is not None, "setup comes first"
        batch = move_batch(batch, self.device) if self._moves else batch
        with self.eval_context():
            return EvalStep(*objective.evaluate(self._model, batch, with_logits=with_logits))

    def clip(
        self, max_norm: float | None, in_step_of: torch.optim.Optimizer | None = None
    ) -> Tensor:
        norm, self._kernel_step = self._norm(), None
        if not max_norm or self._steps is not None:
            return norm
        if in_step_of is not None:
            self._kernel_step = KernelStep.of(in_step_of)
        # As in torch's clip_grads_with_norm_, which multiplies by 1 at most: equal to the bit.
        factor = max_norm / (norm + 1e-6)
        if self._kernel_step is not None:
            self._kernel_step.grad_factor = factor.clamp(max=1.0)
        elif self._reading_waits or not factor.item() >= 1:
            nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm, foreach=True)
        return norm

    def _norm(self) -> Tensor:
        if self._steps is not None:
            norms = self._steps.norms_of(self._parameters)
            zero = torch.zeros((), device=self.device)
            return torch.linalg.vector_norm(torch.stack(norms)) if norms else zero
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            return torch.zeros((), device=self.device)
        return nn.utils.get_total_norm(gradients, foreach=True)

    def apply(self, optimizer: torch.optim.Optimizer, loss: Tensor, grad_norm: Tensor) -> bool:
        if self._steps is not None:
            self._steps.finish()
            return True
        if self.before_apply is not None:
            self.before_apply()
        # Anything not finite in the two makes their sum so.
        return take_step(
            optimizer,
            loss + grad_norm,
            scale=self.loss_scale,
            reading_waits=self._reading_waits,
            kernel_step=self._kernel_step,
        )

    def reduce(self, value: Tensor, operation: str) -> Tensor:
        return value.abs() if operation == "l2_norm" else value

    def agree(self, value: int) -> int:
        return value

    def barrier(self) -> None:
        pass

    def data_shard(self) -> DataShard:
        return DataShard()

    def state_components(self) -> list[StateComponent]:
        return []

    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        with self.eval_context():
            return generate(self.unwrap(), input_ids.to(self.device), **options)

    def teardown(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        self._kernel_step = None
        self._model = None
        self._parameters = []


def check_whole(window: Window) -> None:
    """Refuse a step of several micro-batches: an update in the backward pass comes before its end.

    How many there are may follow from a global batch, so it is known only now.
    """
    if len(window.micro_batches) > 1:
        raise ConfigError(
            f"fuse_optim_with_backward cannot be used with {len(window.micro_batches)} "
            f"micro-batches in a step: the gradient has to be whole before the update"
        )


def single_batches(loader: WindowLoader) -> Iterator[Window]:
    """The batches of an evaluation pass on one rank, each as a window."""
    for batch in loader.batches():
        yield Window([batch], count_targets(batch), count_tokens(batch), count_samples(batch))
