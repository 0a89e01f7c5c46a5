"""How much GPU memory one training step of the reference decoder needs, from its sizes alone.

Owns: `estimate_training_memory`, the count of saved activations. Imports no torch.
Does not own: sharding over ranks (strategies/), other models' memory.

The counts follow what autograd keeps in decoder.py, attention.py and loss.py; a change of what is
saved there belongs here too.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.errors import ConfigError, unknown
from headway.models.config import FLEX_HEAD_SIZES, DecoderConfig

WORKSPACE_BYTES = 2 * 32 * 1024**2
"""What cuBLAS keeps on current data-centre GPUs, for the forward and the backward thread each."""

_HALF_KINDS = ("bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes by purpose; the total is the step's peak, when not all of them exist at once."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """Saved for backward at the end of the forward pass, autocast's weight copies included."""
    loss_bytes: int
    """Logits of one chunk, and what the chunked loss keeps of its head."""
    fixed_bytes: int
    """Rotary tables and library workspace."""
    total_bytes: int


@dataclass(frozen=True)
class _Widths:
    """Elements and bytes per token."""

    hidden: int
    query: int
    key: int
    ffn: int
    num_norm_heads: int
    residual_bytes: int
    compute_bytes: int


def _widths(config: DecoderConfig, dtype_bytes: int, mixed_precision: str | None) -> _Widths:
    if mixed_precision in (None, "no"):
        compute_bytes = dtype_bytes
    elif mixed_precision in _HALF_KINDS:
        compute_bytes = 2
    else:
        raise ConfigError(unknown("mixed_precision", mixed_precision, ("no", *_HALF_KINDS)))
    return _Widths(
        hidden=config.hidden_size,
        query=config.num_heads * config.head_size,
        key=config.kv_heads * config.head_size,
        ffn=config.ffn_size,
        num_norm_heads=config.num_heads + config.kv_heads,
        residual_bytes=dtype_bytes,
        compute_bytes=compute_bytes,
    )


def _has_dense_mask(
    config: DecoderConfig, w: _Widths, *, seq_len: int, document_mask: bool, compiled: bool
) -> bool:
    masked = document_mask or (config.sliding_window or seq_len) < seq_len
    if config.attention != "auto":
        return masked and config.attention == "sdpa"
    by_block = compiled and w.compute_bytes == 2 and config.head_size in FLEX_HEAD_SIZES
    return masked and not by_block


def _block_bytes_per_token(
    config: DecoderConfig, w: _Widths, *, fused: bool, masked: bool, compiled: bool
) -> int:
    """What one decoder block saves for backward, per token."""
    a, r = w.compute_bytes, w.residual_bytes
    norms = 2 * (r * w.hidden + 4 + a * w.hidden)
    if compiled and a < r:
        norms -= a * w.hidden  # the compiler makes one of the two again
    if not fused:
        norms += 2 * r * w.hidden
    qk_norms = 0
    if config.qk_norm:
        elements = w.query + w.key
        qk_norms = 4 * w.num_norm_heads + (a * elements if fused else 8 * elements)
    # Queries, keys, values, the output (which is also the projection's input), the log sums. With a
    # mask, or in float32, the GPU kernels want one key and value head per query head.
    repeated = fused and (masked or a == 4)
    attention = a * (2 * w.query + 2 * (w.query if repeated else w.key)) + 4 * config.num_heads
    # Gate and up; not compiled, also silu(gate) and the product.
    mlp = (2 if compiled else 4) * a * w.ffn
    dropout = 2 * w.hidden if config.dropout else 0
    return norms + qk_norms + attention + mlp + dropout


def _tail_bytes_per_token(w: _Widths, *, fused: bool) -> int:
    """The last norm's input and output, the loss's gradient of that output, ids and labels."""
    a, r = w.compute_bytes, w.residual_bytes
    return (r + 2 * a + (0 if fused else r)) * w.hidden + 4 + 24


def saved_activation_bytes(
    config: DecoderConfig,
    *,
    batch_size: int,
    seq_len: int,
    dtype_bytes: int = 4,
    mixed_precision: str | None = None,
    gradient_checkpointing: bool = False,
    document_mask: bool = False,
    compiled: bool = False,
    fused_kernels: bool = True,
) -> int:
    """What autograd holds at the end of a forward pass, weights' half-precision copies included.

    `compiled`: the blocks are, on a GPU; they keep no copies of weights.

    `fused_kernels=False` counts a CPU's composite norms, for comparison with a CPU measurement.
    """
    w = _widths(config, dtype_bytes, mixed_precision)
    masked = _has_dense_mask(
        config, w, seq_len=seq_len, document_mask=document_mask, compiled=compiled
    )
    tokens = batch_size * seq_len
    if gradient_checkpointing:
        block = w.residual_bytes * w.hidden
    else:
        block = _block_bytes_per_token(
            config, w, fused=fused_kernels, masked=masked, compiled=compiled
        )
    total = tokens * (config.num_layers * block + _tail_bytes_per_token(w, fused=fused_kernels))
    if w.compute_bytes != dtype_bytes and not gradient_checkpointing and not compiled:
        total += w.compute_bytes * _layer_matrices(config) * config.num_layers
    if masked:
        total += (batch_size if document_mask else 1) * seq_len * seq_len * w.compute_bytes
    return total


