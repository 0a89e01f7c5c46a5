"""From a batch to a loss: how a model is called and what its output means.

Owns the reading of signatures and outputs, so that Headway's decoder, transformers models and any
`nn.Module` train alike. The loss is the sum over targets divided by a count given from outside;
nothing is rescaled later. Does not own devices or gradients (strategies).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from headway.data.counting import are_beside_inputs, count_labels, count_targets
from headway.errors import ConfigError, naming
from headway.models.fused_loss import FusedLoss
from headway.models.hf import is_of_transformers, names_taken, predicts_next_token
from headway.models.loss import cross_entropy_sum

logger = logging.getLogger(__name__)

LossFunction = Callable[..., Tensor]
Count = int | Tensor
# Labels have a use of their own, and documents a warning.
_TOLD_ELSEWHERE = ("labels", "document_ids")


class Objective:
    """Calls one model with batches and turns what it returns into a loss."""

    def __init__(
        self,
        model: nn.Module,
        compute_loss_func: LossFunction | None = None,
        fused: FusedLoss | None = None,
    ) -> None:
        # What stands in for a model of another class, such as a part of it, says so.
        kind: type = getattr(model, "stands_for", type(model))
        self._model_name = kind.__name__
        parameters = inspect.signature(model.forward).parameters
        self._accepts = {
            name
            for name, p in parameters.items()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        self._requires = {
            name for name in self._accepts if parameters[name].default is inspect.Parameter.empty
        }
        self._filters = names_taken(model) is not None
        # Only by name. transformers' models take it in **kwargs, but many ignore it and return a
        # mean, and what some add to their loss (a router's) is not divided by it.
        self._takes_count = "num_items_in_batch" in self._accepts
        # A cache is for generation. Without one transformers keeps packed documents apart by their
        # positions, as it does while blocks are recomputed.
        self._leaves_cache = is_of_transformers(kind) and "use_cache" in self._accepts
        self._leaves_cache &= not hasattr(model, "stands_for")
        self._computes, self._fused = compute_loss_func, fused
        self._takes_labels = "labels" in self._accepts or not self._filters
        self.shifts_labels = predicts_next_token(model)
        """Whether the first label of a row is nobody's target, as batches by themselves count."""
        self._warned = False
        self._told_dropped: set[str] = set()

    def count_targets(self, batch: Any) -> Count:
        """What the model predicts of a batch, by which its losses are weighed."""
        return count_targets(batch) if self.shifts_labels else count_labels(batch)

    def loss(self, model: Callable[..., Any], batch: Any, num_targets: Count, own: Count) -> Tensor:
        """The batch's share of the window's loss: its sum over targets / `num_targets`.

        `own` is the batch's own count of targets, by which a model's mean is weighed.
        """
        share = self._fuse(model, batch, num_targets)
        if share is not None:
            return share
        outputs, labels, counted = self._call(model, batch, num_targets)
        if self._computes is not None:
            with naming("compute_loss_func"):
                found = self._computes(outputs, labels, num_items_in_batch=num_targets)
            return _require_loss(found)
        loss = _find_loss(outputs)
        if loss is not None:
            return loss if counted else weigh_mean(loss, own, num_targets)
        return self._from_logits(outputs, labels, batch) / num_targets

    def evaluate(
        self, model: Callable[..., Any], batch: Any, *, with_logits: bool = False
    ) -> tuple[Tensor | None, Count, Tensor | None, Tensor | None]:
        """(sum over targets, their count, logits, labels) of one batch."""
        own = self.count_targets(batch)
        if with_logits and "return_logits" in self._accepts and isinstance(batch, Mapping):
            batch = {**batch, "return_logits": True}  # our decoder keeps none otherwise
        outputs, labels, _ = self._call(model, batch, _at_least_one(own))
        logits = _find_logits(outputs)
        loss = _find_loss(outputs)
        if self._computes is not None:
            with naming("compute_loss_func"):
                loss = self._computes(outputs, labels, num_items_in_batch=_at_least_one(own))
            if loss is not None or labels is not None:  # a prediction may be of unlabelled data
                loss = _require_loss(loss)
        if loss is not None:
            return weigh_mean(loss.detach(), own, 1), own, logits, labels
        if labels is None:
            return None, own, logits, labels
        return self._from_logits(outputs, labels, batch).detach(), own, logits, labels

    @property
    def needs_targets(self) -> bool:
        """Whether a step without a label that counts has no loss; a function of the user's may."""
        return self._computes is None

    def _fuse(self, model: Callable[..., Any], batch: Any, num_targets: Count) -> Tensor | None:
        """The loss as the model's head gives it, where a fused loss is wanted and possible."""
        if self._fused is None or not self._fused.active or not isinstance(batch, Mapping):
            return None
        labels = batch.get("labels")
        if not isinstance(labels, Tensor):
            return None
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        if self._filters:
            self._warn_about_lost_documents(inputs)
            self._warn_about_dropped(inputs)
            inputs = {key: value for key, value in inputs.items() if key in self._accepts}
        if self._leaves_cache:
            inputs.setdefault("use_cache", False)
        return self._fused.loss(model, inputs, labels, num_targets)

    def _call(
        self, model: Callable[..., Any], batch: Any, num_targets: Count
    ) -> tuple[Any, Tensor | None, bool]:
        """Call the model; returns its output, the labels, and whether it was given the count."""
        if isinstance(batch, Mapping):
            inputs = dict(batch)
            labels = inputs.get("labels")
            if self._filters:
                self._warn_about_lost_documents(inputs)
                self._warn_about_dropped(inputs)
                inputs = {key: value for key, value in inputs.items() if key in self._accepts}
            if self._computes is not None or not self._takes_labels:
                inputs.pop("labels", None)
            counted = self._takes_count and "labels" in inputs
            if counted:
                inputs["num_items_in_batch"] = num_targets
            if self._leaves_cache:
                inputs.setdefault("use_cache", False)
            if not self._requires <= inputs.keys():
                self._refuse_batch(batch, inputs)
            return model(**inputs), labels, counted
        if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2:
            return model(batch[0]), batch[1], False
        if isinstance(batch, Tensor):
            return model(batch), None, False
        raise ConfigError(
            f"a batch must be a dict of tensors, a pair (inputs, labels) or a tensor, not a "
            f"{type(batch).__name__}; the data collator decides"
        )

    def _refuse_batch(self, batch: Mapping[str, Any], inputs: Mapping[str, Any]) -> NoReturn:
        missing = ", ".join(repr(name) for name in sorted(self._requires - inputs.keys()))
        raise ConfigError(
            f"the model {self._model_name} needs {missing}, which the batch does not have; it has "
            f"{', '.join(map(str, batch))}. The data collator decides what a batch has"
        )

    def _warn_about_lost_documents(self, inputs: Mapping[str, Any]) -> None:
        if not self._warned and "document_ids" in inputs and "document_ids" not in self._accepts:
            self._warned = True
            logger.warning(
                "%s takes no document_ids: tokens of one pack may attend to each other across "
                "documents. Use headway.models.Decoder or unpacked data to keep them apart.",
                self._model_name,
            )

    def _warn_about_dropped(self, inputs: Mapping[str, Any]) -> None:
        """Tell, once each, which tensors of a batch the model does not take."""
        for name, value in inputs.items():
            if name in self._accepts or name in _TOLD_ELSEWHERE or name in self._told_dropped:
                continue
            if not isinstance(value, Tensor):
                continue
            self._told_dropped.add(name)
            if name == "attention_mask" and bool(value.all()):
                continue  # one look, at the first that there is: collators make it for padding
            logger.warning(
                "%s takes no %s: what the batch has of it is left out", self._model_name, name
            )

    def _from_logits(self, outputs: Any, labels: Tensor | None, batch: Any) -> Tensor:
        logits = _find_logits(outputs)
        if logits is None:
            raise ConfigError(
                f"the model {self._model_name} returns no loss: its output "
                f"({type(outputs).__name__}) holds neither a scalar loss nor logits. Return an "
                f"object or dict with 'loss' or 'logits', or a scalar tensor, or pass "
                f"compute_loss_func"
            )
        if labels is None:
            raise ConfigError(
                f"the model {self._model_name} returns no loss and the batch has no 'labels' to "
                f"compare its logits with; add labels in the data collator"
            )
        if logits.shape[:-1] == labels.shape and not labels.is_floating_point():
            if are_beside_inputs(batch, labels):
                return cross_entropy_sum(logits, labels)
            return torch.nn.functional.cross_entropy(
                logits.flatten(0, -2).float(), labels.flatten(), ignore_index=-100, reduction="sum"
            )
        raise ConfigError(
            f"logits of shape {tuple(logits.shape)} from {self._model_name} do not fit labels of "
            f"shape {tuple(labels.shape)} ({labels.dtype}) as classes, which stand last in "
            "logits; pass compute_loss_func to say what the loss is"
        )


