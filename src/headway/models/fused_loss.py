"""Losses that share the output layer: from hidden states to a loss, without whole logits.

Owns: `FusedLoss`, which has a model's head give the loss, and the factories for `fused_loss`.
Does not own: what the loss is divided by (engine/), the chunked loss itself (loss.py).

The loss is made inside the model's forward, in the place of the logits. So wrappers that look at
what a forward gives see the head used, and a sharded head is whole at that moment.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import ConfigError, missing_extra, unknown
from headway.models.loss import IGNORED_LABEL, chunked_cross_entropy, shift_labels
from headway.models.norm import compute_dtype
from headway.precision.quantized import computes_as_its_weight

logger = logging.getLogger(__name__)

FusedLossFunction = Callable[..., Tensor]
"""Called with hidden states [B, S, D], labels [B, S] (not shifted) and `num_items_in_batch`."""
FusedLossFactory = Callable[[nn.Module], FusedLossFunction]
"""Called with the output layer."""


@dataclass
class _Request:
    """What the head is asked for: a loss for these labels, or, without any, its logits."""

    labels: Tensor | None = None
    num_items: int | Tensor | None = None
    made: Tensor | None = None


class _FusedHead:
    """The forward of an output layer that gives a loss where one is asked for."""

    def __init__(self, head: nn.Module, loss: FusedLossFunction, request: _Request) -> None:
        # An object and not a closure: a copy of the model gets a copy that knows its own head.
        self._head, self._loss, self._request = head, loss, request

    def __call__(self, hidden: Tensor) -> Any:
        request = self._request
        if request.labels is None:
            return type(self._head).forward(self._head, hidden)
        request.made = self._loss(hidden, request.labels, num_items_in_batch=request.num_items)
        return request.made


class FusedLoss:
    """Gives a model's loss by way of its head; inactive where the model does not lend itself."""

    def __init__(self, factory: FusedLossFactory) -> None:
        self._factory = factory
        self._request = _Request()
        self._checked = False
        self.active = False

    def install(self, module: nn.Module) -> None:
        """Prepare a model, or a part of one; a warning says why it cannot be done."""
        if getattr(module, "plain_loss", False):
            self._give_up("a zero-bubble schedule makes the gradients of inputs and weights apart")
            return
        if getattr(module, "last", True) is False:  # a stage that has no head
            return
        find = getattr(module, "get_output_embeddings", None)
        head = find() if callable(find) else None
        if not isinstance(head, nn.Module) or not isinstance(getattr(head, "weight", None), Tensor):
            self._give_up(
                f"{type(module).__name__} has no output layer that get_output_embeddings() gives"
            )
            return
        if not computes_as_its_weight(head):
            self._give_up(
                f"the output layer became a {type(head).__name__}, and a loss made of its weight "
                "would pass over what that computes (fp8_exclude and qat_exclude leave it whole)"
            )
            return
        loss = self._factory(head)
        if not callable(loss):
            raise ConfigError(f"fused_loss_factory must return a function, got {loss!r}")
        head.forward = _FusedHead(head, loss, self._request)  # type: ignore[method-assign]
        self.active = True

    def loss(
        self,
        model: Callable[..., Any],
        inputs: Mapping[str, Any],
        labels: Tensor,
        num_items: int | Tensor,
    ) -> Tensor | None:
        """The loss of a batch; None where the model turned out to change what its head gives."""
        request = self._request
        request.labels, request.num_items = labels, num_items
        try:
            outputs = model(**inputs)
            made = request.made
        finally:
            request.labels = request.num_items = request.made = None
        given = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
        share: Tensor = given
        if not self._checked:
            self._checked = True
            # One look at the device, in the first step only.
            if made is None or share.shape != made.shape or not torch.equal(share, made):
                self._give_up("the model works on its logits after the output layer")
                return None
        return share

    def _give_up(self, reason: str) -> None:
        self.active = False
        logger.warning("fused loss: %s; the model's own loss is used instead", reason)