def _layer_matrices(config: DecoderConfig) -> int:
    matrices = config.num_matmul_parameters() - config.vocab_size * config.hidden_size
    return matrices // config.num_layers


def estimate_training_memory(
    config: DecoderConfig,
    *,
    batch_size: int,
    seq_len: int,
    dtype_bytes: int = 4,
    optimizer_bytes_per_param: float = 8,
    gradient_checkpointing: bool = False,
    mixed_precision: str | None = None,
    accumulation_steps: int = 1,
    fused_optimizer: bool = True,
    document_mask: bool = False,
    compiled: bool = False,
) -> MemoryEstimate:
    """Peak GPU memory of one optimizer step on one device, from the sizes alone.

    `dtype_bytes` is the weights' own element size, `mixed_precision` ("bf16", "fp16") that of
    autocast; `optimizer_bytes_per_param` is 8 for AdamW's two float32 moments. `compiled`: the
    blocks are, by torch.compile without a memory budget.
    """
    w = _widths(config, dtype_bytes, mixed_precision)
    tokens = batch_size * seq_len
    a, r = w.compute_bytes, w.residual_bytes
    num_parameters = config.num_parameters()
    weights = dtype_bytes * num_parameters
    gradients = dtype_bytes * num_parameters
    optimizer = int(optimizer_bytes_per_param * num_parameters)
    fixed = WORKSPACE_BYTES + 4 * config.max_seq_len * config.head_size
    saved = saved_activation_bytes(
        config,
        batch_size=batch_size,
        seq_len=seq_len,
        dtype_bytes=dtype_bytes,
        mixed_precision=mixed_precision,
        gradient_checkpointing=gradient_checkpointing,
        document_mask=document_mask,
        compiled=compiled,
    )
    masked = _has_dense_mask(
        config, w, seq_len=seq_len, document_mask=document_mask, compiled=compiled
    )
    block = tokens * _block_bytes_per_token(config, w, fused=True, masked=masked, compiled=compiled)
    tail = tokens * _tail_bytes_per_token(w, fused=True)
    mixed = a != dtype_bytes
    copies = a * _layer_matrices(config) if mixed else 0

    head = config.vocab_size * config.hidden_size
    chunk = min(config.chunk_tokens or tokens, tokens)
    # A chunk's logits, whose gradient takes their place; the head's gradient, and a copy of it.
    loss = chunk * config.vocab_size * a + head * (4 + (a if mixed else 0))

    # The widest moment of a block's backward: the gradients of both factors of the gated product,
    # that of the product, and of the residual stream.
    in_backward = tokens * (2 * a * w.ffn + (2 * r + a) * w.hidden)
    # By then the block has made most gradients of its weights, a compiled one of casts of its own.
    in_first_backward = in_backward + dtype_bytes * _layer_matrices(config)
    if compiled and not gradient_checkpointing:
        in_first_backward += copies
    recomputed = block + copies if gradient_checkpointing else 0
    # While the loss runs, autocast still holds every cast weight, also of recomputed blocks.
    held_copies = copies * config.num_layers if gradient_checkpointing and not compiled else 0
    earlier = gradients if accumulation_steps > 1 else 0
    head_grad = head * (4 + (dtype_bytes if dtype_bytes < 4 else 0))
    embedding_grad = dtype_bytes * head if config.tie_embeddings or earlier else 0
    first_block = recomputed if gradient_checkpointing else block + copies
    base = weights + optimizer + fixed
    peak = max(
        base + earlier + saved + held_copies + loss,
        base + earlier + saved - tail + head_grad + recomputed + in_first_backward,
        base + gradients - dtype_bytes * head + first_block + in_backward,
        base + gradients + embedding_grad + tokens * r * w.hidden,
        base + gradients + (0 if fused_optimizer else weights),
    )
    return MemoryEstimate(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=saved,
        loss_bytes=loss,
        fixed_bytes=fixed,
        total_bytes=peak,
    )
