"""Queries, keys and values out of one joined projection, turned by their positions.

Owns: the operation `split_heads` with its gradient. Does not own: the tables (rope.py), attention.

Made of torch's operations, the gradients of the three are turned, moved and put side by side by
code that reads most of them several times.

Shapes: B batch, S sequence, N query heads, K key heads, D head width, H = D / 2.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def turn_heads(  # type: ignore[no-untyped-def]
        source, source_b, source_s, source_n, target, target_b, target_s, target_n,
        cos, sin, table_b, table_s, seq_len, num_heads, half,
        BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    ):  # fmt: skip
        batch, position = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
        pair = tl.arange(0, HALF)
        in_head = pair < half
        table = batch * table_b + position * table_s + pair
        c = tl.load(cos + table, mask=in_head, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + table, mask=in_head, other=0.0).to(tl.float32)[None, :]
        if BACK:
            s = -s
        head = tl.arange(0, HEADS)[:, None]
        inside = (head < num_heads) & in_head[None, :]
        read = source + batch * source_b + position * source_s + head * source_n + pair[None, :]
        first = tl.load(read, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(read + half, mask=inside, other=0.0).to(tl.float32)
        write = target + batch * target_b + position * target_s + head * target_n + pair[None, :]
        tl.store(write, first * c - second * s, mask=inside)
        tl.store(write + half, second * c + first * s, mask=inside)

    return turn_heads


def _turn(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> None:
    """Write [B, S, heads, D] turned into `target`, whatever the strides of the first three."""
    batch, seq_len, num_heads, width = source.shape
    if not source.numel():
        return
    if source.stride(3) != 1:
        source = source.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    _kernel()[(seq_len, batch)](
        source,
        *source.stride()[:3],
        target,
        *target.stride()[:3],
        cos,
        sin,
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1),
        seq_len,
        num_heads,
        width // 2,
        BACK=back,
        HEADS=1 << (num_heads - 1).bit_length(),
        HALF=1 << (width // 2 - 1).bit_length(),
        num_warps=4,
    )


@torch.library.custom_op("headway::split_heads", mutates_args=(), device_types="cuda")
def split_heads(
    joined: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """From [B, S, (N + 2 K) D] and the tables [B or 1, S, 1, H]: q [B, S, N, D], k and v."""
    heads = joined.view(*joined.shape[:2], num_heads + 2 * num_kv_heads, -1)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=2)
    turned = torch.empty_like(q, memory_format=torch.contiguous_format)
    turned_k = torch.empty_like(k, memory_format=torch.contiguous_format)
    _turn(q, turned, cos, sin, back=False)
    _turn(k, turned_k, cos, sin, back=False)
    return turned, turned_k, v.contiguous()


@split_heads.register_fake
def _(
    joined: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch, seq_len, width = joined.shape
    size = width // (num_heads + 2 * num_kv_heads)
    q = joined.new_empty(batch, seq_len, num_heads, size)
    k = joined.new_empty(batch, seq_len, num_kv_heads, size)
    return q, k, torch.empty_like(k)


@torch.library.custom_op("headway::join_heads", mutates_args=(), device_types="cuda")
def join_heads(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The way back of `split_heads`: gradients of its outputs to that of its input."""
    batch, seq_len, num_heads, size = q.shape
    joined = q.new_empty(batch, seq_len, num_heads + 2 * k.shape[2], size)
    to_q, to_k, to_v = joined.split([num_heads, k.shape[2], k.shape[2]], dim=2)
    _turn(q, to_q, cos, sin, back=True)
    _turn(k, to_k, cos, sin, back=True)
    to_v.copy_(v)
    return joined.flatten(2)


@join_heads.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, seq_len, num_heads, size = q.shape
    return q.new_empty(batch, seq_len, (num_heads + 2 * k.shape[2]) * size)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _give_back(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> Any:
    return join_heads(grad_q, grad_k, grad_v, *ctx.saved_tensors), None, None, None, None


split_heads.register_autograd(_give_back, setup_context=_keep)
