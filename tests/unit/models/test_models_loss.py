"""The chunked loss is plain cross entropy, in value and gradient, without whole logits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from headway.models import Decoder, chunked_cross_entropy, cross_entropy_sum, shift_labels


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(2)
    hidden = torch.randn(3, 17, 32, dtype=dtype, requires_grad=True)
    weight = (torch.randn(50, 32, dtype=dtype) * 0.3).requires_grad_()
    bias = torch.randn(50, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 50, (3, 17))
    labels[0, :4] = -100
    labels[2, -1] = -100
    return hidden, weight, bias, labels


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias=None):
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("chunk", [0, 1, 7, 51, 1024])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_plain_cross_entropy(chunk: int, with_bias: bool) -> None:
    hidden, weight, bias, labels = inputs()
    wrt = (hidden, weight, bias) if with_bias else (hidden, weight)
    given = bias if with_bias else None
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=chunk, bias=given)
    expected = plain(hidden, weight, labels, given) / 46
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    grads = torch.autograd.grad(loss, wrt)
    for grad, other in zip(grads, torch.autograd.grad(expected, wrt)):
        torch.testing.assert_close(grad, other, rtol=1e-6, atol=1e-6)


def test_gradcheck_in_float64() -> None:
    hidden, weight, bias, labels = inputs(torch.float64)
    hidden, labels = hidden.detach()[:, 2:5, :6].requires_grad_(), labels[:, 2:5] % 9
    weight, bias = weight.detach()[:9, :6].requires_grad_(), bias.detach()[:9].requires_grad_()
    labels[0, 0] = -100

    def loss(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(h, w, labels, chunk_tokens=4, bias=b, num_items=5) ** 2

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


@pytest.mark.parametrize("num_items", [13, torch.tensor(13)])
def test_num_items_divides(num_items: int | torch.Tensor) -> None:
    hidden, weight, _, labels = inputs()
    loss = chunked_cross_entropy(hidden, weight, labels, num_items=num_items)
    torch.testing.assert_close(loss, plain(hidden, weight, labels) / 13)


def test_frozen_operands_and_no_grad() -> None:
    hidden, weight, _, labels = inputs()
    expected = torch.autograd.grad(plain(hidden, weight, labels) / 46, (hidden, weight))
    chunked_cross_entropy(hidden, weight.detach(), labels).backward()
    torch.testing.assert_close(hidden.grad, expected[0], rtol=1e-6, atol=1e-6)
    assert weight.grad is None
    chunked_cross_entropy(hidden.detach(), weight, labels).backward()
    torch.testing.assert_close(weight.grad, expected[1], rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        assert not chunked_cross_entropy(hidden, weight, labels).requires_grad


def test_second_backward_through_a_retained_graph() -> None:
    hidden, weight, _, labels = inputs()
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=8)
    loss.backward(retain_graph=True)
    once = weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(weight.grad, 2 * once)


def test_all_labels_ignored_is_zero() -> None:
    hidden, weight, _, labels = inputs()
    loss = chunked_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0.0 and hidden.grad.abs().max() == 0 and weight.grad.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_float32_sums(dtype: torch.dtype) -> None:
    hidden, weight, _, labels = inputs()
    expected = torch.autograd.grad(plain(hidden, weight, labels) / 1e6, (hidden, weight))
    with torch.autocast("cpu", dtype=dtype):
        loss = chunked_cross_entropy(hidden, weight, labels, num_items=1_000_000, chunk_tokens=5)
    grads = torch.autograd.grad(loss * 65536.0, (hidden, weight))
    for grad, other in zip(grads, expected):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad / 65536.0, other, rtol=0.05, atol=2e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_many_chunks_lose_nothing_in_half_precision(dtype: torch.dtype) -> None:
    """Each token adds a half; sums of half precision stand still at 128 and 1,024."""
    weight, bias = torch.zeros(2, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
    hidden, labels = torch.ones(3000, 2), torch.zeros(3000, dtype=torch.long)
    with torch.autocast("cpu", dtype=dtype):
        loss = chunked_cross_entropy(hidden, weight, labels, num_items=1, chunk_tokens=1, bias=bias)
    loss.backward()
    assert weight.grad.tolist() == [[-1500, -1500], [1500, 1500]]
    assert bias.grad.tolist() == [-1500, 1500]


@pytest.mark.parametrize("chunk", [0, 5, 1024])
def test_sum_from_whole_logits(chunk: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 9, 30, requires_grad=True)
    labels = torch.randint(0, 30, (2, 9))
    labels[1, 3:6] = -100
    loss = cross_entropy_sum(logits, labels, chunk_tokens=chunk)
    expected = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    grad, other = (torch.autograd.grad(value / 7, logits)[0] for value in (loss, expected))
    torch.testing.assert_close(grad, other, rtol=1e-6, atol=1e-6)


def test_shift_labels() -> None:
    shifted = shift_labels(torch.tensor([[1, 2, 3], [4, -100, 6]]))
    assert shifted.tolist() == [[2, 3, -100], [-100, 6, -100]]


def test_no_tensor_as_large_as_the_logits_is_made() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for leaf in torch.utils._pytree.tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    largest = max(largest, leaf.numel())
            return out

    model = Decoder(
        vocab_size=1000, hidden_size=16, num_layers=1, num_heads=2, loss_chunk_tokens=32
    )
    ids = torch.randint(0, 1000, (4, 64))
    with Watch():
        model(ids, ids).loss.backward()
    assert largest == 32 * 1000


class Adapted(torch.nn.Module):
    """A linear layer with something added, which shows the layer's weight as its own."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def give_bias(model: Decoder) -> None:
    model.lm_head.bias = torch.nn.Parameter(torch.randn(model.config.vocab_size))


