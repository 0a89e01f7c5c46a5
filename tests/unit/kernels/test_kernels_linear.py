"""The product with several weights, whose operations are torch's own: on a CPU as on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

from headway.models.kernels.linear import cast_again, joined_linear, weight_grad

CHECKS = ("test_schema", "test_faketensor")
DTYPES = [torch.float32, torch.bfloat16]


def grads_of(made: Tensor, grad: Tensor, wrt: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(made, wrt, grad.to(made.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_joined_product_is_that_of_the_weights_apart(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 24).to(dtype).requires_grad_()
    weights: list[Tensor] = [torch.randn(size, 24, requires_grad=True) for size in (16, 8, 1)]
    shift = torch.randn(25).to(dtype).requires_grad_() if bias else None
    wrt = [x, *weights, *([] if shift is None else [shift])]
    wide = [t.detach().double().requires_grad_() for t in wrt]
    # The product rounds its weights to the dtype of x.
    rounded = torch.cat([w.detach().to(dtype).double() for w in weights])
    plain = F.linear(wide[0], torch.cat(wide[1:4]), wide[4] if bias else None)
    made = joined_linear(x, weights, shift)
    assert made.dtype == dtype
    wanted = F.linear(wide[0], rounded, wide[4] if bias else None)
    torch.testing.assert_close(made.double(), wanted, rtol=1e-2, atol=0.1)
    # Positions are last in memory, as after a transposed product.
    grad = torch.randn(2, 25, 5).to(dtype).transpose(1, 2)
    found, expected = grads_of(made, grad, wrt), grads_of(plain, grad, wide)
    for one, other, given in zip(found, expected, wrt, strict=True):
        assert one.dtype == given.dtype and one.shape == given.shape
        # The gradient of a weight is never rounded to half precision.
        limit = 1e-5 if given.dtype == torch.float32 else 2e-2
        assert (one.double() - other).norm() <= limit * other.norm()


def test_frozen_weights_have_no_gradient() -> None:
    x, weights = torch.randn(3, 4, requires_grad=True), [torch.randn(2, 4), torch.randn(5, 4)]
    joined_linear(x, weights).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.cat(weights).sum(0).expand(3, 4))


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", ["trained", "evaluated", "frozen"])
def test_a_compiled_product_is_the_plain_one(number: int, bias: bool, mode: str) -> None:
    """Without gradients the compiler calls the function in another way."""
    torch.manual_seed(0)
    weights = [torch.randn(4 + n, 6, requires_grad=mode == "trained") for n in range(number)]
    shift = torch.randn(sum(weight.shape[0] for weight in weights)) if bias else None
    x = torch.randn(2, 3, 6)
    torch.compiler.reset()  # each case counts against the limit of the function
    compiled = torch.compile(joined_linear, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(mode != "evaluated"):
        found = compiled(x, weights, shift)
    torch.testing.assert_close(found, F.linear(x, torch.cat(weights), shift))
    assert found.requires_grad == (mode == "trained")


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_operation_gives_what_the_compiler_is_told(dtype: torch.dtype) -> None:
    grad, x = torch.randn(4, 3).t().to(dtype), torch.randn(3, 5).to(dtype)
    weights = [torch.randn(3, 4), torch.randn(4, 2).t()]
    opcheck(weight_grad, (grad, x, torch.float32), test_utils=CHECKS)
    opcheck(cast_again, (weights, dtype), test_utils=CHECKS)
    assert torch.equal(cast_again(weights, dtype), torch.cat(weights).to(dtype))
