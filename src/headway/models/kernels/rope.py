"""Queries, keys and values out of one joined projection, turned by their positions.

Owns: `split_heads` with its gradient. Does not own: the tables (models/rope.py), attention.

Made of torch's operations, the gradients of the three are turned, moved and put side by side by
code that reads most of them several times.

Shapes: B batch, S sequence, N query heads, K key heads, D head width, H = D / 2.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from headway.models.kernels import define_operation


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def turn_part(  # type: ignore[no-untyped-def]
        joined, part, part_b, part_s, part_n, c, s, num_heads, half, pair,
        BACK: tl.constexpr, HEADS: tl.constexpr,
    ):  # fmt: skip
        head = tl.arange(0, HEADS).to(tl.int64)[:, None]
        inside = (head < num_heads) & (pair < half)
        at_joined = joined + head * 2 * half + pair
        at_part = part + head * part_n + pair
        if BACK:
            read, write = at_part, at_joined
        else:
            read, write = at_joined, at_part
        first = tl.load(read, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(read + half, mask=inside, other=0.0).to(tl.float32)
        tl.store(write, first * c - second * s, mask=inside)
        tl.store(write + half, second * c + first * s, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def turn_heads(  # type: ignore[no-untyped-def]
        joined, q, q_b, q_s, q_n, k, k_b, k_s, k_n, v, v_b, v_s, v_n, cos, sin, table_b, seq_len,
        num_heads, num_kv_heads, half,
        BACK: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    ):  # fmt: skip
        """Between [B, S, heads of all three, D] and the three; program: a position of a row."""
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
        q += batch * q_b + position * q_s
        turn_part(joined, q, q_b, q_s, q_n, c, s, num_heads, half, pair, BACK, HEADS)
        joined += num_heads * width
        k += batch * k_b + position * k_s
        turn_part(joined, k, k_b, k_s, k_n, c, s, num_kv_heads, half, pair, BACK, KV_HEADS)
        joined += num_kv_heads * width
        v += batch * v_b + position * v_s
        one, none = tl.full((1, HALF), 1.0, tl.float32), tl.zeros((1, HALF), tl.float32)
        turn_part(joined, v, v_b, v_s, v_n, one, none, num_kv_heads, half, pair, BACK, KV_HEADS)

    return turn_heads


def _turn(
    joined: Tensor, parts: tuple[Tensor, ...], cos: Tensor, sin: Tensor, *, back: bool
) -> None:
    """Fill the parts from `joined`, or with `back` it from them; its memory is in one piece."""
    batch, seq_len, num_heads, width = parts[0].shape
    if not joined.numel():
        return
    cos, sin = cos.contiguous(), sin.contiguous()
    num_kv_heads = parts[1].shape[2]
    placed = [value for part in parts for value in (part, *part.stride()[:3])]
    with torch.cuda.device_of(joined):
        _kernel()[(batch * seq_len,)](
            joined,
            *placed,
            cos,
            sin,
            cos.stride(0) if cos.shape[0] > 1 else 0,
            seq_len,
            num_heads,
            num_kv_heads,
            width // 2,
            BACK=back,
            HEADS=1 << (num_heads - 1).bit_length(),
            KV_HEADS=1 << (num_kv_heads - 1).bit_length(),
            HALF=1 << (width // 2 - 1).bit_length(),
            num_warps=4,
        )


def _fake_split(
    joined: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch, seq_len, width = joined.shape
    torch._check(cos.shape[1] == seq_len, lambda: f"positions for {cos.shape[1]} of {seq_len}")
    torch._check(cos.shape[0] in (1, batch), lambda: f"positions of {cos.shape[0]} rows")
    size = width // (num_heads + 2 * num_kv_heads)
    q = joined.new_empty(batch, seq_len, num_heads, size)
    k = joined.new_empty(batch, seq_len, num_kv_heads, size)
    return q, k, torch.empty_like(k)


@define_operation(
    "split_heads(Tensor joined, Tensor cos, Tensor sin, int num_heads, int num_kv_heads)"
    " -> (Tensor, Tensor, Tensor)",
    _fake_split,
)
def _split_heads(
    joined: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    parts = _fake_split(joined, cos, sin, num_heads, num_kv_heads)
    _turn(joined.contiguous(), parts, cos, sin, back=False)
    return parts


def _fake_join(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, seq_len, num_heads, size = q.shape
    return q.new_empty(batch, seq_len, (num_heads + 2 * k.shape[2]) * size)


@define_operation(
    "join_heads(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin) -> Tensor", _fake_join
)
def _join_heads(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    joined = _fake_join(q, k, v, cos, sin)
    parts = tuple(part if part.stride(3) == 1 else part.contiguous() for part in (q, k, v))
    _turn(joined, parts, cos, sin, back=True)
    return joined


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, joined: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
    ) -> Any:
        ctx.save_for_backward(cos, sin)
        return _split_heads(joined, cos, sin, num_heads, num_kv_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _join_heads(*grads, *ctx.saved_tensors), None, None, None, None


def split_heads(
    joined: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """From [B, S, (N + 2 K) D] and the tables [B or 1, S, 1, H]: q [B, S, N, D], k and v."""
    split: tuple[Tensor, Tensor, Tensor] = _SplitHeads.apply(
        joined, cos, sin, num_heads, num_kv_heads
    )
    return split
