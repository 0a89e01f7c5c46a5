"""Model folders and tied weights, without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from headway.errors import ConfigError
from headway.models import (
    Decoder,
    DecoderConfig,
    from_hf_config,
    hf_config_of,
    load_causal_lm,
    load_pretrained,
    load_state,
    save_pretrained,
    state_for_export,
    to_hf_config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "eos_token_id": 3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": LLAMA3, "tie_embeddings": True, "dropout": 0.1},
        {"qk_norm": True, "loss_chunk_tokens": 0},
        {"qk_norm": True, "sliding_window": 16, "attention_bias": True},
        {"sliding_window": 16, "attention": "flex"},
    ],
)
def test_config_round_trip(change: dict[str, Any]) -> None:
    config = DecoderConfig(**SIZES, **change)
    stored = json.loads(json.dumps(to_hf_config(config)))
    assert from_hf_config(stored) == config
    without_v5 = {k: v for k, v in stored.items() if k not in ("rope_parameters", "dtype")}
    assert from_hf_config(without_v5) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "lama"}, ["'lama'", "did you mean 'llama'"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
        ({"mlp_bias": True}, ["mlp_bias=True"]),
        ({"attention_dropout": 0.1}, ["attention_dropout=0.1"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, ["rope_type='yarn'"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ({"hidden_size": None, "vocab_size": 0}, ["vocab_size=0"]),
    ],
)
def test_unsupported_config_names_the_field(change: dict[str, Any], words: list[str]) -> None:
    stored = {**to_hf_config(DecoderConfig(**SIZES)), **change}
    if stored["hidden_size"] is None:
        stored["hidden_size"] = 32
    with pytest.raises(ConfigError) as caught:
        from_hf_config(stored)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("tied", [False, True])
def test_folder_round_trip(tmp_path: Path, tied: bool) -> None:
    model = Decoder(**SIZES, tie_embeddings=tied, dropout=0.2)
    save_pretrained(model, tmp_path, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == 4 * model.config.num_parameters()
    assert ("lm_head.weight" in index["weight_map"]) is not tied
    with safe_open(tmp_path / files[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    loaded = load_pretrained(tmp_path)
    assert loaded.config == model.config
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    ids = torch.arange(30)[None]
    assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)
    save_pretrained(model, tmp_path)  # fewer shards now: the old ones must not linger
    assert [path.name for path in tmp_path.glob("*.safetensors")] == [
        "model-00001-of-00001.safetensors"
    ]


def test_load_options(tmp_path: Path) -> None:
    save_pretrained(Decoder(**SIZES), tmp_path)
    model = load_pretrained(
        tmp_path, dtype=torch.bfloat16, config_overrides={"dropout": 0.3, "attention": "flex"}
    )
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.rotary_emb.cos.dtype == torch.float32
    assert (model.config.dropout, model.config.attention) == (0.3, "flex")
    assert isinstance(load_causal_lm(tmp_path), Decoder)
    with pytest.raises(ConfigError, match="did you mean 'dropout'"):
        load_pretrained(tmp_path, config_overrides={"dropuot": 0.3})


def test_other_families_go_to_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path)
    assert type(model).__name__ == "GPT2LMHeadModel"
    described = hf_config_of(model)
    assert described is not None and described["architectures"] == ["GPT2LMHeadModel"]
    tensors, aliases = state_for_export(model)
    assert aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert list(tensors) == sorted(tensors) and "lm_head.weight" not in tensors


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_pretrained(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_pretrained(tmp_path)
    save_pretrained(Decoder(**SIZES), tmp_path)
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_pretrained(tmp_path)
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ConfigError, match="lacks the weight file"):
        load_pretrained(tmp_path)


def test_weights_that_do_not_fit_the_model() -> None:
    model = Decoder(**SIZES)
    tensors, aliases = state_for_export(Decoder(**SIZES))
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = torch.zeros(41, 32)
    tensors["extra"] = torch.zeros(1)
    with pytest.raises(ConfigError) as caught:
        load_state(model, tensors, aliases)
    text = str(caught.value)
    assert "no tensor 'model.norm.weight'" in text and "[41, 32]" in text and "'extra'" in text


class Tied(nn.Module):
    """A user's module: a tie of its own, a persistent buffer, a view of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Embedding(6, 4)
        self.decode = nn.Linear(4, 6, bias=False)
        self.decode.weight = self.encode.weight
        self.register_buffer("steps", torch.arange(3))


def test_ties_of_any_module() -> None:
    model = Tied()
    tensors, aliases = state_for_export(model)
    assert list(tensors) == ["encode.weight", "steps"]
    assert aliases == {"decode.weight": "encode.weight"}
    other = Tied()
    load_state(other, tensors, aliases)
    assert torch.equal(other.decode.weight, model.encode.weight)
    assert other.decode.weight is other.encode.weight
    with torch.device("meta"):
        empty = Tied()
    load_state(empty, tensors, aliases)
    assert empty.decode.weight is empty.encode.weight and not empty.encode.weight.is_meta
    assert hf_config_of(model) is None


def test_tied_weights_load_into_an_untied_module() -> None:
    tensors, aliases = state_for_export(Decoder(**SIZES, tie_embeddings=True))
    untied = Decoder(**SIZES)
    load_state(untied, tensors, aliases)
    assert torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_a_state_that_is_no_tensor_is_refused() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(ConfigError, match="_extra_state"):
        state_for_export(Extra(2, 2))


def test_a_name_that_the_model_lists_as_tied_is_never_the_stored_one() -> None:
    class Listed(nn.Module):
        _tied_weights_keys = ("decoder.weight",)

        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.Embedding(3, 2)
            self.shared = nn.Embedding(3, 2)
            self.decoder.weight = self.shared.weight

    # Both are embeddings and "decoder" comes first by name: only the list decides.
    assert state_for_export(Listed())[1] == {"decoder.weight": "shared.weight"}
