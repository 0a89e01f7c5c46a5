"""Cross entropy in chunks of tokens, so that logits (or their float32 copy) are never whole.

Owns: `chunked_cross_entropy` from hidden states, `cross_entropy_sum` from logits, label shifting.
Does not own: what the loss is divided by across micro-batches and ranks (engine/).

Shapes: N tokens, V vocabulary, D hidden width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.config import default_chunk_tokens
from headway.models.kernels.cross_entropy import can_use_kernel, cross_entropy_
from headway.models.kernels.scaling import scale_
from headway.models.norm import compute_dtype

IGNORED_LABEL = -100


def shift_labels(labels: Tensor) -> Tensor:
    """Labels aligned to the position that predicts them: each row moved left, its end ignored."""
    shifted = torch.full_like(labels, IGNORED_LABEL)
    shifted[..., :-1] = labels[..., 1:]
    return shifted


def count_targets(labels: Tensor) -> Tensor:
    """How many already shifted labels count, as a tensor on their device."""
    return (labels != IGNORED_LABEL).sum()


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    num_items: int | Tensor | None = None,
    chunk_tokens: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Cross entropy of `hidden @ weight.T (+ bias)` against already shifted `labels`.

    The sum over labels other than -100, divided by `num_items` or else by their own number.
    `chunk_tokens`: as `loss_chunk_tokens` of the decoder.
    """
    flat_labels = labels.reshape(-1)
    dtype = compute_dtype(hidden)
    hidden_ND = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    chunk = _chunk(chunk_tokens, hidden_ND.shape[0], weight.shape[0])
    total: Tensor = _head_total(hidden_ND, weight, bias, flat_labels, chunk)
    return total / loss_divisor(num_items, flat_labels)


# A compiler may hold several chunks at once, and cannot trace the products that widen their dtype.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _head_total(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_N: Tensor, chunk: int
) -> Tensor:
    wanted = [t is not None and t.requires_grad for t in (hidden_ND, weight_VD, bias_V)]
    if torch.is_grad_enabled() and any(wanted):
        total: Tensor = _HeadCrossEntropy.apply(hidden_ND, weight_VD, bias_V, labels_N, chunk)
        return total
    return _HeadPass(hidden_ND, weight_VD, bias_V, labels_N, chunk, (False,) * 3).total


def _chunk(chunk_tokens: int | None, num_tokens: int, vocab_size: int) -> int:
    if chunk_tokens is None:
        return default_chunk_tokens(vocab_size)
    return chunk_tokens or max(num_tokens, 1)


def loss_divisor(num_items: int | Tensor | None, labels: Tensor) -> int | Tensor:
    """What a sum is divided by: `num_items`, else the number of already shifted labels that count.

    A batch without a target has a loss of nothing, and not one that is no number.
    """
    if num_items is None:
        num_items = count_targets(labels)
    return num_items.clamp(min=1) if isinstance(num_items, Tensor) else max(num_items, 1)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _spans(num_tokens: int, chunk: int) -> Iterator[slice]:
    for start in range(0, num_tokens, chunk):
        yield slice(start, min(start + chunk, num_tokens))


def _without_autocast(device_type: str) -> Any:
    if device_type == "meta":  # has none
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


