"""DecoderConfig: derived sizes, rules reported together, counts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.models import DecoderConfig

SMALL: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "num_layers": 3, "num_heads": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_derived_sizes() -> None:
    config = DecoderConfig(**SMALL)
    assert (config.num_kv_heads, config.head_dim, config.intermediate_size) == (4, 16, 192)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 5}, ["hidden_size=64", "num_heads=5"]),
        ({"num_kv_heads": 3}, ["num_heads=4", "num_kv_heads=3"]),
        ({"head_dim": 15}, ["head_dim=15", "even"]),
        ({"vocab_size": 0}, ["vocab_size=0"]),
        ({"num_layers": "3"}, ["num_layers='3'"]),
        ({"dropout": 1.0}, ["dropout=1.0"]),
        ({"attention": "fley"}, ["'fley'", "did you mean 'flex'"]),
        ({"rope_scaling": {**LLAMA3, "facto": 2}}, ["'facto'", "did you mean 'factor'"]),
        ({"rope_scaling": {**LLAMA3, "rope_type": "yarn"}}, ["'yarn'", "llama3"]),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, ["high_freq_factor=0.5"]),
        ({"rope_scaling": "llama3"}, ["rope_scaling='llama3'"]),
        ({"eos_token_id": 96}, ["eos_token_id=96", "vocab_size=96"]),
        ({"eos_token_id": [3, 200]}, ["eos_token_id=200"]),
        ({"loss_chunk_tokens": -1}, ["loss_chunk_tokens=-1"]),
        ({"tie_embeddings": "yes"}, ["tie_embeddings='yes'"]),
        ({"attention_bias": True, "sliding_window": 8}, ["attention_bias", "qk_norm"]),
    ],
)
def test_broken_rule_is_named(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        DecoderConfig(**{**SMALL, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_all_broken_rules_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        DecoderConfig(**{**SMALL, "vocab_size": -1, "dropout": 2.0, "attention": "none"})
    assert len(caught.value.problems) == 3


def test_flops_per_token() -> None:
    config = DecoderConfig(**SMALL)
    matrices = 3 * (4 * 64 * 64 + 3 * 64 * 192) + 96 * 64
    assert config.num_matmul_parameters() == matrices
    assert config.flops_per_token(128) == 6 * matrices + 6 * 3 * 64 * 128
    windowed = DecoderConfig(**SMALL, sliding_window=32)
    assert windowed.flops_per_token(32) == config.flops_per_token(32)
    assert windowed.flops_per_token(128) < config.flops_per_token(128)


def test_package_and_config_do_not_import_torch() -> None:
    code = (
        "import sys, headway.models as m; m.DecoderConfig; m.estimate_training_memory; "
        "m.to_hf_config; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
