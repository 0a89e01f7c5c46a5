"""Causal attention with grouped heads, with every mask we support.

Owns: `Attention`, `AttentionPlan` (what may see what, decided once per forward), dense masks.
Does not own: positions (rope.py), block masks (block_mask.py), the cache's storage (cache.py), the
block around it (decoder.py).

Shapes: B batch, S queries, T keys, N heads, D head width.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headway.errors import ConfigError
from headway.models.block_mask import make_block_mask
from headway.models.cache import KVCache
from headway.models.config import FLEX_HEAD_SIZES, DecoderConfig
from headway.models.kernels.flash4 import attend_flash4, project_and_attend_flash4, takes_flash4
from headway.models.kernels.heads import project_heads
from headway.models.norm import RMSNorm
from headway.models.projections import joins, operands, project_joined
from headway.models.rope import apply_rope


def new_linear(num_in: int, num_out: int, *, bias: bool = False) -> nn.Linear:
    """A linear layer with unset weights: `Decoder.init_weights` draws them, once."""
    device = torch.get_default_device()
    linear = nn.utils.skip_init(nn.Linear, num_in, num_out, bias=bias, device=device)
    assert isinstance(linear, nn.Linear)
    return linear


@dataclass(frozen=True)
class AttentionPlan:
    """Which keys each query of one forward pass sees, in the form the kernel wants."""

    is_causal: bool = True
    """The kernel's own causal mask is all that is needed."""
    mask: Tensor | None = None
    """[B or 1, 1, S, T], added to the scores: 0 where a query sees a key, else -inf (SDPA)."""
    block_mask: Any = None
    """The same as a block mask (flex)."""
    groups_heads: bool = True
    """The kernel lets several query heads share a key head by itself (SDPA)."""
    flash4: bool = False
    """FlashAttention 4 in place of SDPA; only where `is_causal` is all there is."""


def plan_attention(
    config: DecoderConfig,
    *,
    seq_len: int,
    past_len: int,
    device: torch.device,
    dtype: torch.dtype,
    document_ids: Tensor | None,
    attention_mask: Tensor | None,
    cached: bool,
    prefers_flex: bool = False,
    flash4: bool = False,
) -> AttentionPlan:
    """Decide the mask of one forward pass; the plain causal case builds none.

    `prefers_flex`: the blocks are compiled, so that flex attention costs no compilation of its own.
    `flash4`: the plain causal case goes by FlashAttention 4.
    """
    if cached and document_ids is not None:
        raise ConfigError("document_ids cannot be combined with a key/value cache")
    num_keys = past_len + seq_len
    if attention_mask is not None and attention_mask.shape[-1] != num_keys:
        raise ConfigError(
            f"attention_mask covers {attention_mask.shape[-1]} tokens, the sequence has {num_keys}"
        )
    # Looking at a mask costs a host sync on an accelerator, so there a given mask is always used.
    if attention_mask is not None and attention_mask.device.type == "cpu" and attention_mask.all():
        attention_mask = None
    window = config.sliding_window
    if window is not None and window >= num_keys:
        window = None
    has_blocks = document_ids is not None or window is not None
    if not cached and _takes_flex(config, device, dtype, preferred=prefers_flex and has_blocks):
        return AttentionPlan(
            is_causal=False,
            block_mask=make_block_mask(seq_len, device, window, document_ids, attention_mask),
        )
    plain = document_ids is None and attention_mask is None and window is None
    plain = plain and (past_len == 0 or seq_len == 1)
    groups = _groups_heads(device, dtype, masked=not plain)
    if plain:
        # Branches and not an expression: for a compiler the length may be a symbol, and the kernel
        # takes no symbolic truth.
        is_causal = past_len == 0
        if seq_len == 1:
            is_causal = False
        flash4 = flash4 and is_causal and not cached and takes_flash4(device, dtype)
        return AttentionPlan(is_causal=is_causal, groups_heads=groups, flash4=flash4)
    seen = _dense_mask(seq_len, past_len, device, window, document_ids, attention_mask)
    # SDPA would turn a boolean mask into this form anew in every layer, and save each for backward.
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
    return AttentionPlan(is_causal=False, mask=mask, groups_heads=groups)


