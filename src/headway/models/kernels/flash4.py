"""FlashAttention 4: plain causal attention by the kernels of the package flash-attn-4.

Owns: `attend_flash4` and `project_and_attend_flash4` with their gradients, and the package. Does
not own: who asks for it (`sdpa_backend`), which attention is plain and causal
(models/attention.py), the projection (linear.py, heads.py).

The package makes its kernels with a compiler of its own when they are first called, in some
seconds; they are kept in a folder if it is told one before it is imported.

Shapes: B batch, S sequence, N query heads, K key heads, D head width.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headway.errors import ConfigError, missing_extra
from headway.models.kernels import define_operation
from headway.models.kernels.heads import project_operation, split, turn_
from headway.models.kernels.linear import join, joined_gradients

CAPABILITIES = (9, 10)
"""Major versions of NVIDIA's GPUs that its kernels, with their gradients, are made for."""
MAX_HEAD_SIZE = 128
DTYPES = (torch.bfloat16, torch.float16)

_MODULE = "flash_attn.cute.interface"
_SETTINGS = ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
_FUNCTIONS = ("_flash_attn_fwd", "_flash_attn_bwd")
_loaded: ModuleType | None = None


def load_flash4(purpose: str, folder: Path | None = None) -> ModuleType:
    """The package's module; kernels are kept in `folder`, unless the environment names another."""
    global _loaded
    if _loaded is not None:
        return _loaded
    enabled, place = _SETTINGS
    before = {name: os.environ.get(name) for name in _SETTINGS}
    if folder is not None and before[enabled] is None:
        os.environ[enabled] = "1"
        os.environ.setdefault(place, str(folder))
    try:
        _loaded = importlib.import_module(_MODULE)
        if not all(hasattr(_loaded, name) for name in _FUNCTIONS):
            raise ImportError("it has no " + " or ".join(_FUNCTIONS))
    except (ImportError, OSError, RuntimeError) as error:  # it loads libraries, and makes folders
        _loaded = None
        if getattr(error, "name", None) in (_MODULE, _MODULE.rpartition(".")[0], "flash_attn"):
            raise missing_extra("flash-attn-4", "flash4", purpose) from None
        what = f"{purpose} needs the package 'flash-attn-4', which cannot be used"
        raise ConfigError(f"{what}: {error}") from error
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
    return _loaded


def takes_flash4(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether values like these can be given to its kernels."""
    return device.type == "cuda" and dtype in DTYPES


def _fake_forward(q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> tuple[Tensor, Tensor]:
    batch, seq_len, num_heads, _ = q_BSND.shape
    sums = q_BSND.new_empty((batch, num_heads, seq_len), dtype=torch.float32)
    return q_BSND.new_empty(q_BSND.shape), sums


def _count_flops(q_shape: Any, *rest: Any, **named: Any) -> int:
    batch, seq_len, num_heads, width = q_shape
    return int(2 * batch * num_heads * seq_len**2 * width)  # two products, each a half of pairs


@define_operation(
    "flash4(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)", _fake_forward, flops=_count_flops
)
def flash4_operation(q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> tuple[Tensor, Tensor]:
    """What is seen, and the logarithms of the sums that scores were divided by."""
    package = load_flash4("attention by FlashAttention 4")
    # Parts of one projection lie apart from each other: its kernels take them as they are.
    with torch.cuda.device_of(q_BSND):
        found = package._flash_attn_fwd(q_BSND, k_BSKD, v_BSKD, causal=True, return_lse=True)
    out, sums = (part.contiguous() for part in found[:2])
    return out, sums


def _fake_backward(
    grad: Tensor, q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.new_empty(x.shape) for x in (q_BSND, k_BSKD, v_BSKD))
    return q, k, v


@define_operation(
    "flash4_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums)"
    " -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def _backward(
    grad: Tensor, q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    found = _fake_backward(grad, q_BSND, k_BSKD, v_BSKD, out, sums)
    _fill_gradients(found, grad, q_BSND, k_BSKD, v_BSKD, out, sums)
    return found


def _fill_gradients(found: tuple[Tensor, ...], grad: Tensor, *saved: Tensor) -> None:
    """Write the gradients of queries, keys and values where they are wanted."""
    package = load_flash4("attention by FlashAttention 4")
    q, k, v, out, sums = saved
    dq, dk, dv = found
    with torch.cuda.device_of(q):
        package._flash_attn_bwd(
            q,
            k,
            v,
            out,
            grad.contiguous(),
            sums,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            dq=dq,
            dk=dk,
            dv=dv,
        )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> Tensor:
        out, sums = flash4_operation(q_BSND, k_BSKD, v_BSKD)
        ctx.save_for_backward(q_BSND, k_BSKD, v_BSKD, out, sums)
        seen: Tensor = out
        return seen

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        return _backward(grads[0], *ctx.saved_tensors)


def attend_flash4(q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> Tensor:
    """Causal attention, [B, S, N, D]; several query heads may share a key head."""
    seen: Tensor = _Attend.apply(q_BSND, k_BSKD, v_BSKD)
    return seen


def _fake_joined_backward(grad: Tensor, joined: Tensor, *rest: Any) -> Tensor:
    return joined.new_empty(joined.shape)


@define_operation(
    "flash4_joined_backward(Tensor grad, Tensor joined, Tensor out, Tensor sums, Tensor cos,"
    " Tensor sin, int num_heads, int num_kv_heads) -> Tensor",
    _fake_joined_backward,
)
def _joined_backward(
    grad: Tensor,
    joined: Tensor,
    out: Tensor,
    sums: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    found, heads = torch.empty_like(joined), (num_heads, num_kv_heads)
    _fill_gradients(split(found, *heads), grad, *split(joined, *heads), out, sums)
    turn_(found, cos, sin, *heads, back=True)
    return found


class _ProjectAndAttend(torch.autograd.Function):
    """One function, and not two: gradients of the three parts then lie side by side at once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        size: int,
    ) -> Tensor:
        weights = (query, key, value)
        ctx.heads = heads = query.shape[0] // size, key.shape[0] // size
        joined = project_operation(x, join(weights, x.dtype), bias, cos, sin, *heads)
        out, sums = flash4_operation(*split(joined, *heads))
        ctx.save_for_backward(x, joined, out, sums, cos, sin, *weights)
        ctx.has_bias = bias is not None
        seen: Tensor = out
        return seen

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, joined, out, sums, cos, sin, *weights = ctx.saved_tensors
        grad = _joined_backward(grads[0], joined, out, sums, cos, sin, *ctx.heads)
        wanted = any(ctx.needs_input_grad[2:5])
        found = joined_gradients(grad, x, weights, bias=ctx.has_bias, wanted=wanted)
        return *found, None, None, None


def project_and_attend_flash4(
    x: Tensor, weights: list[Tensor], bias: Tensor | None, cos: Tensor, sin: Tensor, size: int
) -> Tensor:
    """`attend_flash4` of what `project_heads` makes of the same."""
    seen: Tensor = _ProjectAndAttend.apply(x, bias, *weights, cos, sin, size)
    return seen
