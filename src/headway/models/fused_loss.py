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
from headway.models.hf import other_loss_of
from headway.models.loss import IGNORED_LABEL, chunked_cross_entropy, loss_divisor, shift_labels
from headway.models.norm import compute_dtype
from headway.models.projections import is_plain_linear

logger = logging.getLogger(__name__)

_TRIED = 7.3
"""Of the size of logits, so that a cap or a factor changes it."""

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
    given: Tensor | None = None
    """What the head gave for it."""
    is_tried: bool = False
    """Whether a fixed number is given in place of the loss: what a model does to its logits would
    not show in a small one, and ranks must come to one conclusion whatever their data are."""


class _FusedHead:
    """The forward of an output layer that gives a loss where one is asked for."""

    adds_nothing = True
    """Asked for nothing, it is the forward of its class (projections.py)."""

    def __init__(self, head: nn.Module, loss: FusedLossFunction, request: _Request) -> None:
        # An object and not a closure: a copy of the model gets a copy that knows its own head.
        self._head, self._loss, self._request = head, loss, request

    def __call__(self, hidden: Tensor) -> Any:
        request = self._request
        # Whoever hooks the head in the middle of a run wants to see logits.
        if request.labels is None or not is_plain_linear(self._head):
            return type(self._head).forward(self._head, hidden)
        made = self._loss(hidden, request.labels, num_items_in_batch=request.num_items)
        request.made = request.given = made
        if request.is_tried:
            request.given = made + (_TRIED - made).detach()
        return request.given


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
        if not is_plain_linear(head):
            self._give_up(
                f"the output layer is a {type(head).__name__} that does more than multiply by its "
                "weight (few bits, an adapter, a hook), and a loss made of that weight would pass "
                "over it (fp8_exclude and qat_exclude leave it whole)"
            )
            return
        other = other_loss_of(module)
        if other is not None:
            self._give_up(f"the model's own loss is {other}, not that of the next token")
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
        request.is_tried = not self._checked
        try:
            outputs = model(**inputs)
            made, given = request.made, request.given
        finally:
            request.labels = request.num_items = request.made = request.given = None
        share: Tensor | None = _field(outputs, "logits")
        if made is None or given is None:
            self._give_up("the output layer has a hook, or became something else")
            return None
        if self._checked:
            return share
        self._checked = True
        adds = _field(outputs, "aux_loss")
        if adds is not None:
            self._give_up("the model adds a loss of its own (aux_loss)")
            return None
        if share is None or share.shape != given.shape or not _are_equal(share, given):
            self._give_up("the model works on its logits after the output layer")
            return None
        return share - share.detach() + made.detach()

    def _give_up(self, reason: str) -> None:
        self.active = False
        logger.warning("fused loss: %s; the model's own loss is used instead", reason)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """A look at the device, in the first step only; what is no number is equal to itself."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _field(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, dict) else getattr(outputs, name, None)


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
        return total / loss_divisor(num_items_in_batch, flat)

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
        return total / loss_divisor(num_items_in_batch, flat)

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
