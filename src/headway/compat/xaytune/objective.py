"""xaytune's loss: a function of model, batch and outputs, weighed as Headway weighs losses.

Owns the call of `loss_fn` and preference batches. Calling the model is Headway's Objective's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from headway.errors import ConfigError
from headway.strategies.objective import Count, Objective, weigh_mean

LossFn = Callable[[Any, Any, Any], Tensor]
_PREFERENCE_KEY = "chosen_input_ids"


class LossFnObjective(Objective):
    """Turns a batch into a loss by `loss_fn(model, batch, outputs)`, which returns a mean.

    A batch with `chosen_input_ids` is the function's own business: the model is not called before
    it, and `outputs` is None. Without a function the model's own loss counts.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None) -> None:
        super().__init__(model)
        self._loss_fn = loss_fn

    def loss(self, model: Callable[..., Any], batch: Any, num_targets: Count, own: Count) -> Tensor:
        if self._loss_fn is None:
            _refuse_preferences(batch)
            return super().loss(model, batch, num_targets, own)
        return weigh_mean(self._value(model, batch, own), own, num_targets)

    def evaluate(
        self, model: Callable[..., Any], batch: Any, *, with_logits: bool = False
    ) -> tuple[Tensor | None, Count, Tensor | None, Tensor | None]:
        if self._loss_fn is None:
            _refuse_preferences(batch)
            return super().evaluate(model, batch, with_logits=with_logits)
        own = self.count_targets(batch)
        return weigh_mean(self._value(model, batch, own).detach(), own, 1), own, None, None

    def _value(self, model: Callable[..., Any], batch: Any, own: Count) -> Tensor:
        assert self._loss_fn is not None
        outputs: Any = None
        if not _has_preferences(batch):
            inputs = batch
            if "return_logits" in self._accepts and isinstance(batch, Mapping):
                inputs = {**batch, "return_logits": True}  # our decoder keeps none otherwise
            # The batch's own count: `outputs.loss` is then the mean that a function expects.
            outputs = self._call(model, inputs, own)[0]
        value = self._loss_fn(model, batch, outputs)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ConfigError(f"loss_fn must return a tensor with one number, got {value!r}")
        return value.reshape(())


def _has_preferences(batch: Any) -> bool:
    return isinstance(batch, Mapping) and _PREFERENCE_KEY in batch


def _refuse_preferences(batch: Any) -> None:
    if _has_preferences(batch):
        raise ConfigError(
            f"a batch has {_PREFERENCE_KEY!r}, for which a model has no loss of its own; give "
            f"train() a loss_fn(model, batch, outputs)"
        )
