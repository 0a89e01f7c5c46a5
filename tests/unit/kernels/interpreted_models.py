"""Kernels of the decoder in Triton's interpreter, against the plain forms in higher precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels_on_cpu import open_kernels
from torch import Tensor
from torch.library import opcheck

from headway.models import loss as loss_module
from headway.models.config import DecoderConfig
from headway.models.kernels import cross_entropy, heads, linear, scaling, swiglu
from headway.models.rope import RotaryTable, apply_rope

for module in (cross_entropy, heads, linear, scaling, swiglu):
    open_kernels(module)

DTYPES = [torch.float32, torch.bfloat16]
CHECKS = ("test_schema", "test_faketensor")
# Around a block of the loss's kernel, and several of them.
VOCABULARIES = [1, 50, 8191, 8192, 8193, 20000]


def assert_near(found: Tensor, wanted: Tensor, *, atol: float = 1e-5) -> None:
    """Equal but for the rounding to the dtype that was found."""
    rtol = 1e-4 if found.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), wanted.double(), rtol=rtol, atol=atol)


def grads_of(made: Sequence[Tensor], weights: Sequence[Tensor], *wrt: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a sum of the outputs that counts each number differently."""
    return torch.autograd.grad(made, wrt, [w.to(m.dtype) for w, m in zip(weights, made)])


# -- the loss of rows of logits ---------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_losses_and_gradients_are_those_of_cross_entropy(
    vocabulary: int, dtype: torch.dtype, scale: float
) -> None:
    torch.manual_seed(0)
    # Rows that lie apart from each other, and labels that do.
    logits = (scale * torch.randn(5, vocabulary + 3)).to(dtype)[:, :vocabulary]
    labels = torch.randint(vocabulary, (10,))[::2]
    labels[0], labels[-1] = vocabulary - 1, 0
    labels[2] = -100
    wide = logits.double().requires_grad_()
    wanted = F.cross_entropy(wide, labels, reduction="none")
    (wanted_grads,) = torch.autograd.grad(wanted.sum(), wide)
    beside = logits.as_strided((5, 3), (vocabulary + 3, 1), vocabulary).clone()
    before = logits.clone()
    alone = cross_entropy.cross_entropy_(logits, labels, ignored=-100, with_grads=False)
    assert torch.equal(logits, before)
    losses = cross_entropy.cross_entropy_(logits, labels, ignored=-100, with_grads=True)
    grads = logits
    assert losses.dtype == torch.float32
    assert torch.equal(alone, losses)
    assert_near(losses, wanted)
    assert_near(grads, wanted_grads)
    assert losses[2] == 0 and not grads[2].any()
    assert torch.equal(logits.as_strided((5, 3), (vocabulary + 3, 1), vocabulary), beside)


@pytest.mark.parametrize("vocabulary", [50, 8193])
def test_a_label_outside_the_vocabulary_spoils_its_row_alone(vocabulary: int) -> None:
    """Its gradient too: ranks withhold a step by the norm of the gradients."""
    grads = torch.randn(1, vocabulary).repeat(6, 1)
    labels = torch.tensor([0, -1, vocabulary, vocabulary - 1, -100, 2**40])
    losses = cross_entropy.cross_entropy_(grads, labels, ignored=-100, with_grads=True)
    good = torch.tensor([True, False, False, True, True, False])
    assert torch.equal(losses.isfinite(), good)
    assert torch.equal(grads.isfinite().all(1), good)
    assert torch.equal(grads.isnan().all(1), ~good)


@pytest.mark.parametrize("vocabulary", [50, 8193])
def test_damaged_logits_are_seen_in_loss_and_gradient(vocabulary: int) -> None:
    grads = torch.randn(4, vocabulary)
    grads[1, vocabulary - 1] = float("nan")
    grads[2, 17] = float("inf")
    grads[3] = float("nan")
    labels = torch.tensor([1, 2, 3, -100])
    losses = cross_entropy.cross_entropy_(grads, labels, ignored=-100, with_grads=True)
    assert losses.isfinite().tolist() == [True, False, False, True]
    assert grads.isfinite().all(1).tolist() == [True, False, False, True]
    assert losses[3] == 0 and not grads[3].any()  # what is ignored is not even read


