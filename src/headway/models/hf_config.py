"""Hugging Face's spelling of a decoder's configuration, in both directions. Imports no torch.

Owns: `to_hf_config`, `from_hf_config`, the three families. Does not own: weights (hf.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError, unknown
from headway.models.config import DecoderConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
OWN_KEY = "headway"
"""Where config.json keeps the fields that Hugging Face's families have no name for."""

OWN_FIELDS = ("attention", "dropout", "loss_chunk_tokens")
_SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "head_dim",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_RENAMED = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
_MISTRAL_WINDOW = 4096
"""What transformers takes where a file of this family has no such key; null means none."""
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def family_of(config: DecoderConfig) -> str:
    """The model_type whose architecture computes what `config` describes."""
    if config.qk_norm:
        return "qwen3"
    return "mistral" if config.sliding_window is not None else "llama"


def to_hf_config(config: DecoderConfig, *, dtype: str = "float32") -> dict[str, Any]:
    """The contents of a config.json that transformers 4 and 5 both read."""
    family = family_of(config)
    rope_scaling = dict(config.rope_scaling) if config.rope_scaling else None
    out: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_cache": True,
        # Version 4 reads the first of each pair, version 5 the second.
        "torch_dtype": dtype,
        "dtype": dtype,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling,
        "rope_parameters": {
            **(rope_scaling or {"rope_type": "default"}),
            "rope_theta": config.rope_theta,
        },
    }
    out |= {name: getattr(config, name) for name in _SAME_NAME}
    out |= {theirs: getattr(config, ours) for ours, theirs in _RENAMED.items()}
    if family != "mistral":
        out["attention_bias"] = config.attention_bias
    if family == "llama":
        out["mlp_bias"] = False
    elif family == "mistral":
        out["sliding_window"] = config.sliding_window
    else:
        slides = config.sliding_window is not None
        out["use_sliding_window"] = slides
        out["sliding_window"] = config.sliding_window
        out["max_window_layers"] = 0 if slides else config.num_layers
        kind = "sliding_attention" if slides else "full_attention"
        out["layer_types"] = [kind] * config.num_layers
    out[OWN_KEY] = {name: getattr(config, name) for name in OWN_FIELDS}
    return out


def is_supported_family(hf_config: Mapping[str, Any]) -> bool:
    """Whether the configuration's model_type is one the reference decoder computes."""
    return hf_config.get("model_type") in ARCHITECTURES


def from_hf_config(hf_config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder configuration a config.json describes; `ConfigError` for what it lacks."""
    family = hf_config.get("model_type")
    if family not in ARCHITECTURES:
        raise ConfigError(unknown("model_type", family, ARCHITECTURES))
    problems = [f"config.json: {name!r} is missing" for name in _REQUIRED if name not in hf_config]
    problems += _unsupported(hf_config)
    if problems:
        raise ConfigError(problems)
    given = {name: hf_config[name] for name in _SAME_NAME if hf_config.get(name) is not None}
    given |= {
        ours: hf_config[theirs]
        for ours, theirs in _RENAMED.items()
        if hf_config.get(theirs) is not None
    }
    given.setdefault("norm_eps", 1e-6)  # transformers' default, not ours
    theta, scaling = _rope_of(hf_config)
    own = hf_config.get(OWN_KEY) or {}
    return DecoderConfig(
        **given,
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm=family == "qwen3",
        attention_bias=bool(hf_config.get("attention_bias", False)) and family != "mistral",
        sliding_window=_window_of(hf_config),
        **{name: own[name] for name in OWN_FIELDS if name in own},
    )


def _unsupported(hf_config: Mapping[str, Any]) -> list[str]:
    plain: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish"),
        "mlp_bias": (False,),
        "attention_dropout": (0.0,),
        "partial_rotary_factor": (1.0,),
    }
    problems = [
        f"config.json: {name}={hf_config[name]!r} is not supported by the reference decoder"
        + (f"; supported: {allowed[0]!r}" if allowed else "")
        for name, allowed in plain.items()
        if hf_config.get(name) is not None and hf_config[name] not in allowed
    ]
    if hf_config.get("quantization_config") is not None:
        problems.append(
            "config.json: quantization_config: the folder's weights are quantized (by "
            f"{_method_of(hf_config['quantization_config'])}), so that they cannot be trained; "
            "start from the checkpoint that they were made of"
        )
    kinds = set(hf_config.get("layer_types") or [])
    if len(kinds) > 1 or kinds - {"full_attention", "sliding_attention"}:
        problems.append(
            f"config.json: layer_types mixes or holds {sorted(kinds)}; supported: all "
            "'full_attention' or all 'sliding_attention'"
        )
    rope = _rope_dict(hf_config)
    kind = _rope_type(rope)
    if kind not in ("default", "llama3"):
        problems.append(
            f"config.json: rope_type={kind!r} is not supported; supported: 'default', 'llama3'"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append("config.json: partial_rotary_factor other than 1.0 is not supported")
    return problems


def _method_of(block: Any) -> str:
    return str(block.get("quant_method", "?")) if isinstance(block, Mapping) else "?"


def _rope_dict(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {})


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _rope_of(hf_config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    rope = _rope_dict(hf_config)
    theta = rope.pop("rope_theta", None) or hf_config.get("rope_theta") or 10000.0
    if _rope_type(rope) == "default":
        return float(theta), None
    drop = ("type", "rope_type", "partial_rotary_factor")
    scaling = {name: value for name, value in rope.items() if name not in drop}
    scaling.setdefault("original_max_position_embeddings", hf_config.get("max_position_embeddings"))
    return float(theta), {"rope_type": "llama3", **scaling}


def _window_of(hf_config: Mapping[str, Any]) -> int | None:
    """The window of every layer; Qwen3 keeps a width in the file even where no layer uses it."""
    family = hf_config["model_type"]
    unsaid = _MISTRAL_WINDOW if family == "mistral" else None
    window: int | None = hf_config.get("sliding_window", unsaid)
    if family == "llama" or window is None:
        return None
    if family == "mistral":
        return window
    if not hf_config.get("use_sliding_window", False):
        return None
    kinds = hf_config.get("layer_types")
    if kinds:
        return window if kinds[0] == "sliding_attention" else None
    first, layers = hf_config.get("max_window_layers", 28), hf_config["num_hidden_layers"]
    if 0 < first < layers:
        raise ConfigError(
            f"config.json: max_window_layers={first} mixes full and sliding layers, which is not "
            f"supported; supported: 0 (all slide) or {layers} and above (none does)"
        )
    return window if first == 0 else None