class _HeadPass:
    """One pass over the tokens: the summed loss and, as wanted, its gradients, all unscaled.

    Gradients stay unscaled (a probability less one) until backward, so that half precision
    neither underflows nor rounds the factor.
    """

    def __init__(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        chunk: int,
        wanted: tuple[bool, ...],
    ) -> None:
        self.dtype = hidden_ND.dtype
        self.hidden_ND, self.labels_N = hidden_ND, labels_N
        self.sum_dtype = sum_dtype = _sum_dtype(self.dtype)
        self.grad_hidden = torch.empty_like(hidden_ND) if wanted[0] else None
        # Half precision would lose small terms over many chunks.
        self.grad_weight = torch.zeros_like(weight_VD, dtype=sum_dtype) if wanted[1] else None
        self.grad_bias = None
        if wanted[2] and bias_V is not None:
            self.grad_bias = torch.zeros_like(bias_V, dtype=sum_dtype)
        with torch.no_grad(), _without_autocast(hidden_ND.device.type):
            self.weight_VD = weight_VD.detach().to(self.dtype)
            self.bias_V = None if bias_V is None else bias_V.detach().to(self.dtype)
            spans = list(_spans(hidden_ND.shape[0], chunk)) or [slice(0, 0)]
            self.total = torch.cat([self._add(span, any(wanted)) for span in spans]).sum()
        del self.weight_VD, self.bias_V, self.hidden_ND, self.labels_N

    def _add(self, span: slice, with_grads: bool) -> Tensor:
        """Add a chunk's gradients, and tell the loss of each of its tokens."""
        hidden_CD, labels_C = self.hidden_ND[span], self.labels_N[span]
        ignored_C: Tensor | None = None
        # Rounded as the head's own logits are under autocast.
        logits_CV = F.linear(hidden_CD, self.weight_VD, self.bias_V)
        if can_use_kernel(logits_CV):
            losses_C = cross_entropy_(
                logits_CV, labels_C, ignored=IGNORED_LABEL, with_grads=with_grads
            )
            grad_CV = logits_CV if with_grads else None
        else:
            ignored_C = labels_C == IGNORED_LABEL
            losses_C, grad_CV = self._loss_and_grads(logits_CV, labels_C, ignored_C, with_grads)
        del logits_CV
        if grad_CV is not None:
            self._add_grads(span, hidden_CD, grad_CV, ignored_C)
        return losses_C

    def _add_grads(
        self, span: slice, hidden_CD: Tensor, grad_CV: Tensor, ignored_C: Tensor | None
    ) -> None:
        """From the gradients of logits; `ignored_C`: rows of them that must not count, if any.

        The kernel's are nothing in ignored rows. Times a hidden state that is no number they are
        none either, as in torch's own loss.
        """
        if self.grad_hidden is not None:
            torch.mm(grad_CV, self.weight_VD, out=self.grad_hidden[span])
        if ignored_C is not None:
            # Struck from the narrow operands; striking rows of [C, V] would cost a full pass.
            hidden_CD = hidden_CD.masked_fill(ignored_C.unsqueeze(1), 0.0)
            if self.grad_hidden is not None:
                self.grad_hidden[span].masked_fill_(ignored_C.unsqueeze(1), 0.0)
        if self.grad_weight is not None:
            _add_product(self.grad_weight, grad_CV.t(), hidden_CD)
        if self.grad_bias is not None:
            counted_C = torch.ones_like(grad_CV[:, 0])
            if ignored_C is not None:
                counted_C.masked_fill_(ignored_C, 0.0)
            self.grad_bias += counted_C @ grad_CV

    def _loss_and_grads(
        self, logits_CV: Tensor, labels_C: Tensor, ignored_C: Tensor, with_grads: bool
    ) -> tuple[Tensor, Tensor | None]:
        """What the kernel gives, made of torch's operations; ignored rows have a gradient here."""
        index_C1 = labels_C.masked_fill(ignored_C, 0).unsqueeze(1)
        logp_CV = torch.log_softmax(logits_CV, -1, dtype=self.sum_dtype)
        picked_C1 = logp_CV.gather(1, index_C1)
        losses_C = -picked_C1.squeeze(1).masked_fill(ignored_C, 0.0)
        if not with_grads:
            return losses_C, None
        if self.dtype == logp_CV.dtype:
            grad_CV = logp_CV.exp_()
        else:
            grad_CV = torch.exp(logp_CV, out=torch.empty_like(logp_CV, dtype=self.dtype))
        # p - 1 at the label, from the log: subtracting in half precision would cancel.
        grad_CV.scatter_(1, index_C1, picked_C1.expm1().to(self.dtype))
        return losses_C, grad_CV


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, with the sum kept in the dtype of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Multiplied in the dtype of `scale`, in their own place where it can be done in one pass."""
    if can_use_kernel(values) and values.is_contiguous():
        return scale_(values, scale)
    return values.to(scale.dtype).mul_(scale).to(values.dtype)


def _refuse_second_derivatives() -> None:
    """Gradients that are made along with the loss are numbers to autograd: theirs would be nothing.

    Not torch's `once_differentiable`, which lets them pass where the loss itself is the last.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "the loss in chunks has no second derivatives (create_graph=True); take them of "
            "torch's cross_entropy over the model's logits"
        )