def test_no_rows_have_no_loss() -> None:
    losses = cross_entropy.cross_entropy_(
        torch.empty(0, 50), torch.empty(0, dtype=torch.long), ignored=-100, with_grads=True
    )
    assert losses.shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_loss_in_chunks_is_the_same_with_the_kernel(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bias: bool
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 11, 16).to(dtype).requires_grad_()
    weight = torch.randn(70, 16, requires_grad=True)
    wrt = [hidden, weight, *([torch.randn(70, requires_grad=True)] if bias else [])]
    labels = torch.randint(70, (2, 11))
    labels[0, :6] = -100

    def made() -> list[Tensor]:
        total = loss_module.chunked_cross_entropy(
            hidden, weight, labels, chunk_tokens=5, bias=wrt[2] if bias else None
        )
        return [total, *torch.autograd.grad(total, wrt)]

    plain = made()
    monkeypatch.setattr(loss_module, "can_use_kernel", lambda logits: True)
    for found, wanted in zip(made(), plain, strict=True):
        limit = 0.02 if dtype == torch.bfloat16 else 1e-5
        assert (found - wanted).norm() <= limit * wanted.norm()


@pytest.mark.parametrize("size", [0, 1, 4096, 10001])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_values_are_scaled_as_by_a_product_in_float32(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    beside = torch.randn(size + 5).to(dtype)
    before, values = beside.clone(), beside[:size]
    factor = torch.tensor(0.1234567)  # many more digits than half precision has
    assert scaling.scale_(values, factor) is values
    # Not equal: the interpreter cuts bfloat16 off where a GPU rounds.
    assert_near(values, before[:size].float() * factor)
    assert torch.equal(beside[size:], before[size:])


# -- several weights in half precision at once ------------------------------------------------


@pytest.mark.parametrize("rows", [(3,), (40, 7), (300, 1, 90), (0, 5, 0), (64, 64, 64), (0,)])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_weights_are_cast_one_below_the_other(rows: tuple[int, ...], given: torch.dtype) -> None:
    torch.manual_seed(0)
    # Every second one lies in memory as a transposed matrix does.
    weights = [
        torch.randn(24, size).to(given).t() if n % 2 else torch.randn(size, 24).to(given)
        for n, size in enumerate(rows)
    ]
    wide = torch.full((sum(rows) + 1, 24), 7.0, dtype=torch.bfloat16)
    linear._cast_by_kernel(weights, wide[:-1])
    assert_near(wide[:-1], torch.cat(weights))
    assert wide[-1].eq(7.0).all()


# -- heads out of a joined projection, turned by their positions ------------------------------


def project_plainly(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, cos: Tensor, sin: Tensor, size: int
) -> tuple[Tensor, ...]:
    joined = F.linear(x, torch.cat(list(weights)), bias).unflatten(2, (-1, size))
    n, k = (weight.shape[0] // size for weight in weights[:2])
    q, key, v = joined.split([n, k, k], dim=2)
    return apply_rope(q, cos, sin), apply_rope(key, cos, sin), v


def tables(batch: int, seq_len: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of a row each, as packed documents have them, or for `batch` 1 of all rows."""
    config = DecoderConfig(
        vocab_size=8, hidden_size=size, num_layers=1, num_heads=1, max_seq_len=64
    )
    positions = torch.randint(64, (batch, seq_len))
    return RotaryTable(config)(seq_len, 0, positions, dtype)


def weights_of(n: int, k: int, size: int) -> list[Tensor]:
    return [torch.randn(number * size, 6, requires_grad=True) / 3 for number in (n, k, k)]


HEADS = [(3, 2, 10), (4, 1, 8), (1, 1, 2), (5, 5, 6)]


@pytest.mark.parametrize(("n", "k", "size"), HEADS)
@pytest.mark.parametrize("table_rows", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_and_their_gradients_are_those_of_apply_rope(
    n: int, k: int, size: int, table_rows: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    cos, sin = tables(table_rows, 5, size, dtype)
    cos, sin = (t.repeat_interleave(2, dim=1)[:, ::2] for t in (cos, sin))  # of wider tables
    x = torch.randn(2, 5, 7).to(dtype)[..., :-1].requires_grad_()
    # Values that half precision has, so that what is left of differences is the product's own.
    weights = [w.detach().to(dtype).float().requires_grad_() for w in weights_of(n, k, size)]
    shift = torch.randn((n + 2 * k) * size).to(dtype).requires_grad_() if bias else None
    given = [t for t in (x, *weights, shift) if t is not None]
    wide = [t.detach().double().requires_grad_() for t in given]
    parts = heads.project_heads(x, weights, shift, cos, sin, size)
    wanted = project_plainly(
        wide[0], wide[1:4], wide[4] if bias else None, cos.double(), sin.double(), size
    )
    atol = 5e-2 if dtype == torch.bfloat16 else 1e-5
    for found, part in zip(parts, wanted, strict=True):
        assert found.dtype == dtype and found.shape == part.shape
        assert_near(found, part, atol=atol)
    # As attention leaves them: heads before positions.
    seeds = [torch.randn(2, w.shape[2], 5, size).to(dtype).transpose(1, 2) for w in wanted]
    for one, other in zip(grads_of(parts, seeds, *given), grads_of(wanted, seeds, *wide)):
        limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
        assert (one.double() - other).norm() <= limit * other.norm()


@pytest.mark.parametrize(("n", "k", "size"), HEADS)
@pytest.mark.parametrize("table_rows", [1, 2])
def test_turned_back_heads_are_what_they_were(n: int, k: int, size: int, table_rows: int) -> None:
    torch.manual_seed(0)
    cos, sin = tables(table_rows, 5, size, torch.float32)
    joined = torch.randn(2, 5, (n + 2 * k) * size)
    before = joined.clone()
    heads.turn_(joined, cos, sin, n, k, back=False)
    values = k * size
    assert torch.equal(joined[..., -values:], before[..., -values:])
    assert not torch.allclose(joined, before)
    heads.turn_(joined, cos, sin, n, k, back=True)
    assert_near(joined, before)


@pytest.mark.parametrize(
    "unusual",
    [
        lambda grad: grad[..., :1].expand_as(grad),
        lambda grad: grad[:1, :1, :1].expand_as(grad),
        lambda grad: grad.transpose(1, 3).contiguous().transpose(1, 3),
    ],
    ids=["same in a head", "same for all", "width not last"],
)
def test_gradients_lie_in_memory_as_they_like(unusual: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    cos, sin = tables(2, 3, 8, torch.float32)
    x, weights = torch.randn(2, 3, 6, requires_grad=True), weights_of(3, 2, 8)
    parts = heads.project_heads(x, weights, None, cos, sin, 8)
    seeds = [unusual(torch.randn(part.shape)) for part in parts]
    (grad,) = grads_of(parts, seeds, x)
    (wanted,) = grads_of(project_plainly(x, weights, None, cos, sin, 8), seeds, x)
    assert_near(grad, wanted)


def test_a_part_that_is_not_used_has_no_gradient() -> None:
    cos, sin = tables(1, 3, 8, torch.float32)
    x, weights = torch.randn(2, 3, 6), [w.detach().requires_grad_() for w in weights_of(3, 2, 8)]
    heads.project_heads(x, weights, None, cos, sin, 8)[1].sum().backward()
    assert [bool(w.grad is not None and w.grad.any()) for w in weights] == [False, True, False]


def test_tables_of_another_length_are_refused() -> None:
    x, weights = torch.randn(2, 3, 6), weights_of(3, 2, 8)
    for rows, positions in ((1, 4), (3, 3)):
        cos, sin = tables(rows, positions, 8, torch.float32)
        with pytest.raises(RuntimeError, match="positions"):
            heads.project_heads(x, weights, None, cos, sin, 8)


# -- the second half of a gated MLP -----------------------------------------------------------


def product_of(joined: Tensor) -> Tensor:
    gate, up = joined.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("width", [1, 7, 1024, 1025, 2100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_gate_and_up_are_those_of_autograd(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    joined = (5 * torch.randn(3, 2 * width + 1)).to(dtype)[:, :-1]
    grad = torch.randn(width, 3).to(dtype).t()
    wide = joined.double().requires_grad_()
    wanted = product_of(wide)
    (wanted_grad,) = torch.autograd.grad(wanted, wide, grad.double())
    grad_joined, product = swiglu.swiglu_backward(joined, grad)
    assert_near(grad_joined, wanted_grad)
    assert_near(product, wanted)


def test_a_gate_far_out_is_open_or_closed() -> None:
    joined = torch.tensor([[200.0, -200.0, 0.0, 3.0, 3.0, 3.0]])
    grad_joined, product = swiglu.swiglu_backward(joined, torch.ones(1, 3))
    assert_near(product, torch.tensor([[600.0, 0.0, 0.0]]))
    assert_near(grad_joined, torch.tensor([[3.0, 0.0, 1.5, 200.0, 0.0, 0.0]]))


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_whole_half_is_the_plain_one(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    joined = torch.randn(2, rows, 26).to(dtype).requires_grad_()
    weight = torch.randn(6, 13, requires_grad=True)
    wide = [t.detach().double().requires_grad_() for t in (joined, weight)]
    made, wanted = swiglu.gated_down(joined, weight), F.linear(product_of(wide[0]), wide[1])
    seed = torch.randn(made.shape).to(dtype)
    found = (made, *grads_of([made], [seed], joined, weight))
    for one, other in zip(found, (wanted, *grads_of([wanted], [seed], *wide)), strict=True):
        limit = 0.02 if dtype == torch.bfloat16 else 1e-5
        assert (one.double() - other).norm() <= limit * other.norm()
    assert found[2].dtype == torch.float32


# -- what the compiler is told of them --------------------------------------------------------


def operations() -> list[tuple[str, Any, tuple[Any, ...]]]:
    cos, sin = tables(2, 3, 8, torch.float32)
    q, k = torch.randn(2, 3, 3, 8), torch.randn(2, 2, 3, 8).transpose(1, 2)
    return [
        ("project", heads.project_operation,
         (torch.randn(2, 3, 7)[..., 1:], torch.randn(56, 6), None, cos, sin, 3, 2)),
        ("join", heads.join_operation, (q, k, k[..., :1].expand_as(k), cos, sin)),
        ("swiglu", swiglu.swiglu_backward, (torch.randn(14, 3).t(), torch.randn(3, 7))),
        ("swiglu of a row", swiglu.swiglu_backward, (torch.randn(2, 14)[:1], torch.randn(1, 7))),
        ("swiglu in a wider row", swiglu.swiglu_backward,
         (torch.randn(2, 20)[:1, :14], torch.randn(2, 9)[:1, :7])),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "operation", "given"), operations())
def test_an_operation_gives_what_the_compiler_is_told(
    name: str, operation: Any, given: tuple[Any, ...]
) -> None:
    opcheck(operation, given, test_utils=CHECKS)
    made = operation(*given)
    for t in made if isinstance(made, tuple) else [made]:
        # Not `is_contiguous()`, for which the stride of a single row is of no importance.
        assert t.stride() == torch.empty(t.shape).stride(), name
