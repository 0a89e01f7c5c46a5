"""Streamed initial values: the same as those of a model built whole, without holding it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.errors import ConfigError
from headway.models import Decoder, load_causal_lm, save_pretrained
from headway.models.initial import blank_causal_lm, can_stream, initial_tensors
from headway.testing.tiny import tiny_decoder, tiny_llama


@dataclass
class _Source:
    make: Any = None
    weights: Path | None = None
    num_built: int = 0

    def build(self) -> nn.Module:
        self.num_built += 1
        return self.make()


def _on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()


def _all_named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fields", [{}, {"tie_embeddings": True}, {"qk_norm": True}, {"attention_bias": True}]
)
def test_drawn_values_are_those_of_the_constructor(fields: dict, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(5)
        whole = tiny_decoder(**fields)
        after = torch.rand(3)
        meta = _on_meta(lambda: tiny_decoder(**fields))
    finally:
        torch.set_default_dtype(torch.float32)
    source = _Source()
    torch.manual_seed(5)
    wanted = _all_named(whole)
    drawn = dict(initial_tensors(source, meta, wanted))
    assert torch.equal(torch.rand(3, dtype=dtype), after)
    assert drawn.keys() == wanted.keys()
    assert all(torch.equal(drawn[name], wanted[name]) for name in wanted)
    assert source.num_built == 0


def test_a_part_is_cut_from_the_same_draws() -> None:
    torch.manual_seed(5)
    whole = tiny_decoder()
    torch.manual_seed(5)
    meta = _on_meta(tiny_decoder)
    part = (slice(60, 131), slice(0, 32))
    [(name, value)] = initial_tensors(_Source(), meta, ["lm_head.weight"], {"lm_head.weight": part})
    assert name == "lm_head.weight"
    assert torch.equal(value, whole.lm_head.weight[part])
    assert value.untyped_storage().nbytes() == value.numel() * 4, "the rest is not kept"


def test_one_value_at_a_time_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = _on_meta(lambda: tiny_decoder(num_layers=3))
    parts = {name: (slice(0, 1),) * p.dim() for name, p in meta.named_parameters()}
    drawn: list[weakref.ref[torch.Tensor]] = []
    num_alive: list[int] = []
    draw = nn.init.normal_

    def watched_draw(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        num_alive.append(sum(one() is not None for one in drawn))
        drawn.append(weakref.ref(tensor))
        return draw(tensor, **options)

    monkeypatch.setattr(nn.init, "normal_", watched_draw)
    for _, value in initial_tensors(_Source(), meta, list(parts), parts):
        assert value.untyped_storage().nbytes() == 4, "a part keeps nothing of the rest"
    assert len(drawn) > 10
    assert not any(num_alive), "an earlier value is still held while the next one is drawn"


def _loads_its_own_values() -> Decoder:
    model = tiny_decoder()
    model.load_state_dict({n: torch.ones_like(t) for n, t in model.state_dict().items()})
    return model


def _casts() -> Decoder:
    return tiny_decoder().to(torch.bfloat16)


def _draws_the_head_again() -> Decoder:
    model = tiny_decoder()
    nn.init.zeros_(model.lm_head.weight)
    return model


def _replaces_the_head() -> Decoder:
    model = tiny_decoder()
    model.lm_head = nn.Linear(32, 258, bias=False)
    return model


@pytest.mark.parametrize(
    "make", [_loads_its_own_values, _casts, _draws_the_head_again, _replaces_the_head, tiny_llama]
)
def test_a_model_with_values_of_its_own_is_built_whole(make: Any) -> None:
    torch.manual_seed(5)
    whole = make()
    torch.manual_seed(5)
    source, meta = _Source(make), _on_meta(make)
    assert not can_stream(source, meta)
    wanted = _all_named(whole)
    values = dict(initial_tensors(source, meta, wanted))
    assert source.num_built == 1
    assert all(torch.equal(values[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_folder_is_read_by_parts(tmp_path: Path, tied: bool, dtype: torch.dtype | None) -> None:
    save_pretrained(tiny_decoder(tie_embeddings=tied), tmp_path, max_shard_bytes=30_000)
    whole = load_causal_lm(tmp_path, dtype=dtype)
    meta = blank_causal_lm(tmp_path, dtype=dtype)
    source = _Source(weights=tmp_path)
    assert can_stream(source, meta)
    wanted = _all_named(whole)
    values = dict(initial_tensors(source, meta, wanted))
    assert values.keys() == wanted.keys()
    assert all(torch.equal(values[name], wanted[name]) for name in wanted)
    part = (slice(129, 258), slice(0, 32))
    parts = {"lm_head.weight": part, "model.norm.weight": (slice(0, 0),)}
    values = dict(initial_tensors(source, meta, list(parts), parts))
    assert torch.equal(values["lm_head.weight"], wanted["lm_head.weight"][part])
    assert values["model.norm.weight"].shape == (0,)


def test_a_folder_of_transformers_is_read_by_parts(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    whole = load_causal_lm(tmp_path)
    meta = blank_causal_lm(tmp_path)
    source = _Source(lambda: load_causal_lm(tmp_path), weights=tmp_path)
    wanted = _all_named(whole)
    values = dict(initial_tensors(source, meta, wanted))
    assert values.keys() == wanted.keys()
    assert all(torch.equal(values[name], wanted[name]) for name in wanted)


def test_derived_buffers_of_a_transformers_folder(tmp_path: Path) -> None:
    from transformers import GemmaConfig, GemmaForCausalLM

    config = GemmaConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=64, vocab_size=100, head_dim=16,
    )  # fmt: skip
    GemmaForCausalLM(config).save_pretrained(tmp_path)
    whole, meta = load_causal_lm(tmp_path), blank_causal_lm(tmp_path)
    source = _Source(weights=tmp_path)
    assert can_stream(source, meta)
    torch.manual_seed(1)
    values = dict(initial_tensors(source, meta, _all_named(whole)))
    assert torch.equal(values["model.rotary_emb.inv_freq"], whole.model.rotary_emb.inv_freq)
    assert all(torch.equal(values[name], t) for name, t in _all_named(whole).items())
    assert nn.Linear(2, 2).weight.device.type == "cpu", "modules are made as before"


def test_another_model_the_second_time_is_refused() -> None:
    source = _Source(lambda: nn.Linear(2, 2, bias=False))
    meta = _on_meta(lambda: nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="lacks bias: model_init must make the same model"):
        dict(initial_tensors(source, meta, ["weight", "bias"]))