def chunked_loss(head: nn.Module) -> FusedLossFunction:
    """Headway's own: chunk by chunk, on every device."""

    def loss(
        hidden: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None = None
    ) -> Tensor:
        return chunked_cross_entropy(
            hidden,
            head.weight,  # type: ignore[arg-type]
            shift_labels(labels),
            num_items=num_items_in_batch,
            bias=getattr(head, "bias", None),
        )

    return loss


def liger_loss(head: nn.Module) -> FusedLossFunction:
    """The fused linear cross entropy of liger-kernel; needs a GPU that triton knows."""
    fused = _load("liger").LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORED_LABEL, reduction="sum"
    )

    def loss(
        hidden: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None = None
    ) -> Tensor:
        rows, weight, bias, flat = _flatten(head, hidden, labels)
        total: Tensor = fused(weight, rows, flat, bias)
        return total / _count(num_items_in_batch, flat)

    return loss


def cut_cross_entropy_loss(head: nn.Module) -> FusedLossFunction:
    """Apple's cut cross entropy; needs a GPU that triton knows and half precision."""
    linear_cross_entropy = _load("cut_cross_entropy").linear_cross_entropy
    takes_bias = "bias" in inspect.signature(linear_cross_entropy).parameters
    if getattr(head, "bias", None) is not None and not takes_bias:
        raise ConfigError(
            "fused_loss='cut_cross_entropy': the installed cut-cross-entropy takes no bias and the "
            "model's head has one; use fused_loss='chunked' or 'liger'"
        )

    def loss(
        hidden: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None = None
    ) -> Tensor:
        rows, weight, bias, flat = _flatten(head, hidden, labels)
        if rows.dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f"fused_loss='cut_cross_entropy' computes in bfloat16 or float16, the hidden "
                f"states are {rows.dtype}; set mixed_precision='bf16'"
            )
        biased = {"bias": bias} if bias is not None else {}
        total: Tensor = linear_cross_entropy(
            rows, weight, flat, ignore_index=IGNORED_LABEL, reduction="sum", **biased
        )
        return total / _count(num_items_in_batch, flat)

    return loss


def _flatten(
    head: nn.Module, hidden: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Rows, weight and bias in the dtype of the computation, and a label for each row."""
    dtype = compute_dtype(hidden)
    weight, bias = head.weight, getattr(head, "bias", None)
    assert isinstance(weight, Tensor)
    rows = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    bias = None if bias is None else bias.to(dtype)
    return rows, weight.to(dtype), bias, shift_labels(labels).reshape(-1)


def _count(num_items: int | Tensor | None, flat_labels: Tensor) -> int | Tensor:
    if num_items is None:
        return (flat_labels != IGNORED_LABEL).sum().clamp(min=1)
    return num_items


FACTORIES: dict[str, FusedLossFactory] = {
    "chunked": chunked_loss,
    "liger": liger_loss,
    "cut_cross_entropy": cut_cross_entropy_loss,
}


# Module and package of the losses that somebody else wrote.
_PACKAGES = {
    "liger": ("liger_kernel.transformers", "liger-kernel"),
    "cut_cross_entropy": ("cut_cross_entropy", "cut-cross-entropy"),
}


def _load(name: str) -> Any:
    module, package = _PACKAGES[name]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra(package, "gpu", f"fused_loss={name!r}") from error


def find_factory(name: str, device: torch.device) -> FusedLossFactory:
    """The factory that the option `fused_loss` names, if it can work on this machine."""
    if name not in FACTORIES:
        raise ConfigError("fused_loss: " + unknown("loss", name, tuple(FACTORIES)))
    if name in _PACKAGES:
        _load(name)
        if device.type == "cpu":
            raise ConfigError(
                f"fused_loss={name!r} needs a GPU, and this run is on {device}; 'chunked' works "
                "on every device"
            )
    return FACTORIES[name]
