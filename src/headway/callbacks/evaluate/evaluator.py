"""What an evaluator is: a name, batches, and figures made of what the model says of each batch.

Owns: the base class, what it is handed for a batch, and the order in which batches come.
Does not own: who takes which batch (passes.py), when it happens (evaluator_callback.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.callbacks.watch.ranges import require_flag, require_name
from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Join = Callable[["Tensor"], "Tensor"]
"""Adds a tensor up over all ranks; every rank must call it."""


@dataclass
class BatchScores:
    """What the model said of one batch, on its device."""

    loss_sum: Tensor
    """Cross entropy in nats, summed over the targets."""
    num_targets: int | Tensor
    token_losses: Tensor | None = None
    """[rows, length]: cross entropy of each label, at the label's place; 0 where there is none."""
    is_greedy: Tensor | None = None
    """[rows, length]: whether the label is the likeliest token; true where there is none."""


@dataclass(frozen=True)
class ModelLimits:
    """What a model can take, as far as it says so."""

    vocab_size: int | None
    num_positions: int | None


class Evaluator(ABC):
    """Measures a model on its own batches.

    `batches` can be gone through again and again; `batches_factory` makes them at first use. A
    batch is a dict with `input_ids` and `labels` (-100 where nothing is to be predicted). Every
    rank is given the same batches in the same order and takes its share of them.

    `deterministic`: each pass sees the batches in one and the same order, so that one cut short
    measures the same data every time. Otherwise each pass has its own.
    """

    needs_tokens: bool = False
    """Whether `token_losses` and `is_greedy` are wanted; they cost the memory of the logits."""

    def __init__(
        self,
        name: str,
        batches: Any = None,
        batches_factory: Callable[[], Any] | None = None,
        deterministic: bool = True,
    ) -> None:
        kind = type(self).__name__
        require_name(f"{kind}: name", name)
        require_flag(f"{kind}: deterministic", deterministic)
        if (batches is None) == (batches_factory is None):
            raise ConfigError(
                f"{kind} {name!r}: give batches or batches_factory, {_both(batches)} given"
            )
        if batches is not None and iter(batches) is batches:
            raise ConfigError(
                f"{kind} {name!r}: batches can be gone through only once ({type(batches).__name__}"
                "); give a list, a loader, or batches_factory"
            )
        self.name = name
        self.deterministic = deterministic
        self._batches = batches
        self._factory = batches_factory

    @property
    def title(self) -> str:
        """Tells it from other evaluators; what its metrics begin with."""
        return self.name

    @property
    def batches(self) -> Any:
        if self._batches is None:
            assert self._factory is not None
            self._batches = self._factory()
        return self._batches

    def check(self, limits: ModelLimits) -> None:
        """Before the first step, on every rank: refuse what the run's model cannot take."""
        batches = self._batches
        if batches is not None and hasattr(batches, "__len__") and len(batches) == 0:
            raise ConfigError(f"{type(self).__name__} {self.title!r}: batches is empty")

    def set_order(self, number: int) -> None:
        """Tell the batches, if they want to know, which of the possible orders is meant."""
        tell = getattr(self.batches, "set_epoch", None)
        if callable(tell):
            tell(0 if self.deterministic else number)

    @abstractmethod
    def reset_metrics(self) -> None:
        """A pass begins."""

    @abstractmethod
    def update_metrics(self, batch: Any, scores: BatchScores) -> None:
        """Take in one batch. In a pipeline only where its last stage is."""

    @abstractmethod
    def compute_metrics(self, join: Join) -> dict[str, float]:
        """The figures of a pass, the same on all ranks; every rank calls it."""


def _both(batches: Any) -> str:
    return "neither was" if batches is None else "both were"
