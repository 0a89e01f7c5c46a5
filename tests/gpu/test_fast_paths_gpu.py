"""What is faster on a GPU computes what the plain form does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.models import Decoder, DecoderConfig
from headway.models.kernels.cross_entropy import can_use_kernel, loss_and_grads

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocabulary", [50, 4096, 20000, 32768, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_the_loss_kernel_equals_cross_entropy(
    vocabulary: int, dtype: torch.dtype, scale: float
) -> None:
    torch.manual_seed(0)
    logits = (scale * torch.randn(70, vocabulary, device="cuda")).to(dtype)
    labels = torch.randint(vocabulary, (70,), device="cuda")
    labels[3:9] = -100
    assert can_use_kernel(logits)
    losses, grads = loss_and_grads(logits, labels, ignored=-100, grad_dtype=torch.float32)
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="none")
    (wanted,) = torch.autograd.grad(expected.sum(), wide)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    assert grads is not None
    torch.testing.assert_close(grads.double(), wanted, rtol=1e-4, atol=1e-6)
    assert loss_and_grads(logits, labels, ignored=-100, grad_dtype=None)[1] is None


def test_the_loss_kernel_lets_no_damage_pass() -> None:
    logits = torch.randn(4, 5000, device="cuda")
    logits[1, 4321] = float("nan")
    logits[2, 17] = float("inf")
    labels = torch.tensor([1, 2, 3, 4], device="cuda")
    losses, _ = loss_and_grads(logits, labels, ignored=-100, grad_dtype=torch.bfloat16)
    assert losses.isfinite().tolist() == [True, False, False, True]
    labels = torch.tensor([1, -1, 5000, 4999], device="cuda")
    losses, _ = loss_and_grads(logits[:1].expand(4, -1), labels, ignored=-100, grad_dtype=None)
    assert losses.isfinite().tolist() == [True, False, False, True]


@pytest.mark.parametrize("bias", [False, True])
def test_compiled_blocks_equal_eager_ones(bias: bool) -> None:
    """Among the rest: joined projections."""
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=512,
        hidden_size=256,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        max_seq_len=128,
        attention_bias=bias,
    )
    model = Decoder(config).cuda()
    ids = torch.randint(512, (4, 128), device="cuda")

    def grads_of() -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids, ids).loss
        loss.backward()
        return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}

    loss, grads = grads_of()
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    compiled_loss, compiled_grads = grads_of()
    assert compiled_loss == pytest.approx(loss, rel=1e-3)
    for name, grad in grads.items():
        difference = (compiled_grads[name] - grad).norm() / grad.norm()
        assert difference < 0.02, (name, difference.item())


def test_a_layer_with_a_hook_is_called_by_itself_in_a_compiled_block() -> None:
    config = DecoderConfig(vocab_size=64, hidden_size=64, num_layers=1, num_heads=2, max_seq_len=32)
    model = Decoder(config).cuda()
    attention = model.model.layers[0].self_attn
    attention.k_proj.register_forward_hook(lambda layer, given, made: made * 0)
    expected = model(torch.arange(32, device="cuda")[None]).logits
    model.model.layers[0].compile(dynamic=False)
    assert isinstance(attention.k_proj, nn.Linear)
    found = model(torch.arange(32, device="cuda")[None]).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
