"""The decoder and transformers' Llama, Qwen3 and Mistral compute the same thing from one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.models import Decoder, DecoderConfig, load_pretrained, save_pretrained

transformers = pytest.importorskip("transformers")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len": 64,
    "initializer_range": 0.1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 500.0, "rope_scaling": LLAMA3},
    "llama-tied": {"tie_embeddings": True, "rope_scaling": LLAMA3, "num_kv_heads": 1},
    "llama-bias": {"attention_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 32, "rope_theta": 1e6, "norm_eps": 1e-6},
    "qwen3-window": {"qk_norm": True, "sliding_window": 7, "tie_embeddings": True},
    "mistral": {"sliding_window": 9, "head_dim": 24},
}


def build(family: str) -> Decoder:
    torch.manual_seed(7)
    model = Decoder(DecoderConfig(**{**SIZES, **FAMILIES[family]}))
    with torch.no_grad():  # fresh norms (1) and biases (0) would hide a swapped or dropped one
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def tokens(batch: int = 2, length: int = 40) -> torch.Tensor:
    return torch.randint(0, 96, (batch, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_our_folder_in_transformers(family: str, tmp_path: Path) -> None:
    model = build(family)
    save_pretrained(model, tmp_path, max_shard_bytes=40_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert theirs.config.model_type == family.split("-")[0]
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = tokens()
    torch.testing.assert_close(theirs(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_transformers_folder_in_ours(family: str, tmp_path: Path) -> None:
    ours_first, theirs_dir = tmp_path / "ours", tmp_path / "theirs"
    save_pretrained(build(family), ours_first)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(ours_first)
    theirs.save_pretrained(theirs_dir, max_shard_size="60KB")
    model = load_pretrained(theirs_dir)
    assert model.config == build(family).config
    ids = tokens()
    torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@torch.no_grad()
def test_transformers_own_random_model(family: str, tmp_path: Path) -> None:
    """A model that transformers itself configured and drew, saved as one file."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": [5, 6],
    }
    extra = {
        "mistral": {"sliding_window": 8},
        "llama": {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}},
    }.get(family, {})
    config = transformers.AutoConfig.for_model(family, **sizes, **extra)
    torch.manual_seed(1)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path)
    assert model.config.eos_token_id == [5, 6]
    ids = tokens()
    torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama-tied", "qwen3", "mistral"])
def test_loss_and_gradients(family: str, tmp_path: Path) -> None:
    model = build(family)
    save_pretrained(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokens()
    labels = ids.clone()
    labels[:, :5] = -100
    labels[1, 20:] = -100
    expected = theirs(ids, labels=labels).loss
    loss = model(ids, labels=labels).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    loss.backward()
    expected.backward()
    theirs_grads = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        grad = theirs_grads[name].grad
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-3, atol=1e-5, msg=name)
    shared = theirs(ids, labels=labels, num_items_in_batch=123).loss
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=123).loss, shared)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.no_grad()
def test_left_padding(family: str, tmp_path: Path) -> None:
    model = build(family)
    save_pretrained(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    expected = theirs(ids, attention_mask=mask).logits
    logits = model(ids, attention_mask=mask).logits
    real = mask.bool()
    torch.testing.assert_close(logits[real], expected[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama-tied", "qwen3", "mistral"])
def test_greedy_generation(family: str, tmp_path: Path) -> None:
    from headway.models import generate

    model = build(family)
    save_pretrained(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    ids[0, :4] = ids[
        0, 4
    ]  # transformers counts padding as repeated tokens; here it changes nothing
    options: dict[str, Any] = {
        "max_new_tokens": 14,
        "do_sample": False,
        "attention_mask": mask,
        "repetition_penalty": 1.3,
        "pad_token_id": 0,
    }
    ours = generate(model, ids, **options)
    assert torch.equal(ours, generate(theirs, ids, **options))


def test_a_model_of_transformers_ends_where_its_generation_config_says(tmp_path: Path) -> None:
    from headway.models import generate

    save_pretrained(build("llama-tied"), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokens(1, 12)
    options: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}
    free = theirs.generate(ids, eos_token_id=None, **options)
    assert free.shape[1] == 26
    # As chat models have it: more ends than the model's own configuration tells.
    theirs.config.eos_token_id = 1
    theirs.generation_config.eos_token_id = [1, int(free[0, 15])]
    stopped = generate(theirs, ids, **options)
    assert torch.equal(stopped, theirs.generate(ids, **options))
    assert stopped.shape[1] < 26


def test_a_window_that_a_file_does_not_name_is_that_of_transformers() -> None:
    from headway.models.hf_config import from_hf_config

    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    named = {"model_type": "mistral", **sizes}
    theirs = transformers.MistralConfig(**sizes).sliding_window
    assert from_hf_config(named).sliding_window == theirs is not None
    assert from_hf_config({**named, "sliding_window": None}).sliding_window is None


def test_what_a_model_of_transformers_says_of_its_output_changes_nothing(tmp_path: Path) -> None:
    from headway.models import generate

    save_pretrained(build("llama-tied"), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokens(2, 12)
    expected = generate(theirs, ids, max_new_tokens=5, do_sample=False)
    theirs.generation_config.do_sample = True
    theirs.generation_config.return_dict_in_generate = True
    theirs.generation_config.num_return_sequences = 2
    assert torch.equal(generate(theirs, ids, max_new_tokens=5, do_sample=False), expected)
    assert torch.equal(generate(theirs, ids, max_new_tokens=5, temperature=1e-45), expected)
