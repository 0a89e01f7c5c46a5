"""Offloading: the hooks' bookkeeping with real copies on the host; overlap is for a GPU to show."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from headway.errors import ConfigError
from headway.strategies import offload as offloading
from headway.strategies.offload import ActivationOffload, HostLane, refuse_flex_attention
from headway.strategies.recompute import enable
from headway.testing import tiny_decoder, tiny_llama, tiny_trainer

CPU = torch.device("cpu")


class CountingLane(HostLane):
    """Counts copies, and keeps weak eyes on those that came back."""

    def __init__(self):
        self.num_sent = self.num_fetched = 0
        self.sent, self.fetched = [], []

    def send(self, source):
        self.num_sent += 1
        held, mark = super().send(source)
        self.sent.append(weakref.ref(held))
        return held, mark

    def fetch(self, held, sent):
        self.num_fetched += 1
        back, mark = super().fetch(held, sent)
        self.fetched.append(weakref.ref(back))
        return back, mark


def alive(references):
    return sum(reference() is not None for reference in references)


def make(min_bytes=0):
    lane = CountingLane()
    return ActivationOffload(lane, CPU, min_bytes=min_bytes), lane


def gradients(model, context=None):
    ids = torch.arange(64).view(2, 32)
    model.zero_grad()
    torch.manual_seed(3)
    if context is None:
        loss = model(input_ids=ids, labels=ids).loss
    else:
        with context():
            loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("make_model", [tiny_decoder, tiny_llama])
@pytest.mark.parametrize("policy", [None, "block", "selective"])
def test_gradients_have_the_same_bits(make_model, policy):
    torch.manual_seed(0)
    model = make_model()
    plain = gradients(model)
    offload, lane = make()
    offload.watch(model)
    if policy is not None:
        enable(model, policy)
    for _ in range(2):
        assert all(map(torch.equal, plain, gradients(model, offload)))
    assert lane.num_fetched > 0
    gc.collect()
    assert alive(lane.fetched) == 0
    assert alive(lane.sent) <= offloading._IN_FLIGHT


def test_a_storage_travels_once_and_weights_stay():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    offload, lane = make()
    offload.watch(model)
    x = torch.randn(8, 64, requires_grad=True)
    with offload():
        hidden = model(x)
        # Views of one storage, among them one that is saved twice.
        loss = (hidden.view(8, 8, 8).transpose(1, 2) ** 2 + hidden[:, :1] ** 3).sum()
    assert lane.num_sent == 4  # x, two inner results, and hidden with all its views
    loss.backward()
    unwatched, lane = make()
    with unwatched():
        model(x).sum()
    assert lane.num_sent > 3


def test_small_tensors_stay():
    offload, lane = make(min_bytes=1024)
    x = torch.randn(16, requires_grad=True)
    y = torch.randn(1024, requires_grad=True)
    with offload():
        loss = (x**2).sum() + (y**2).sum()
    assert lane.num_sent == 1 and offload.num_bytes == 4096
    loss.backward()
    assert torch.equal(x.grad, 2 * x) and torch.equal(y.grad, 2 * y)


def test_copies_are_fetched_ahead_and_freed_once_used(monkeypatch):
    monkeypatch.setattr(offloading, "_IN_FLIGHT", 1)
    monkeypatch.setattr(offloading, "_AHEAD", 2)
    offload, lane = make()
    x = torch.randn(256, requires_grad=True)
    most = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            most.append((lane.num_fetched, alive(lane.fetched)))
            return gradient

    with offload():
        y = x
        for _ in range(8):
            y = Watch.apply(y.sin())
    y.sum().backward()
    assert lane.num_sent == 8
    # The last one is still there; of the others at most two wait for their turn.
    assert lane.num_fetched == 7
    assert most[0][0] == 0 and most[2][0] == 3
    assert max(held for _, held in most) <= 3
    assert torch.isfinite(x.grad).all()


def test_a_graph_can_be_walked_twice():
    offload, lane = make()
    x = torch.randn(64, requires_grad=True)
    with offload():
        loss = (x.sin() * x.cos()).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    reference = x.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad((reference.sin() * reference.cos()).sum(), reference)
    assert torch.equal(first, expected)


def test_two_forwards_before_their_backwards():
    offload, _ = make()
    x, y = (torch.randn(64, requires_grad=True) for _ in range(2))
    with offload():
        first = x.sin().exp().sum()
    with offload():
        second = y.cos().exp().sum()
    first.backward()
    second.backward()
    for tensor, function in ((x, torch.sin), (y, torch.cos)):
        again = tensor.detach().clone().requires_grad_()
        function(again).exp().sum().backward()
        assert torch.equal(tensor.grad, again.grad)


@pytest.mark.parametrize("in_flight", [0, 4])
def test_what_is_changed_while_it_is_copied_is_an_error(monkeypatch, in_flight):
    monkeypatch.setattr(offloading, "_IN_FLIGHT", in_flight)
    offload, lane = make()
    x, buffer = torch.randn(64, requires_grad=True), torch.randn(64)
    expected = 3 * buffer
    with offload():
        first = x * buffer
        buffer.mul_(2)
        second = x * buffer  # the same storage, and not what was sent before
    assert lane.num_sent == 2
    loss = (first + second).sum()
    if in_flight:  # nobody knows which of the values the first copy has
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    else:
        loss.backward()
        assert torch.equal(x.grad, expected)


def test_an_error_in_the_forward_leaves_no_hooks():
    offload, lane = make()
    with pytest.raises(RuntimeError, match="on purpose"), offload():
        raise RuntimeError("on purpose")
    x = torch.randn(64, requires_grad=True)
    (x**2).sum().backward()
    assert lane.num_sent == 0


def test_on_a_cpu_nothing_is_moved_and_it_is_said(tmp_path, caplog):
    losses = []
    for name, on in (("plain", False), ("offload", True)):
        trainer = tiny_trainer(tmp_path / name, max_steps=2, enable_activation_offloading=on)
        trainer.train()
        losses.append([r["loss"] for r in trainer.state.log_history if "loss" in r])
    assert losses[0] == losses[1]
    assert "nothing is moved" in caplog.text


def test_flex_attention_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be used with flex attention"):
        refuse_flex_attention(tiny_decoder(attention="flex"))
    refuse_flex_attention(tiny_decoder())
    refuse_flex_attention(nn.Linear(2, 2))
    trainer = tiny_trainer(tmp_path, max_steps=1, enable_activation_offloading=True)
    trainer.model_init = lambda: tiny_decoder(attention="flex")
    with pytest.raises(ConfigError, match="enable_activation_offloading=True cannot be used"):
        trainer.train()
