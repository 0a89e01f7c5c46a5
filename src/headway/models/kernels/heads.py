"""Queries, keys and values out of one joined projection, turned where they lie.

Owns: `project_heads` with its gradient, and the two kernels that turn heads. Does not own: the
tables (models/rope.py), attention.

Queries and keys are turned in the projection's own memory, and values stay where the product put
them: attention takes them as parts of it. Made of torch's operations, the gradients of the three
are turned, moved and put side by side by code that reads most of them several times.

Shapes: B batch, S sequence, N query heads, K key heads, D head width, H = D / 2.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.kernels import define_operation
from headway.models.kernels.linear import join, joined_gradients


class Kernels(NamedTuple):
    """What this module launches."""

    turn: Any
    join: Any


@functools.cache
def _kernels() -> Kernels:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def turn_part(  # type: ignore[no-untyped-def]
        read, read_n, write, write_n, c, s, num_heads, half, pair, HEADS: tl.constexpr
    ):
        """Some heads of a position, each a step of `read_n` from the last and then of `write_n`."""
        head = tl.arange(0, HEADS).to(tl.int64)[:, None]
        inside = (head < num_heads) & (pair < half)
        read += head * read_n + pair
        write += head * write_n + pair
        first = tl.load(read, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(read + half, mask=inside, other=0.0).to(tl.float32)
        tl.store(write, first * c - second * s, mask=inside)
        tl.store(write + half, second * c + first * s, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def turn_heads(  # type: ignore[no-untyped-def]
        joined, cos, sin, table_b, seq_len, num_heads, num_kv_heads, half,
        BACK: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    ):  # fmt: skip
        """Queries and keys of [B, S, heads of all three, D] in their place; program: a position."""
        place = tl.program_id(0).to(tl.int64)
        batch, position = place // seq_len, place % seq_len
        pair = tl.arange(0, HALF)[None, :]
        table = batch * table_b + position * half + pair
        c = tl.load(cos + table, mask=pair < half, other=0.0).to(tl.float32)
        s = tl.load(sin + table, mask=pair < half, other=0.0).to(tl.float32)
        if BACK:
            s = -s
        width = 2 * half
        joined += place * (num_heads + 2 * num_kv_heads) * width
        turn_part(joined, width, joined, width, c, s, num_heads, half, pair, HEADS)
        joined += num_heads * width
        turn_part(joined, width, joined, width, c, s, num_kv_heads, half, pair, KV_HEADS)

    @triton.jit  # type: ignore[untyped-decorator]
    def join_heads(  # type: ignore[no-untyped-def]
        joined, q, q_b, q_s, q_n, k, k_b, k_s, k_n, v, v_b, v_s, v_n, cos, sin, table_b, seq_len,
        num_heads, num_kv_heads, half,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    ):  # fmt: skip
        """The three side by side, the first two turned back; program: a position of a row."""
        place = tl.program_id(0).to(tl.int64)
        batch, position = place // seq_len, place % seq_len
        pair = tl.arange(0, HALF)[None, :]
        table = batch * table_b + position * half + pair
        c = tl.load(cos + table, mask=pair < half, other=0.0).to(tl.float32)
        s = -tl.load(sin + table, mask=pair < half, other=0.0).to(tl.float32)
        width = 2 * half
        joined += place * (num_heads + 2 * num_kv_heads) * width
        q += batch * q_b + position * q_s
        turn_part(q, q_n, joined, width, c, s, num_heads, half, pair, HEADS)
        joined += num_heads * width
        k += batch * k_b + position * k_s
        turn_part(k, k_n, joined, width, c, s, num_kv_heads, half, pair, KV_HEADS)
        joined += num_kv_heads * width
        v += batch * v_b + position * v_s
        one, none = tl.full((1, HALF), 1.0, tl.float32), tl.zeros((1, HALF), tl.float32)
        turn_part(v, v_n, joined, width, one, none, num_kv_heads, half, pair, KV_HEADS)

    return Kernels(turn_heads, join_heads)


def _table_step(table: Tensor) -> int:
    """From the positions of a row to those of the next; all rows may share theirs."""
    return table.stride(0) if table.shape[0] > 1 else 0


def _blocks(num_heads: int, num_kv_heads: int, half: int) -> dict[str, int]:
    sizes = {"HEADS": num_heads, "KV_HEADS": num_kv_heads, "HALF": half}
    return {name: 1 << (size - 1).bit_length() for name, size in sizes.items()}


def turn_(
    joined: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, *, back: bool
) -> None:
    """Turn queries and keys of [B, S, (N + 2 K) D] by their positions, or with `back` back."""
    if not joined.numel():
        return
    assert joined.is_contiguous()
    batch, seq_len, width = joined.shape
    half = width // (num_heads + 2 * num_kv_heads) // 2
    cos, sin = cos.contiguous(), sin.contiguous()
    with torch.cuda.device_of(joined):
        _kernels().turn[(batch * seq_len,)](
            joined,
            cos,
            sin,
            _table_step(cos),
            seq_len,
            num_heads,
            num_kv_heads,
            half,
            BACK=back,
            num_warps=4,
            **_blocks(num_heads, num_kv_heads, half),
        )


def split(joined: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, S, N, D], keys and values [B, S, K, D] as parts of it."""
    heads = joined.unflatten(2, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=2)
    return q, k, v


