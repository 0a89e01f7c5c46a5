"""Text generation: the cache changes nothing, padding is invisible, sampling options hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headway.errors import ConfigError
from headway.models import Decoder, KVCache, generate


def build(**change: Any) -> Decoder:
    torch.manual_seed(4)
    sizes: dict[str, Any] = {
        "vocab_size": 60,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "max_seq_len": 64,
        "initializer_range": 0.2,
    }
    return Decoder(**{**sizes, **change})


class LogitsOnly(nn.Module):
    """Hides the decoder, so that generation has only logits to go by."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.decoder(input_ids).logits


PROMPT = torch.tensor([[5, 9, 2, 33, 7, 50], [8, 1, 1, 4, 2, 59]])


@pytest.mark.parametrize("change", [{}, {"sliding_window": 5}, {"qk_norm": True}])
def test_cached_greedy_equals_uncached(change: dict[str, Any]) -> None:
    model = build(**change)
    cached = model.generate(PROMPT, max_new_tokens=20, do_sample=False)
    slow = generate(LogitsOnly(model), PROMPT, max_new_tokens=20, do_sample=False)
    assert torch.equal(cached, slow) and cached.shape == (2, 26)


@torch.no_grad()
def test_cache_in_pieces_equals_one_pass() -> None:
    model = build().eval()
    ids = torch.randint(0, 60, (2, 15))
    cache = KVCache(model.config, batch_size=2, max_len=15, device="cpu", dtype=torch.float32)
    pieces = torch.cat([model(part, cache=cache).logits for part in ids.split([6, 1, 8], 1)], 1)
    torch.testing.assert_close(pieces, model(ids).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="holds 15 tokens"):
        model(ids[:, :1], cache=cache)


@pytest.mark.parametrize("window", [None, 4])
def test_left_padded_prompts_continue_as_if_alone(window: int | None) -> None:
    model = build(sliding_window=window)
    short = PROMPT[:1, 2:]
    padded, mask = PROMPT.clone(), torch.ones_like(PROMPT)
    padded[0, :2], mask[0, :2] = 0, 0
    batch = generate(model, padded, max_new_tokens=9, do_sample=False, attention_mask=mask)
    alone = generate(model, short, max_new_tokens=9, do_sample=False)
    assert torch.equal(batch[0, 2:], alone[0])


def test_stops_at_eos_and_pads() -> None:
    model = build()
    free = generate(model, PROMPT, max_new_tokens=12, do_sample=False)
    eos = int(free[0, 8])
    out = generate(
        model, PROMPT, max_new_tokens=12, do_sample=False, eos_token_id=eos, pad_token_id=57
    )
    first = out[0, 6:].tolist()
    end = first.index(eos)
    assert set(first[end + 1 :]) <= {57}
    assert (
        generate(
            model, PROMPT[:1], max_new_tokens=12, do_sample=False, eos_token_id=[eos, 58]
        ).shape[1]
        == 6 + end + 1
    )


def test_sampling_is_reproducible_and_restores_the_mode() -> None:
    model = build(dropout=0.4).train()
    model.model.norm.eval()

    def draw(seed: int, **options: Any) -> torch.Tensor:
        rng = torch.Generator().manual_seed(seed)
        return generate(model, PROMPT, max_new_tokens=15, generator=rng, **options)

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert model.training and not model.model.norm.training
    greedy = generate(model, PROMPT, max_new_tokens=15, do_sample=False)
    assert torch.equal(draw(3, top_k=1), greedy)
    assert torch.equal(draw(3, top_p=1e-6), greedy)
    assert torch.equal(draw(3, temperature=1e-4), greedy)


@pytest.mark.parametrize("temperature", [1e-45, 1e-300])
def test_the_coldest_temperatures_take_the_likeliest_token(temperature: float) -> None:
    model = build()
    greedy = generate(model, PROMPT, max_new_tokens=8, do_sample=False)
    assert torch.equal(generate(model, PROMPT, max_new_tokens=8, temperature=temperature), greedy)


def test_repetition_penalty_avoids_seen_tokens() -> None:
    out = generate(build(), PROMPT, max_new_tokens=30, do_sample=False, repetition_penalty=1e6)
    for row in out:
        assert len(set(row[6:].tolist()) & set(row[:6].tolist())) == 0
        assert len(set(row[6:].tolist())) == 30


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 59}, "max_seq_len=64"),
    ],
)
def test_bad_options(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        generate(build(), PROMPT, **{"max_new_tokens": 4, **options})


def test_a_module_without_logits_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one token"):
        generate(build(), PROMPT[:, :0], max_new_tokens=1)
    with pytest.raises(ConfigError, match="Flatten"):
        generate(nn.Flatten(), PROMPT, max_new_tokens=1)


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attention_mask: the shape \[2, 5\] given"):
        generate(build(), PROMPT, max_new_tokens=1, attention_mask=torch.ones(2, 5))


class HandsOn(nn.Module):
    """As wrappers do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.inner(*inputs, **named)


def test_padding_is_never_read_as_text() -> None:
    model = build()
    mask = torch.ones_like(PROMPT)
    mask[0, :2] = 0
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "attention_mask": mask}
    expected = generate(model, PROMPT, **options)
    # Positions count the padding, which turns all of them alike.
    assert torch.equal(generate(HandsOn(model), PROMPT, **options), expected)
    with pytest.raises(ConfigError, match=r"LogitsOnly.forward\(\) takes none"):
        generate(LogitsOnly(model), PROMPT, **options)
    whole = {**options, "attention_mask": torch.ones_like(PROMPT)}
    assert generate(LogitsOnly(model), PROMPT, **whole).shape == (2, 15)