def _takes_flex(
    config: DecoderConfig, device: torch.device, dtype: torch.dtype, *, preferred: bool
) -> bool:
    if config.attention != "auto":
        return config.attention == "flex"
    # Where a dense mask would be of use to nobody: it is slower and grows with the square of the
    # length. Only what flex is known to be fast at.
    return (
        preferred
        and device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and config.head_size in FLEX_HEAD_SIZES
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _groups_heads(device: torch.device, dtype: torch.dtype, *, masked: bool) -> bool:
    """Whether SDPA groups heads without writing out the whole score matrix."""
    if device.type == "cpu":
        return True
    # Of the GPU kernels only flash (half precision, no mask) does, where it is allowed; asked of
    # the others, SDPA would fall back to the scores.
    half = dtype in (torch.float16, torch.bfloat16)
    return bool(device.type == "cuda" and half and not masked and _allows_flash())


# Known when a graph is made: asked inside of one, it would end the graph there.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _allows_flash() -> bool:
    allowed: bool = torch.backends.cuda.flash_sdp_enabled()
    return allowed


def _dense_mask(
    seq_len: int,
    past_len: int,
    device: torch.device,
    window: int | None,
    document_ids: Tensor | None,
    attention_mask: Tensor | None,
) -> Tensor:
    keys = torch.arange(past_len + seq_len, device=device)
    queries = keys[past_len:].unsqueeze(1)
    seen = keys <= queries
    if window is not None:
        seen = seen & (queries - keys < window)
    seen = seen.unsqueeze(0)
    if document_ids is not None:
        seen = seen & (document_ids.unsqueeze(2) == document_ids.unsqueeze(1))
    if attention_mask is not None:
        # A padded query still sees itself: a row with no key at all would be NaN.
        seen = seen & (attention_mask.bool().unsqueeze(1) | (keys == queries))
    return seen.unsqueeze(1)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _attend_flex(q_BNSD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor, block_mask: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    plain = q_BNSD.device.type == "cpu" or torch.compiler.is_compiling()
    attend: Any = flex_attention if plain else _compiled_flex()
    grouped = q_BNSD.shape[1] != k_BNTD.shape[1]
    out: Tensor = attend(q_BNSD, k_BNTD, v_BNTD, block_mask=block_mask, enable_gqa=grouped)
    return out


def _attend_growing(q_BNSD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor, plan: AttentionPlan) -> Tensor:
    """Attention over a cache, whose length is new at every call."""
    if q_BNSD.device.type != "cuda":
        return _attend_sdpa(q_BNSD, k_BNTD, v_BNTD, plan)
    # cuDNN, the default on recent GPUs, plans anew for each length, which takes longer than the
    # whole forward pass. What the user does not allow stays out.
    allowed = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
    }
    kinds = [kind for kind, is_allowed in allowed.items() if is_allowed]
    with sdpa_kernel(kinds) if kinds else contextlib.nullcontext():
        return _attend_sdpa(q_BNSD, k_BNTD, v_BNTD, plan)


def _attend_sdpa(q_BNSD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor, plan: AttentionPlan) -> Tensor:
    repeats = q_BNSD.shape[1] // k_BNTD.shape[1]
    if repeats > 1 and not plan.groups_heads:
        k_BNTD = k_BNTD.repeat_interleave(repeats, dim=1)
        v_BNTD = v_BNTD.repeat_interleave(repeats, dim=1)
    return F.scaled_dot_product_attention(
        q_BNSD,
        k_BNTD,
        v_BNTD,
        attn_mask=plan.mask,
        is_causal=plan.is_causal,
        enable_gqa=repeats > 1 and plan.groups_heads,
    )


class Attention(nn.Module):
    """Causal self-attention; parameter names are Hugging Face's."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_size = config.head_size
        query, key = config.num_heads * config.head_size, config.kv_heads * config.head_size
        bias = config.attention_bias
        self.q_proj = new_linear(config.hidden_size, query, bias=bias)
        self.k_proj = new_linear(config.hidden_size, key, bias=bias)
        self.v_proj = new_linear(config.hidden_size, key, bias=bias)
        self.o_proj = new_linear(query, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        cache: KVCache | None = None,
    ) -> Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        joined = self.q_norm is None and joins(x, *layers)
        if joined and plan.flash4:
            seen_BSND = project_and_attend_flash4(*operands(x, *layers), *rope, self.head_size)
        else:
            parts = (
                project_heads(*operands(x, *layers), *rope, self.head_size)
                if joined
                else self._project(x, rope)
            )
            seen_BSND = self._attend(*parts, plan, cache)
        seen = seen_BSND.flatten(2)
        if joins(seen, self.o_proj):
            return project_joined(seen, self.o_proj)
        projected: Tensor = self.o_proj(seen)
        return projected

    def _attend(
        self,
        q_BSND: Tensor,
        k_BSND: Tensor,
        v_BSND: Tensor,
        plan: AttentionPlan,
        cache: KVCache | None,
    ) -> Tensor:
        if plan.flash4:
            return attend_flash4(q_BSND, k_BSND, v_BSND)
        q_BNSD, k_BNTD, v_BNTD = (t.transpose(1, 2) for t in (q_BSND, k_BSND, v_BSND))
        if cache is not None:
            k_BNTD, v_BNTD = cache.append(self.layer, k_BNTD, v_BNTD)
            seen_BNSD = _attend_growing(q_BNSD, k_BNTD, v_BNTD, plan)
        elif plan.block_mask is not None:
            seen_BNSD = _attend_flex(q_BNSD, k_BNTD, v_BNTD, plan.block_mask)
        else:
            seen_BNSD = _attend_sdpa(q_BNSD, k_BNTD, v_BNTD, plan)
        return seen_BNSD.transpose(1, 2)

    def _project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, the first two turned by their positions."""
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q_BSND, k_BSND, v_BTND = (layer(x).unflatten(2, (-1, self.head_size)) for layer in layers)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSND, k_BSND = self.q_norm(q_BSND), self.k_norm(k_BSND)
        return apply_rope(q_BSND, *rope), apply_rope(k_BSND, *rope), v_BTND
