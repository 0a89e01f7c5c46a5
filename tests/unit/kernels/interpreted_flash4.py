"""FlashAttention 4's operations themselves, with a formula in the place of the package.

Heads are turned by their kernel in Triton's interpreter: what is shown is that the package is given
the right tensors, and that what it writes becomes the gradient of the joined product.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import kernels_on_cpu
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.config import DecoderConfig
from headway.models.kernels import flash4, heads
from headway.models.rope import RotaryTable, apply_rope

kernels_on_cpu.open_kernels(heads)


def scores_of(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bsnd,btnd->bnst", q, k) / q.shape[3] ** 0.5
    if causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, return_lse: bool
) -> tuple[Tensor, Tensor]:
    assert return_lse
    scores = scores_of(q, k, causal)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bnst,btnd->bsnd", scores.softmax(-1), v), scores.logsumexp(-1)


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, sums: Tensor, *, causal: bool,
    deterministic: bool, dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Of what the forward pass saved; written where it is wanted."""
    assert grad.is_contiguous() and not deterministic
    repeats = q.shape[2] // k.shape[2]
    chances = (scores_of(q, k, causal) - sums[..., None]).exp()
    into = torch.einsum("bsnd,btnd->bnst", grad, v.repeat_interleave(repeats, 2))
    into = chances * (into - (grad * out).sum(-1).transpose(1, 2)[..., None]) / q.shape[3] ** 0.5
    dq.copy_(torch.einsum("bnst,btnd->bsnd", into, k.repeat_interleave(repeats, 2)))
    for found, made in (
        (dk, torch.einsum("bnst,bsnd->btnd", into, q)),
        (dv, torch.einsum("bnst,bsnd->btnd", chances, grad)),
    ):
        found.copy_(made.unflatten(2, (-1, repeats)).sum(3))


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    formula = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setattr(flash4, "_loaded", formula)


def attend_plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = (part.transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(1, 2)


def assert_alike(found: Tensor, wanted: Tensor, given: list[Tensor]) -> None:
    """Outputs and the gradients of all that is given."""
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    # Heads before positions, as a transposed product leaves them.
    grad = torch.randn(wanted.transpose(1, 2).shape).transpose(1, 2)
    for one, other in zip(
        torch.autograd.grad(found, given, grad), torch.autograd.grad(wanted, given, grad)
    ):
        assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6


@pytest.mark.parametrize(("n", "k"), [(4, 2), (3, 3), (4, 1)])
def test_attention_and_its_gradients_are_those_of_sdpa(n: int, k: int) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 7, number, 8, requires_grad=True) for number in (n, k, k)]
    assert_alike(flash4.attend_flash4(*given), attend_plainly(*given), given)


@pytest.mark.parametrize(("n", "k"), [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("table_rows", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_parts_of_one_projection_have_the_gradients_of_three(
    n: int, k: int, table_rows: int, bias: bool
) -> None:
    torch.manual_seed(0)
    config: dict[str, Any] = {"vocab_size": 8, "num_layers": 1, "num_heads": 1, "max_seq_len": 64}
    positions = torch.randint(64, (table_rows, 7))
    table = RotaryTable(DecoderConfig(hidden_size=8, **config))
    cos, sin = table(7, 0, positions, torch.float32)
    x = torch.randn(2, 7, 6, requires_grad=True)
    weights = [torch.randn(number * 8, 6, requires_grad=True) for number in (n, k, k)]
    shift = torch.randn((n + 2 * k) * 8, requires_grad=True) if bias else None
    found = flash4.project_and_attend_flash4(x, weights, shift, cos, sin, 8)
    joined = F.linear(x, torch.cat(weights), shift).unflatten(2, (-1, 8))
    q, key, v = joined.split([n, k, k], dim=2)
    wanted = attend_plainly(apply_rope(q, cos, sin), apply_rope(key, cos, sin), v)
    given = [x, *weights, *([] if shift is None else [shift])]
    assert_alike(found, wanted, given)
