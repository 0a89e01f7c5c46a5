"""The contract between the loop and a way of running a model on devices.

Owns the `Strategy` surface, at most 14 methods. A strategy knows devices, process groups, gradient
synchronisation and accumulation; it knows nothing of learning rates, logging or paths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.checkpoint.component import StateComponent
from headway.data.loader import Window, WindowLoader
from headway.precision.amp import Context
from headway.precision.scaler import LossScale
from headway.strategies.objective import Objective
from headway.strategies.source import ModelSource

Notify = Callable[[str], None]


@dataclass(frozen=True)
class DataShard:
    """Which part of the global batch a process reads."""

    rank: int = 0
    world_size: int = 1
    speaks: bool = True
    """False where other processes read the same share, and one of them counts it."""


class Strategy(ABC):
    """How one optimizer step runs; the loop calls these and has no branch on which one it is."""

    name: str
    device: torch.device
    train_context: Context = nullcontext
    """Around every forward of training."""
    eval_context: Context = nullcontext
    """Around every forward of an evaluation or of sampling."""
    loss_scale: LossScale | None = None
    """The factor of the loss in float16; gradients are without it when `forward_backward` ends."""
    before_apply: Callable[[], None] | None = None
    """Called by `apply` before the optimizer changes anything: a save may still be copying."""
    adopt: Callable[[torch.optim.Optimizer], None] | None = None
    """Called with the optimizer before the first window, where a strategy has to know it."""
    before_save: Callable[[], None] | None = None
    """Called on all ranks before a save copies anything, where ranks may have grown apart."""
    forward_is_shared: bool = False
    """Whether ranks wait for each other inside a forward, so that one that fails leaves them."""

    @abstractmethod
    def setup(self, source: ModelSource) -> nn.Module:
        """Build and place the model; called before the optimizer is made.

        Returns what this rank trains: its parameters are the ones the optimizer gets.
        """

    @abstractmethod
    def feed(self, loader: WindowLoader, *, training: bool = True) -> Iterator[Window]:
        """This rank's windows to the end of the epoch; in an evaluation one batch each.

        Every rank gets the same number of them with the same number of micro-batches, if need be
        with fillers. `window.totals` counts over all ranks.
        """

    @abstractmethod
    def forward_backward(
        self, window: Window, objective: Objective, num_targets: int | Tensor, notify: Notify
    ) -> Tensor:
        """Run every micro-batch of a window and leave its gradients summed over ranks.

        Returns this rank's share of the loss: the sum over its targets divided by `num_targets`,
        the count over all ranks. `notify` delivers the micro-batch events.
        """

    @abstractmethod
    def eval_forward(
        self, batch: Any, objective: Objective, *, with_logits: bool = False
    ) -> EvalStep:
        """One evaluation batch without gradients."""

    @abstractmethod
    def clip(
        self, max_norm: float | None, in_step_of: torch.optim.Optimizer | None = None
    ) -> Tensor:
        """The total gradient norm; gradients are scaled down when it exceeds `max_norm`.

        Where nobody looks at them before the step of an optimizer, that may scale them itself.
        """

    @abstractmethod
    def apply(self, optimizer: torch.optim.Optimizer, loss: Tensor, grad_norm: Tensor) -> bool:
        """Take the optimizer step, unless loss or norm is not finite, and clear the gradients.

        False where an overflow of scaled gradients withheld it: then the schedule stays as well.
        """

    @abstractmethod
    def reduce(self, value: Tensor, operation: str) -> Tensor:
        """Join a tensor over the ranks: "sum", "mean", "max" or "l2_norm"."""

    @abstractmethod
    def agree(self, value: int) -> int:
        """One decision for all ranks: the bitwise or of what each rank brings."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def data_shard(self) -> DataShard:
        """Which share of the data this process reads."""

    @abstractmethod
    def state_components(self) -> list[StateComponent]:
        """State of the strategy itself that a checkpoint must hold."""

    @abstractmethod
    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        """Sample text from the model in training."""

    @abstractmethod
    def unwrap(self) -> nn.Module:
        """The user's model, without wrappers."""

    @abstractmethod
    def teardown(self) -> None:
        """Release what `setup` took."""


@dataclass
class EvalStep:
    """What one evaluation batch gave, on the device."""

    loss_sum: Tensor | None
    """Sum over targets; None when the batch has nothing to compare with."""
    num_targets: int | Tensor
    logits: Tensor | None = None
    labels: Tensor | None = None