class _HeadCrossEntropy(torch.autograd.Function):
    """Summed cross entropy of the head's logits; gradients are made along with the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        chunk: int,
    ) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, labels_N)
        ctx.chunk = chunk
        ctx.made = made = _HeadPass(
            hidden_ND, weight_VD, bias_V, labels_N, chunk, ctx.needs_input_grad[:3]
        )
        total = made.total
        # Else a loss that nobody goes back from would hold itself, and gradients, for long.
        del made.total
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refuse_second_derivatives()
        (scale,) = grads
        hidden_ND, weight_VD, bias_V, labels_N = ctx.saved_tensors
        made: _HeadPass | None = ctx.made
        if made is None:  # a second backward through a retained graph
            wanted = ctx.needs_input_grad[:3]
            made = _HeadPass(hidden_ND, weight_VD, bias_V, labels_N, ctx.chunk, wanted)
        # Scaling below happens in place, and autograd may keep the tensors as .grad.
        ctx.made = None
        grad_hidden, grad_weight, grad_bias = made.grad_hidden, made.grad_weight, made.grad_bias
        if grad_hidden is not None:
            grad_hidden = _scaled(grad_hidden, scale)
        if grad_weight is not None:
            grad_weight = _scaled(grad_weight, scale).to(weight_VD.dtype)
        if grad_bias is not None and bias_V is not None:
            grad_bias = grad_bias.mul_(scale).to(bias_V.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


def cross_entropy_sum(logits: Tensor, labels: Tensor, *, chunk_tokens: int | None = None) -> Tensor:
    """Summed cross entropy of whole logits [..., S, V] against labels [..., S], shifted inside.

    For models that return only logits: no float32 copy of them is ever whole.
    """
    flat_labels = shift_labels(labels).reshape(-1)
    logits_NV = logits.reshape(-1, logits.shape[-1])
    chunk = _chunk(chunk_tokens, *logits_NV.shape)
    total: Tensor = _LogitsCrossEntropy.apply(logits_NV, flat_labels, chunk)
    return total


class _LogitsCrossEntropy(torch.autograd.Function):
    """Summed cross entropy of logits; keeps only the log of each row's denominator."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, chunk: int) -> Tensor:
        dtype = _sum_dtype(logits_NV.dtype)
        total = torch.zeros((), dtype=dtype, device=logits_NV.device)
        lse_N = torch.empty(logits_NV.shape[0], dtype=dtype, device=logits_NV.device)
        for span in _spans(logits_NV.shape[0], chunk):
            rows_CV, labels_C = logits_NV[span].to(dtype), labels_N[span]
            ignored_C = labels_C == IGNORED_LABEL
            index_C1 = labels_C.masked_fill(ignored_C, 0).unsqueeze(1)
            lse_N[span] = torch.logsumexp(rows_CV, -1)
            loss_C = lse_N[span] - rows_CV.gather(1, index_C1).squeeze(1)
            total += loss_C.masked_fill(ignored_C, 0.0).sum()
        ctx.save_for_backward(logits_NV, labels_N, lse_N)
        ctx.chunk = chunk
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refuse_second_derivatives()
        (scale,) = grads
        logits_NV, labels_N, lse_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        for span in _spans(logits_NV.shape[0], ctx.chunk):
            ignored_C1 = (labels_N[span] == IGNORED_LABEL).unsqueeze(1)
            index_C1 = labels_N[span].unsqueeze(1).masked_fill(ignored_C1, 0)
            rows_CV = (logits_NV[span].to(lse_N.dtype) - lse_N[span].unsqueeze(1)).exp_()
            rows_CV.scatter_add_(1, index_C1, torch.full_like(rows_CV[:, :1], -1.0))
            grad_NV[span] = rows_CV.mul_(scale).masked_fill_(ignored_C1, 0.0)
        return grad_NV, None, None