def _require_loss(loss: Any) -> Tensor:
    """The loss that the user's function made."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ConfigError(f"compute_loss_func must return a tensor of one number, got {got}")
    return loss.reshape(())


def _at_least_one(count: Count) -> Count:
    return max(1, count) if isinstance(count, int) else count.clamp(min=1)


def weigh_mean(mean: Tensor, own: Count, num_targets: Count) -> Tensor:
    """A mean over `own` targets as a share of `num_targets`.

    The mean over no target is not a number; its share is nothing, and so is its gradient.
    """
    if own is num_targets or (isinstance(own, int) and own == num_targets):
        return mean
    if isinstance(own, int):
        return mean * (own / num_targets) if own else mean.nan_to_num(0.0, 0.0, 0.0) * 0
    return torch.where(own > 0, mean, 0.0) * (own / num_targets)


def _field(outputs: Any, name: str) -> Any:
    if isinstance(outputs, Mapping):
        return outputs.get(name)
    return getattr(outputs, name, None)


def _find_loss(outputs: Any) -> Tensor | None:
    if isinstance(outputs, Tensor):
        return outputs if outputs.dim() == 0 else None
    loss = _field(outputs, "loss")
    if loss is None and isinstance(outputs, tuple | list):
        # Wherever it stands: some models give (logits, loss).
        loss = next((o for o in outputs if _is_number(o)), None)
    if not isinstance(loss, Tensor):
        return None
    if loss.numel() != 1:
        raise ConfigError(
            f"the model's loss has the shape {list(loss.shape)}; one number is needed: reduce it "
            "in the model (its mean over targets), or pass compute_loss_func"
        )
    return loss.reshape(())


def _is_number(value: Any) -> bool:
    one = isinstance(value, Tensor) and value.numel() == 1 and value.dim() < 2
    return one and value.is_floating_point()


def _find_logits(outputs: Any) -> Tensor | None:
    if isinstance(outputs, Tensor):
        return outputs if outputs.dim() >= 2 else None
    logits = _field(outputs, "logits")
    if logits is None and isinstance(outputs, tuple | list):
        logits = next((o for o in outputs if isinstance(o, Tensor) and o.dim() >= 2), None)
    return logits if isinstance(logits, Tensor) else None
