"""What a reference decoder looks like: its sizes, their rules, and what follows from them.

Owns: `DecoderConfig`, its validation, parameter and FLOP counts. Imports no torch.
Does not own: the modules (decoder.py), Hugging Face spellings (hf_config.py), memory (memory.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from headway.errors import ConfigError, unknown

_CHUNK_LOGITS = 1 << 27
ATTENTION_KINDS = ("auto", "flex", "sdpa")
FLEX_HEAD_SIZES = (32, 64, 128)
"""That `attention: auto` takes flex attention for, in half precision: what it is known for."""
ROPE_SCALING_KEYS = (
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "original_max_position_embeddings",
    "rope_type",
)
_POSITIVE_INTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_seq_len",
    "sliding_window",
)
_FLAGS = ("qk_norm", "tie_embeddings", "attention_bias")


def default_chunk_tokens(vocab_size: int) -> int:
    """Tokens whose logits make 512 MiB in float32, from 256 to 8,192, a power of two.

    On a GPU larger chunks gain nothing more, much smaller ones lose some percent of a step.
    """
    fitting = _CHUNK_LOGITS // vocab_size
    return max(256, min(8192, 1 << max(0, fitting.bit_length() - 1)))


@dataclass(kw_only=True)
class DecoderConfig:
    """Sizes and switches of a Llama-family decoder; wrong ones raise `ConfigError`, all at once."""

    vocab_size: int
    """Number of token ids; every id in the data must be smaller."""

    hidden_size: int
    """Width of the residual stream."""

    num_layers: int
    """Number of decoder blocks."""

    num_heads: int
    """Number of query heads."""

    intermediate_size: int | None = None
    """Width of the SwiGLU layer; None gives 8/3 of hidden_size, rounded up to a multiple of 64."""

    num_kv_heads: int | None = None
    """Number of key and value heads (grouped-query attention); None means num_heads."""

    head_dim: int | None = None
    """Width of one head; None means hidden_size / num_heads."""

    max_seq_len: int = 2048
    """Longest sequence the model accepts."""

    rope_theta: float = 10000.0
    """Base of the rotary position frequencies."""

    rope_scaling: dict[str, Any] | None = None
    """Llama-3 frequency scaling: rope_type 'llama3', factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings. None means unscaled."""

    norm_eps: float = 1e-5
    """Epsilon inside RMSNorm."""

    qk_norm: bool = False
    """Normalise queries and keys per head, as Qwen3 does."""

    tie_embeddings: bool = False
    """Use the embedding matrix as output head too."""

    attention_bias: bool = False
    """Give the four attention projections biases."""

    sliding_window: int | None = None
    """A token sees itself and the sliding_window - 1 tokens before it; None means all before it."""

    dropout: float = 0.0
    """Probability of dropping an element of a block's output before it is added."""

    attention: str = "auto"
    """Attention kernel: 'sdpa' (everywhere), 'flex' (block-sparse masks; trains on GPUs only), or
    'auto': flex for packed documents and windows where blocks are compiled on a GPU, else sdpa."""

    loss_chunk_tokens: int | None = None
    """Tokens whose logits exist at one time while the loss is computed; 0 means all of them, None
    as many as make 512 MiB of logits in float32 (256 MiB in bf16), from 256 to 8,192."""

    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""

    bos_token_id: int | None = None
    """Token that begins a document, for export and generation."""

    eos_token_id: int | list[int] | None = None
    """Token (or tokens) that ends a document; generation stops there."""

    pad_token_id: int | None = None
    """Token that fills padded places."""

    def __post_init__(self) -> None:
        self._fill_defaults()
        self.validate()

    @property
    def ffn_size(self) -> int:
        """`intermediate_size`, known to be an int."""
        return self.intermediate_size or -(-8 * self.hidden_size // (3 * 64)) * 64

    @property
    def kv_heads(self) -> int:
        """`num_kv_heads`, known to be an int."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """`head_dim`, known to be an int."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def chunk_tokens(self) -> int:
        """`loss_chunk_tokens`, known to be an int."""
        if self.loss_chunk_tokens is not None:
            return self.loss_chunk_tokens
        return default_chunk_tokens(self.vocab_size)

    def _fill_defaults(self) -> None:
        if any(not _is_positive_int(n) for n in (self.hidden_size, self.num_heads)):
            return  # validate() reports these; nothing can be derived from them
        if self.intermediate_size is None:
            self.intermediate_size = self.ffn_size
        if self.num_kv_heads is None:
            self.num_kv_heads = self.num_heads
        if self.head_dim is None and self.hidden_size % self.num_heads == 0:
            self.head_dim = self.head_size

    def validate(self) -> None:
        """Raise one `ConfigError` with every broken rule."""
        problems = _number_problems(self)
        if not problems:
            problems += _shape_problems(self)
        problems += _rope_scaling_problems(self.rope_scaling)
        if self.attention not in ATTENTION_KINDS:
            problems.append(unknown("attention", self.attention, ATTENTION_KINDS))
        if self.attention_bias and self.sliding_window is not None and not self.qk_norm:
            problems.append(
                "attention_bias=True with sliding_window needs qk_norm=True: of the exported "
                "families only Qwen3 has both (Mistral has no biases)"
            )
        if problems:
            raise ConfigError(problems)

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, as plain data."""
        return asdict(self)

    def to_json_string(self) -> str:
        """The fields as JSON text; transformers' callbacks log a model's config through this."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def num_parameters(self) -> int:
        """Exact count of the parameters of the model; a tied matrix counts once."""
        query, key = self.num_heads * self.head_size, self.kv_heads * self.head_size
        vectors = 2 * self.hidden_size
        if self.attention_bias:
            vectors += query + 2 * key + self.hidden_size
        if self.qk_norm:
            vectors += 2 * self.head_size
        embedding = self.vocab_size * self.hidden_size
        body = self.num_layers * (self._layer_matrices() + vectors) + self.hidden_size
        return body + embedding * (1 if self.tie_embeddings else 2)

    def num_matmul_parameters(self) -> int:
        """Parameters that take part in a matrix product: the head is, the embedding is not."""
        return self.num_layers * self._layer_matrices() + self.vocab_size * self.hidden_size

    def flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs (forward and backward) per token of causal sequences of `seq_len`.

        Six per matrix parameter, and for attention twelve per head element and key seen: a token
        sees seq_len / 2 keys on average, fewer under a sliding window.
        """
        window = min(seq_len, self.sliding_window or seq_len)
        seen_twice = 2 * window - window * window / seq_len
        attention = 6 * self.num_layers * self.num_heads * self.head_size * seen_twice
        return 6 * self.num_matmul_parameters() + int(attention)

    def _layer_matrices(self) -> int:
        heads = 2 * self.num_heads + 2 * self.kv_heads
        return self.hidden_size * (heads * self.head_size + 3 * self.ffn_size)


def check_fields(given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for names that are no field of `DecoderConfig` and for missing ones."""
    known = {f.name: f for f in fields(DecoderConfig)}
    problems = [unknown("decoder option", name, known) for name in given if name not in known]
    problems += [
        f"decoder option {name!r} is required and was not given"
        for name, f in known.items()
        if f.default is MISSING and f.default_factory is MISSING and name not in given
    ]
    if problems:
        raise ConfigError(problems)


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_problems(config: DecoderConfig) -> list[str]:
    problems = []
    for name in _POSITIVE_INTS:
        value = getattr(config, name)
        if value is not None and not _is_positive_int(value):
            problems.append(f"{name}={value!r}: a whole number above 0 is needed")
    for name in ("rope_theta", "norm_eps", "initializer_range"):
        value = getattr(config, name)
        if not _is_number(value) or value <= 0:
            problems.append(f"{name}={value!r}: a number above 0 is needed")
    for name in _FLAGS:
        if not isinstance(getattr(config, name), bool):
            problems.append(f"{name}={getattr(config, name)!r}: true or false is needed")
    if not _is_number(config.dropout) or not 0 <= config.dropout < 1:
        problems.append(f"dropout={config.dropout!r}: a number from 0 to below 1 is needed")
    chunk = config.loss_chunk_tokens
    if chunk is not None and chunk != 0 and not _is_positive_int(chunk):
        problems.append(f"loss_chunk_tokens={chunk!r}: 0 (no chunks) or a number above 0 is needed")
    return problems


def _shape_problems(config: DecoderConfig) -> list[str]:
    problems = []
    if config.head_dim is None:
        problems.append(
            f"hidden_size={config.hidden_size} is not divisible by num_heads={config.num_heads}; "
            "change one of them or give head_dim"
        )
    elif config.head_dim % 2:
        problems.append(f"head_dim={config.head_dim} must be even: rotary positions pair elements")
    if config.num_heads % config.kv_heads:
        problems.append(
            f"num_heads={config.num_heads} is not divisible by num_kv_heads={config.num_kv_heads}"
        )
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    special = [("bos_token_id", config.bos_token_id), ("pad_token_id", config.pad_token_id)]
    for name, token in special + [("eos_token_id", token) for token in eos]:
        if token is not None and not (isinstance(token, int) and 0 <= token < config.vocab_size):
            problems.append(
                f"{name}={token!r} is outside the vocabulary: 0 to {config.vocab_size - 1} "
                f"(vocab_size={config.vocab_size})"
            )
    return problems


def _rope_scaling_problems(scaling: object) -> list[str]:
    if scaling is None:
        return []
    if not isinstance(scaling, Mapping):
        return [
            f"rope_scaling={scaling!r}: a mapping with {', '.join(ROPE_SCALING_KEYS)} is needed"
        ]
    problems = [
        unknown("rope_scaling key", key, ROPE_SCALING_KEYS)
        for key in scaling
        if key not in ROPE_SCALING_KEYS
    ]
    if scaling.get("rope_type") != "llama3":
        given = scaling.get("rope_type")
        problems.append(f"rope_scaling: rope_type={given!r} is not supported; allowed: 'llama3'")
    for key in ROPE_SCALING_KEYS[:-1]:
        if not _is_number(scaling.get(key)) or scaling[key] <= 0:
            problems.append(f"rope_scaling: {key}={scaling.get(key)!r}: a number above 0 is needed")
    if not problems and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        problems.append(
            f"rope_scaling: high_freq_factor={scaling['high_freq_factor']} must exceed "
            f"low_freq_factor={scaling['low_freq_factor']}"
        )
    return problems
