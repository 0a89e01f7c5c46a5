"""Fused losses of other packages, which need a GPU: equal to the plain loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.models.fused_loss import FACTORIES
from headway.models.loss import IGNORED_LABEL, chunked_cross_entropy, shift_labels

pytestmark = pytest.mark.gpu

PACKAGES = {"chunked": "headway", "liger": "liger_kernel", "cut_cross_entropy": "cut_cross_entropy"}


def plain(hidden, weight, labels):
    logits = hidden.float() @ weight.float().t()
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL
    )


@pytest.mark.parametrize("name", FACTORIES)
def test_a_fused_loss_and_its_gradients_are_those_of_the_plain_loss(name):
    pytest.importorskip(PACKAGES[name])
    torch.manual_seed(0)
    head = nn.Linear(512, 8000, bias=False, device="cuda")
    hidden = torch.randn(4, 256, 512, device="cuda", requires_grad=True)
    labels = torch.randint(8000, (4, 256), device="cuda")
    labels[:, :20] = IGNORED_LABEL
    loss_function = FACTORIES[name](head)
    with torch.autocast("cuda", torch.bfloat16):
        loss = loss_function(hidden, labels, num_items_in_batch=4 * 236)
    loss.backward()
    made = hidden.grad.clone(), head.weight.grad.clone()
    hidden.grad = head.weight.grad = None
    expected = plain(hidden, head.weight, labels)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=2e-3)
    for ours, theirs in zip(made, (hidden.grad, head.weight.grad)):
        assert (ours - theirs).norm() / theirs.norm() < 2e-2


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_in_several_chunks_is_the_plain_one(dtype, bias):
    """Of which the last is a short one; gradients of the head add up over them."""
    torch.manual_seed(0)
    head = nn.Linear(256, 5003, bias=bias, device="cuda")
    hidden = torch.randn(3, 333, 256, device="cuda", requires_grad=True)
    labels = torch.randint(5003, (3, 333), device="cuda")
    labels[:, :20] = IGNORED_LABEL
    wrt = [hidden, *head.parameters()]
    with torch.autocast("cuda", dtype):
        loss = chunked_cross_entropy(
            hidden, head.weight, shift_labels(labels), chunk_tokens=128, bias=head.bias
        )
    made = torch.autograd.grad(loss, wrt)
    logits = nn.functional.linear(hidden, head.weight, head.bias)[:, :-1].flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
    assert loss.item() == pytest.approx(expected.item(), rel=2e-3)
    for ours, theirs in zip(made, torch.autograd.grad(expected, wrt), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 2e-2


@pytest.mark.parametrize("bias", [False, True])
def test_under_autocast_the_chunked_loss_is_that_of_the_heads_own_logits(bias):
    """Closer to it than their rounding, which moves each row's loss by some thousandths."""
    torch.manual_seed(0)
    head = nn.Linear(512, 8000, bias=bias, device="cuda")
    nn.init.normal_(head.weight, std=0.3)
    hidden = torch.randn(1, 65, 512, device="cuda")
    labels = torch.randint(8000, (1, 65), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = FACTORIES["chunked"](head)(hidden, labels)
        logits = head(hidden)
    wanted = nn.functional.cross_entropy(logits[0, :-1].float(), labels[0, 1:])
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