def _fake_project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    batch, seq_len, _ = x.shape
    torch._check(cos.shape[1] == seq_len, lambda: f"positions for {cos.shape[1]} of {seq_len}")
    torch._check(cos.shape[0] in (1, batch), lambda: f"positions of {cos.shape[0]} rows")
    return x.new_empty(batch, seq_len, weight.shape[0])


def _count_flops(x_shape: Any, weight_shape: Any, *rest: Any, **named: Any) -> int:
    batch, seq_len, width = x_shape
    return int(2 * batch * seq_len * width * weight_shape[0])


# The product is a part of it: of an operation that changes a tensor of the graph, the compiler may
# make one that changes a copy.
@define_operation(
    "project_heads(Tensor x, Tensor weight, Tensor? bias, Tensor cos, Tensor sin, int num_heads,"
    " int num_kv_heads) -> Tensor",
    _fake_project,
    flops=_count_flops,
)
def project_operation(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    """The product [B, S, (N + 2 K) D], its queries and keys turned."""
    _fake_project(x, weight, bias, cos, sin, num_heads, num_kv_heads)
    joined = F.linear(x, weight, bias).contiguous()
    turn_(joined, cos, sin, num_heads, num_kv_heads, back=False)
    return joined


def _fake_join(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, seq_len, num_heads, size = q.shape
    return q.new_empty(batch, seq_len, (num_heads + 2 * k.shape[2]) * size)


@define_operation(
    "join_heads(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin) -> Tensor", _fake_join
)
def join_operation(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradients of the three side by side, as those of the product before it was turned."""
    joined = _fake_join(q, k, v, cos, sin)
    if not joined.numel():
        return joined
    batch, seq_len, num_heads, width = q.shape
    num_kv_heads = k.shape[2]
    parts = [part if part.stride(3) == 1 else part.contiguous() for part in (q, k, v)]
    placed = [value for part in parts for value in (part, *part.stride()[:3])]
    cos, sin = cos.contiguous(), sin.contiguous()
    with torch.cuda.device_of(joined):
        _kernels().join[(batch * seq_len,)](
            joined,
            *placed,
            cos,
            sin,
            _table_step(cos),
            seq_len,
            num_heads,
            num_kv_heads,
            width // 2,
            num_warps=4,
            **_blocks(num_heads, num_kv_heads, width // 2),
        )
    return joined


class _ProjectHeads(torch.autograd.Function):
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
    ) -> Any:
        weights = (query, key, value)
        ctx.save_for_backward(x, cos, sin, *weights)
        ctx.has_bias = bias is not None
        heads = query.shape[0] // size, key.shape[0] // size
        return split(project_operation(x, join(weights, x.dtype), bias, cos, sin, *heads), *heads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, cos, sin, *weights = ctx.saved_tensors
        grad = join_operation(*grads, cos, sin)
        wanted = any(ctx.needs_input_grad[2:5])
        found = joined_gradients(grad, x, weights, bias=ctx.has_bias, wanted=wanted)
        return *found, None, None, None


def project_heads(
    x: Tensor, weights: list[Tensor], bias: Tensor | None, cos: Tensor, sin: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """From [B, S, .], the three weights and tables [B or 1, S, 1, H]: q [B, S, N, D], k and v.

    The bias is that of all three, in the dtype of `x`; `size`: the width of a head.
    """
    found: tuple[Tensor, Tensor, Tensor] = _ProjectHeads.apply(x, bias, *weights, cos, sin, size)
    return found