def adapt(model: Decoder) -> None:
    model.lm_head = Adapted(model.lm_head)


def hook(model: Decoder) -> None:
    model.lm_head.register_forward_hook(lambda layer, given, made: 2 * made)


@pytest.mark.parametrize("change", [give_bias, adapt, hook])
def test_the_loss_is_that_of_the_heads_own_logits(change: Callable[[Decoder], None]) -> None:
    torch.manual_seed(0)
    model = Decoder(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2)
    change(model)
    ids = torch.randint(0, 64, (2, 16))

    def grads_of(loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, list(model.parameters())))

    logits = model(ids).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, ids[:, 1:].flatten())
    loss = model(ids, ids).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for grad, other in zip(grads_of(loss), grads_of(expected)):
        torch.testing.assert_close(grad, other, rtol=1e-5, atol=1e-6)
        assert other.abs().max() > 0


def test_a_loss_can_be_made_without_values_and_without_rows() -> None:
    with torch.device("meta"):
        model = Decoder(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2)
        ids = torch.zeros(2, 8, dtype=torch.long)
    assert model(ids, ids).loss.shape == ()
    model = Decoder(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2)
    ids = torch.zeros(0, 8, dtype=torch.long)
    output = model(ids, ids, return_logits=True)
    assert output.loss.item() == 0.0 and output.logits.shape == (0, 8, 64)


def two_losses() -> tuple[torch.Tensor, list[torch.Tensor]]:
    hidden, weight = torch.randn(2, 6, 8, requires_grad=True), torch.randn(20, 8)
    labels = torch.randint(20, (2, 6))
    return hidden, [
        chunked_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten()),
        cross_entropy_sum(hidden @ weight.T, labels),
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_second_derivatives_are_refused_and_not_left_out(which: int) -> None:
    hidden, losses = two_losses()
    with pytest.raises(RuntimeError, match=r"no second derivatives .create_graph=True."):
        torch.autograd.grad(losses[which], hidden, create_graph=True)


def test_a_loss_that_nobody_goes_back_from_is_freed_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        _, losses = two_losses()
        made = weakref.ref(losses[0].grad_fn.next_functions[0][0].made)
        assert made() is not None
        del losses
        assert made() is None, "with a gradient of the head's size, until Python looks for circles"
    finally:
        gc.enable()
